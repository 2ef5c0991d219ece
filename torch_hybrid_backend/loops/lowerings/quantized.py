"""Quantized tensors: the operators `quantized_decomposed` of torch.ao, in which torchao's graphs and this package's own are written.

Each computes what PyTorch computes, rounding included: quantizing multiplies by the reciprocal of the scale in float32, rounds halves to even,
adds the zero point and clamps (per token and per group the zero point is added first). So integers are equal bit by bit.

The operators exist only once torch.ao's module is imported, which importing this module does. `choose_qparams_per_token` has no
lowering: capture takes it apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_hybrid_backend.core.precision import are_seven_bits
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Buffer, Const, Expr, Map, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, broadcast, lowers, reindex
from torch_hybrid_backend.loops.lowerings.arithmetic import clamp, lit
from torch_hybrid_backend.loops.lowerings.creation import to_copy
from torch_hybrid_backend.loops.lowerings.reducing import reduced
from torch_hybrid_backend.loops.lowerings.views import reshaped
from torch_hybrid_backend.loops.ops import add, call, cast, const, div, is_float, mul, sub, where
from torch_hybrid_backend.torch_private import quantized_operators

quantized = quantized_operators()

# One number for the whole tensor: a literal, or a tensor of one element.
Number = Value | float

lowers(quantized.convert_element_type.no_fuse)(to_copy)


def _number(x: Number, dtype: str) -> Expr:
    """A literal, or the one element of a tensor, as a scalar."""
    if isinstance(x, Value):
        return cast(x.at(tuple(as_index(0) for _ in x.shape)), dtype)
    return const(x, dtype)


def _reciprocal(scale: Number) -> Expr:
    """1 / scale in float64, as Python computes it, rounded to float32, as PyTorch does before it multiplies by a Python number."""
    if not isinstance(scale, Value):
        return const(1.0 / scale, "float32")
    wide = _number(scale, "float64")
    return cast(div(lit(wide, 1), wide), "float32")


def _is_zero(x: Expr) -> bool:
    return isinstance(x, Const) and x.value == 0


def _shifted(a: Expr, zero_point: Expr) -> Expr:
    return a if _is_zero(zero_point) else add(a, zero_point)


def _centred(a: Expr, zero_point: Expr) -> Expr:
    return a if _is_zero(zero_point) else sub(a, zero_point)


def _clamped(ctx: Context, a: Expr, low: Number, high: Number) -> Expr:
    """`a`, rounded already, in the result's dtype."""
    return cast(clamp(a, _number(low, a.dtype), _number(high, a.dtype)), ctx.out.dtype)


def _refuse_float8(ctx: Context, x: Value) -> None:
    if is_float(compute_dtype(ctx.out.dtype)) and is_float(compute_dtype(x.dtype)):
        raise Refuse(Reason.DTYPE, "floats of 8 bits are not quantized by kernels")


# One scale for a tensor


@lowers(
    quantized.quantize_per_tensor.default, quantized.quantize_per_tensor.tensor, quantized.quantize_per_tensor.tensor2
)
def quantize_per_tensor(
    ctx: Context, x: Value, scale: Number, zero_point: Number, quant_min: Number, quant_max: Number, dtype: torch.dtype
) -> Value:
    """clamp(round(x * (1 / scale)) + zero_point, quant_min, quant_max)."""
    _refuse_float8(ctx, x)

    def fn(a: Expr) -> Expr:
        whole = call("round_even", mul(a, _reciprocal(scale)))
        return _clamped(ctx, _shifted(whole, _number(zero_point, "float32")), quant_min, quant_max)

    return ctx.pointwise(fn, x, compute="float32")


@lowers(
    quantized.dequantize_per_tensor.default,
    quantized.dequantize_per_tensor.tensor,
    quantized.dequantize_per_tensor.tensor2,
)
def dequantize_per_tensor(
    ctx: Context,
    x: Value,
    scale: Number,
    zero_point: Number,
    quant_min: Number,
    quant_max: Number,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Value:
    """(x - zero_point) * scale, in float32 also where the result is of a half type."""
    _refuse_float8(ctx, x)

    def fn(a: Expr) -> Expr:
        return mul(_centred(a, _number(zero_point, a.dtype)), _number(scale, a.dtype))

    return ctx.pointwise(fn, x)


# Scales by channel, row or group: values of the tensor's shape


def _along(x: Value, vector: Value, axis: int) -> Value:
    """A vector along one dimension of x."""
    axis %= len(x.shape)
    return reindex(reshaped(vector, (x.shape[axis],)), x.shape, lambda index: (index[axis],))


def _by_row(x: Value, column: Value) -> Value:
    """Value with one number for each row, along the last dimension, of x."""
    return reshaped(column, (*x.shape[:-1], 1))


def _by_group(x: Value, numbers: Value, size: int) -> Value:
    """Value with one number for each `size` neighbours in a row of the matrix x."""
    rows, columns = x.shape
    if not isinstance(columns, int):
        raise Refuse(Reason.SYMBOLIC_SHAPE, "the length of rows that are quantized in groups must be known")
    groups = max(columns // size, 1)  # a row shorter than a group is one

    def place(index: tuple[Index, ...]) -> tuple[Index, ...]:
        return index[0], index[1] // size

    return reindex(reshaped(numbers, (rows, groups)), x.shape, place)


def _check(scales: Value, zero_points: Value | None) -> None:
    """PyTorch computes in the dtypes of scales and zero points: in half types, and narrow integers that wrap, kernels would not."""
    if scales.dtype not in ("float32", "float64"):
        raise Refuse(Reason.DTYPE, f"scales of dtype {scales.dtype} are left to eager")
    if zero_points is not None and zero_points.dtype not in ("int32", "int64", "float32", "float64"):
        raise Refuse(Reason.DTYPE, f"zero points of dtype {zero_points.dtype} are left to eager")


def _quantized(
    ctx: Context, x: Value, scales: Value, zero_points: Value, bounds: tuple[int, int], *, round_first: bool
) -> Value:
    _check(scales, zero_points)
    _refuse_float8(ctx, x)

    def fn(a: Expr, scale: Expr, zero_point: Expr) -> Expr:
        # Each step in the wider dtype of its operands, as PyTorch promotes.
        scaled = mul(cast(a, scales.dtype), div(lit(scale, 1), scale))
        scaled = call("round_even", scaled) if round_first else scaled
        if zero_points.dtype == "float64":
            scaled = cast(scaled, "float64")
        shifted = _shifted(scaled, cast(zero_point, scaled.dtype))
        return _clamped(ctx, shifted if round_first else call("round_even", shifted), *bounds)

    return _elementwise(ctx, fn, x, scales, zero_points)


def _dequantized(
    ctx: Context, x: Value, scales: Value, zero_points: Value | None, bounds: tuple[int, int] | None = None
) -> Value:
    """(x - zero_point) * scale. The difference is taken in the dtype of the scales, which holds the integers of 8 and 16 bits and their
    zero points exactly.

    `bounds`: between which graphs promise that x lies. Of 16 values or fewer they are part of what is computed: by them kernels know that
    4 bits hold x. So are those of constants of 7 bits, which are multiplied as bytes where there is no VNNI (ADR 60).
    """
    _check(scales, zero_points)
    _refuse_float8(ctx, x)

    def fn(a: Expr, scale: Expr, *zero_point: Expr) -> Expr:
        if is_narrow and bounds is not None:
            a = clamp(a, lit(a, bounds[0]), lit(a, bounds[1]))
        wide = cast(a, scales.dtype)
        if zero_point:
            wide = _centred(wide, cast(zero_point[0], scales.dtype))
        return cast(mul(wide, scale), compute_dtype(ctx.out.dtype))

    is_constant = isinstance(x, Buffer) and x.constant
    is_narrow = bounds is not None and (bounds[1] - bounds[0] < 16 or (is_constant and are_seven_bits(bounds)))
    if x.dtype not in ("int8", "uint8", "int16"):
        raise Refuse(Reason.DTYPE, f"quantized values of dtype {x.dtype} are left to eager")
    return _elementwise(ctx, fn, x, scales, *(() if zero_points is None else (zero_points,)))


def _elementwise(ctx: Context, fn: Callable[..., Expr], *operands: Value) -> Value:
    """`fn` of the elements of operands of the result's shape, each in its own dtype: `Context.pointwise` would cast all to one."""
    spread = [broadcast(operand, ctx.shape) for operand in operands]

    def at(index: tuple[Index, ...]) -> Expr:
        return fn(*(operand.at(index) for operand in spread))

    return Map(ctx.shape, ctx.out.dtype, at, tuple((operand, lambda index: index) for operand in spread))


@lowers(quantized.quantize_per_channel.default)
def quantize_per_channel(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Value:
    """Quantize as per tensor, with a scale and a zero point for each index of dimension `axis`."""
    numbers = _along(x, scales, axis), _along(x, zero_points, axis)
    return _quantized(ctx, x, *numbers, (quant_min, quant_max), round_first=True)


@lowers(quantized.dequantize_per_channel.default)
def dequantize_per_channel(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value | None,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Value:
    centre = None if zero_points is None else _along(x, zero_points, axis)
    return _dequantized(ctx, x, _along(x, scales, axis), centre, (quant_min, quant_max))


@lowers(quantized.quantize_per_token.default)
def quantize_per_token(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Value:
    """clamp(round(x * (1 / scale) + zero_point), quant_min, quant_max), with a scale for each row along the last dimension."""
    numbers = _by_row(x, scales), _by_row(x, zero_points)
    return _quantized(ctx, x, *numbers, (quant_min, quant_max), round_first=False)


@lowers(quantized.dequantize_per_token.default)
def dequantize_per_token(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    output_dtype: torch.dtype,
) -> Value:
    return _dequantized(ctx, x, _by_row(x, scales), _by_row(x, zero_points))


@lowers(quantized.quantize_per_channel_group.default)
def quantize_per_channel_group(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    group_size: int,
) -> Value:
    """Quantize as per token, with a scale for each `group_size` neighbours in a row. (Eager raises for NaN; a kernel cannot.)"""
    numbers = _by_group(x, scales, group_size), _by_group(x, zero_points, group_size)
    return _quantized(ctx, x, *numbers, (quant_min, quant_max), round_first=False)


@lowers(quantized.dequantize_per_channel_group.default)
def dequantize_per_channel_group(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value | None,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    group_size: int,
    output_dtype: torch.dtype,
) -> Value:
    centre = None if zero_points is None else _by_group(x, zero_points, group_size)
    return _dequantized(ctx, x, _by_group(x, scales, group_size), centre, (quant_min, quant_max))


# Scales found at run time


def _extent(ctx: Context, x: Value, axes: tuple[int, ...]) -> tuple[Value, Value]:
    """The least and the greatest value over `axes`, 0 among them."""
    if x.dtype != "float32":
        raise Refuse(Reason.DTYPE, f"scales of values of dtype {x.dtype} are found by eager")
    low = reduced(ctx, "min", x, axes, lambda a: call("min", a, lit(a, 0)), keepdim=True)
    return low, reduced(ctx, "max", x, axes, lambda a: call("max", a, lit(a, 0)), keepdim=True)


def _choices(
    ctx: Context, choose: Callable[[Expr, Expr], tuple[Expr, Expr]], low: Value, high: Value
) -> tuple[Value, Value]:
    """(scale, zero point), float64 and int64, of what `choose` makes of the extremes in float32."""

    def chosen(position: int) -> Value:
        spec = ctx.outs[position]
        extremes = (reshaped(low, spec.shape), reshaped(high, spec.shape))
        return ctx.pointwise(
            lambda a, b: choose(a, b)[position], *extremes, dtype=spec.dtype, compute="float32", shape=spec.shape
        )

    return chosen(0), chosen(1)


@lowers(quantized.choose_qparams.tensor)
def choose_qparams(
    ctx: Context, x: Value, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> tuple[Value, Value]:
    """A scale and a zero point by which quant_min .. quant_max cover the tensor's values and 0."""

    def choose(low: Expr, high: Expr) -> tuple[Expr, Expr]:
        scale = div(sub(high, low), lit(low, quant_max - quant_min))
        scale = call("max", scale, lit(low, eps))
        zero_point = sub(lit(low, quant_min), call("round_even", div(low, scale)))
        return scale, clamp(zero_point, lit(low, quant_min), lit(low, quant_max))

    return _choices(ctx, choose, *_extent(ctx, x, tuple(range(len(x.shape)))))


@lowers(quantized.choose_qparams_symmetric.tensor)
def choose_qparams_symmetric(
    ctx: Context, x: Value, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> tuple[Value, Value]:
    """A scale by which the range covers the tensor's largest magnitude; its zero point is 0, or 128 for uint8."""

    def choose(low: Expr, high: Expr) -> tuple[Expr, Expr]:
        scale = div(call("max", call("neg", low), high), lit(low, (quant_max - quant_min) / 2))
        return call("max", scale, lit(low, eps)), lit(low, 128 if dtype == torch.uint8 else 0)

    return _choices(ctx, choose, *_extent(ctx, x, tuple(range(len(x.shape)))))


@lowers(quantized.choose_qparams_per_token_asymmetric.default)
def choose_qparams_per_token_asymmetric(ctx: Context, x: Value, dtype: torch.dtype) -> tuple[Value, Value]:
    """A scale and a zero point for each row along the last dimension, for int8, as XNNPACK chooses them."""
    quant_min, quant_max = -128, 127

    def choose(low: Expr, high: Expr) -> tuple[Expr, Expr]:
        scale = div(sub(high, low), lit(low, quant_max - quant_min))
        scale = call("max", scale, lit(low, torch.finfo(torch.float32).eps))
        least, most = div(low, scale), div(high, scale)
        # From the end whose rounding error is smaller.
        errors = add(add(least, lit(low, quant_min)), add(most, lit(low, quant_max)))
        zero_point = where(
            call("gt", errors, lit(low, 0)), sub(lit(low, quant_min), least), sub(lit(low, quant_max), most)
        )
        return scale, call("round_even", clamp(zero_point, lit(low, quant_min), lit(low, quant_max)))

    return _choices(ctx, choose, *_extent(ctx, x, (len(x.shape) - 1,)))
