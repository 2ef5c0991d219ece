"""Reductions, softmax and normalisations.

Composites emit one operation per primitive reduction (two-pass mean and variance) over the same rows, which fusion joins into one
row kernel. Statistics of half types are kept in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Expr, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers, reindex
from torch_hybrid_backend.loops.lowerings import arithmetic as formula
from torch_hybrid_backend.loops.lowerings.arithmetic import lit
from torch_hybrid_backend.loops.lowerings.reducing import (
    Axes,
    axes_of,
    extent,
    kept_shape,
    moments,
    reduced,
    reduced_body,
)
from torch_hybrid_backend.loops.lowerings.views import channelwise, reshaped
from torch_hybrid_backend.loops.ops import add, call, cast, div, mul, sub, where
from torch_hybrid_backend.sizes.size import Dim, function
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten


def _accumulated(dtype: str) -> Callable[[Expr], Expr]:
    """Sums and products are accumulated in the compute dtype of the result: int32 in int64, bool in int64."""
    return lambda a: cast(a, compute_dtype(dtype))


# Sums, products, means


@lowers(aten.sum.default, aten.sum.dim_IntList)
def sum_(ctx: Context, x: Value, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    return _total(ctx, "sum", x, axes_of(dim, len(x.shape)), keepdim)


@lowers(aten.prod.default, aten.prod.dim_int)
def prod(ctx: Context, x: Value, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    return _total(ctx, "prod", x, axes_of(dim, len(x.shape)), keepdim)


def _total(ctx: Context, combiner: str, x: Value, axes: tuple[int, ...], keepdim: bool) -> Value:
    dtype = ctx.out.dtype
    if dtype == "bool":  # prod(dtype=torch.bool), sum(dtype=torch.bool)
        return reduced(ctx, "any" if combiner == "sum" else "all", x, axes, formula.nonzero, dtype, keepdim)
    return reduced(ctx, combiner, x, axes, _accumulated(dtype), dtype, keepdim)


@lowers(aten.mean.default, aten.mean.dim)
def mean(ctx: Context, x: Value, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Value:
    axes = axes_of(dim, len(x.shape))
    total = reduced(ctx, "sum", x, axes, _accumulated(ctx.out.dtype), compute_dtype(ctx.out.dtype), keepdim)
    return ctx.pointwise(lambda a: div(a, lit(a, extent(x.shape, axes))), total)


# Variance


def _variance(
    ctx: Context, x: Value, dim: Axes, correction: float | None, keepdim: bool, root: bool
) -> tuple[Value, Value]:
    """(variance or standard deviation, mean) in the result's shape."""
    axes = axes_of(dim, len(x.shape))
    average, squares = moments(ctx, x, axes)
    # As eager: fewer elements than the correction divide by zero (infinity or NaN), never by a negative number.
    count, taken = extent(x.shape, axes), 1 if correction is None else correction
    if isinstance(count, int):
        divisor: float | Dim = max(count - taken, 0)
    elif float(taken).is_integer():
        divisor = function("max", count - int(taken), 0)
    else:
        raise Refuse(Reason.SYMBOLIC_SHAPE, f"a variance of {count} elements corrected by {taken}")

    def fn(a: Expr) -> Expr:
        variance = div(a, lit(a, divisor))
        return call("sqrt", variance) if root else variance

    shape = kept_shape(x.shape, axes, keepdim)
    spread = ctx.pointwise(fn, reshaped(squares, shape), shape=shape)
    return spread, ctx.pointwise(lambda a: a, reshaped(average, shape), shape=shape)


@lowers(aten.var.correction, aten.std.correction)
def var(ctx: Context, x: Value, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False) -> Value:
    root = ctx.node is not None and ctx.node.target is aten.std.correction
    return _variance(ctx, x, dim, correction, keepdim, root)[0]


@lowers(aten.var_mean.correction, aten.std_mean.correction)
def var_mean(
    ctx: Context, x: Value, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    root = ctx.node is not None and ctx.node.target is aten.std_mean.correction
    return _variance(ctx, x, dim, correction, keepdim, root)


@lowers(aten.var.dim, aten.std.dim)
def var_dim(ctx: Context, x: Value, dim: Axes, unbiased: bool = True, keepdim: bool = False) -> Value:
    root = ctx.node is not None and ctx.node.target is aten.std.dim
    return _variance(ctx, x, dim, 1 if unbiased else 0, keepdim, root)[0]


# Extrema and logic


def _extremum(target: OpOverload, combiner: str) -> None:
    @lowers(target)
    def lower(ctx: Context, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
        return extreme(ctx, combiner, x, axes_of(dim, len(x.shape)), keepdim)


def extreme(ctx: Context, combiner: str, x: Value, axes: tuple[int, ...], keepdim: bool) -> Value:
    """The largest or smallest element, NaN if there is one; any or all of booleans."""
    if x.dtype == "bool":
        combiner = {"max": "any", "min": "all"}[combiner]
    return reduced(ctx, combiner, x, axes, dtype=x.dtype, keepdim=keepdim)


def _position(target: OpOverload, combiner: str) -> None:
    @lowers(target)
    def lower(ctx: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        return position(ctx, combiner, x, axes_of(dim, len(x.shape)), keepdim)


def position(ctx: Context, combiner: str, x: Value, axes: tuple[int, ...], keepdim: bool) -> Value:
    """Position of the largest or smallest element: the first of equals, NaN first; int64. Booleans are compared as numbers."""
    widen = (lambda a: cast(a, "int32")) if x.dtype == "bool" else None
    return reduced(ctx, combiner, x, axes, widen, "int64", keepdim)


def _extremum_and_position(target: OpOverload, combiner: str) -> None:
    @lowers(target)
    def lower(ctx: Context, x: Value, dim: int, keepdim: bool = False) -> tuple[Value | None, Value | None]:
        axes = axes_of(dim, len(x.shape))
        value = extreme(ctx, combiner, x, axes, keepdim) if ctx.wants(0) else None
        return value, position(ctx, f"arg{combiner}", x, axes, keepdim) if ctx.wants(1) else None


for _name in ("max", "min"):
    _extremum(getattr(aten, f"a{_name}").default, _name)
    _extremum(getattr(aten, _name).default, _name)
    _position(getattr(aten, f"arg{_name}").default, f"arg{_name}")
    _extremum_and_position(getattr(aten, _name).dim, _name)


@lowers(aten.aminmax.default)
def aminmax(ctx: Context, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    axes = axes_of(dim, len(x.shape))
    return extreme(ctx, "min", x, axes, keepdim), extreme(ctx, "max", x, axes, keepdim)


def _truth(name: str) -> None:
    packet = getattr(aten, name)

    @lowers(packet.default, packet.dim, packet.dims)
    def lower(ctx: Context, x: Value, dim: Axes = None, keepdim: bool = False) -> Value:
        if not isinstance(dim, (int, type(None))) and not dim:
            # dims=[] of any and all means: over no dimension.
            return ctx.pointwise(formula.nonzero, x, compute=compute_dtype(x.dtype))
        axes = axes_of(dim, len(x.shape))
        found = reduced(ctx, name, x, axes, formula.nonzero, "bool", keepdim)
        return found if ctx.out.dtype == "bool" else ctx.pointwise(lambda a: a, found)


_truth("any")
_truth("all")


# Norms and logarithms of sums


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    ctx: Context,
    x: Value,
    ord: float = 2,
    dim: Axes = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    out = compute_dtype(ctx.out.dtype)
    axes = axes_of(dim, len(x.shape))

    def size(a: Expr) -> Expr:
        return call("abs", cast(a, out))

    def total(combiner: str, fn: Callable[[Expr], Expr]) -> Value:
        return reduced(ctx, combiner, x, axes, fn, out, keepdim)

    if math.isinf(ord):
        return ctx.pointwise(lambda a: a, total("max" if ord > 0 else "min", size))
    if ord == 0:
        return ctx.pointwise(lambda a: a, total("sum", lambda a: cast(formula.nonzero(a), out)))
    if ord == 1:
        return ctx.pointwise(lambda a: a, total("sum", size))
    powers = total("sum", lambda a: formula.power(size(a), ord))
    return ctx.pointwise(lambda a: formula.power(a, 1 / ord), powers)


@lowers(aten.logsumexp.default)
def logsumexp(ctx: Context, x: Value, dim: Axes, keepdim: bool = False) -> Value:
    axes = axes_of(dim, len(x.shape))
    top = reduced(ctx, "max", x, axes, _accumulated(ctx.out.dtype), compute_dtype(ctx.out.dtype), keepdim=True)
    # An infinite maximum is not subtracted: inf - inf is NaN.
    shift = ctx.pointwise(
        lambda a: where(call("isinf", a), lit(a, 0), a), top, dtype=compute_dtype(ctx.out.dtype), shape=top.shape
    )
    # Not below the maximum where that is infinite.
    total = _sum_of_exponentials(ctx, x, shift, axes, "exp")
    shape = ctx.shape
    return ctx.pointwise(lambda s, m: add(call("log", s), m), reshaped(total, shape), reshaped(shift, shape))


def _sum_of_exponentials(ctx: Context, x: Value, shift: Value, axes: tuple[int, ...], exp: str) -> Value:
    def body(index: tuple[Index, ...]) -> Expr:
        centre = shift.at(tuple(as_index(0) if d in axes else i for d, i in enumerate(index)))
        return call(exp, sub(cast(x.at(index), centre.dtype), centre))

    return reduced_body(ctx, "sum", x, axes, body, shift.dtype, keepdim=True)


# Softmax


# The exponential of what a mask of -100 hides is denormal in float32. A processor takes a hundred times as long for such numbers, here and in
# the product with the values. They are 0 here, as most of them are in `torch.softmax`.
_WEIGHT = "exp_nonpositive"


def _row_statistics(ctx: Context, x: Value, dim: int) -> tuple[Value, Value]:
    """Maximum and sum of exponentials below it, per row, in the compute dtype of the result."""
    axes = axes_of(dim, len(x.shape))
    dtype = compute_dtype(ctx.out.dtype)
    top = reduced(ctx, "max", x, axes, _accumulated(dtype), dtype, keepdim=True)
    return top, _sum_of_exponentials(ctx, x, top, axes, _WEIGHT)


@lowers(aten._softmax.default)
def softmax(ctx: Context, x: Value, dim: int, half_to_float: bool) -> Value:
    top, total = _row_statistics(ctx, x, dim)
    return ctx.pointwise(lambda a, m, s: div(call(_WEIGHT, sub(a, m)), s), x, top, total)


@lowers(aten._safe_softmax.default)
def safe_softmax(ctx: Context, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax that is 0, not NaN, in rows of -inf alone."""
    top, total = _row_statistics(ctx, x, dim)

    def fn(a: Expr, m: Expr, s: Expr) -> Expr:
        return where(call("eq", m, lit(m, -math.inf)), lit(a, 0), div(call(_WEIGHT, sub(a, m)), s))

    return ctx.pointwise(fn, x, top, total)


@lowers(aten._log_softmax.default)
def log_softmax(ctx: Context, x: Value, dim: int, half_to_float: bool) -> Value:
    top, total = _row_statistics(ctx, x, dim)
    return ctx.pointwise(lambda a, m, s: sub(sub(a, m), call("log", s)), x, top, total)


@lowers(aten._softmax_backward_data.default)
def softmax_backward(ctx: Context, gradient: Value, y: Value, dim: int, input_dtype: torch.dtype) -> Value:
    """y * (g - sum(g * y))."""
    dot = _row_dot(ctx, gradient, dim, y)
    return ctx.pointwise(lambda g, a, s: mul(a, sub(g, s)), gradient, y, dot)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(ctx: Context, gradient: Value, y: Value, dim: int, input_dtype: torch.dtype) -> Value:
    """g - exp(y) * sum(g)."""
    total = _row_dot(ctx, gradient, dim, None)
    return ctx.pointwise(lambda g, a, s: sub(g, mul(call("exp", a), s)), gradient, y, total)


def _row_dot(ctx: Context, x: Value, dim: int, y: Value | None) -> Value:
    def body(index: tuple[Index, ...]) -> Expr:
        return x.at(index) if y is None else mul(x.at(index), cast(y.at(index), compute_dtype(x.dtype)))

    return reduced_body(ctx, "sum", x, axes_of(dim, len(x.shape)), body, compute_dtype(x.dtype), keepdim=True)


# Normalisation


def _normalized(a: Expr, centre: Expr, scale: Expr) -> Expr:
    return mul(sub(a, centre), scale)


def _inverse_deviation(ctx: Context, squares: Value, count: Dim, eps: float) -> Value:
    return ctx.pointwise(
        lambda a: call("rsqrt", add(div(a, lit(a, count)), lit(a, eps))),
        squares,
        dtype=squares.dtype,
        shape=squares.shape,
    )


def _affine(ctx: Context, x: Value, centre: Value, scale: Value, weight: Value | None, bias: Value | None) -> Value:
    """((x - centre) * scale) * weight + bias, all broadcast to x."""
    inputs = [v for v in (weight, bias) if v is not None]

    def fn(a: Expr, m: Expr, s: Expr, *rest: Expr) -> Expr:
        factors = list(rest)
        y = _normalized(a, m, s)
        if weight is not None:
            y = mul(y, factors.pop(0))
        return y if bias is None else add(y, factors.pop(0))

    return ctx.pointwise(fn, x, centre, scale, *inputs)


def _as_result(ctx: Context, position_: int, value: Value) -> Value:
    spec = ctx.outs[position_]
    shape = spec.shape
    return ctx.pointwise(lambda a: a, reshaped(value, shape), dtype=spec.dtype, shape=shape)


@lowers(aten.native_layer_norm.default)
def layer_norm(
    ctx: Context, x: Value, normalized_shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    """(y, mean, 1 / deviation)."""
    rank = len(x.shape)
    axes = tuple(range(rank - len(normalized_shape), rank))
    average, squares = moments(ctx, x, axes)
    scale = _inverse_deviation(ctx, squares, extent(x.shape, axes), eps)
    y = _affine(ctx, x, average, scale, weight, bias)
    return y, _as_result(ctx, 1, average), _as_result(ctx, 2, scale)


@lowers(aten.native_group_norm.default)
def group_norm(
    ctx: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    """(y, mean, 1 / deviation), the statistics per sample and group."""
    each = channels // groups
    grouped = reshaped(x, (n, groups, each, *x.shape[2:]))
    average, squares = moments(ctx, grouped, tuple(range(2, len(grouped.shape))))
    scale = _inverse_deviation(ctx, squares, each * pixels, eps)

    def per_group(value: Value) -> Value:
        zeros = (as_index(0),) * (len(grouped.shape) - 2)
        return reindex(value, x.shape, lambda index: (index[0], index[1] // each, *zeros))

    def per_channel(value: Value | None) -> Value | None:
        return None if value is None else channelwise(value, x.shape)

    y = _affine(ctx, x, per_group(average), per_group(scale), per_channel(weight), per_channel(bias))
    return y, _as_result(ctx, 1, average), _as_result(ctx, 2, scale)


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_eval(
    ctx: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, None, None]:
    """Batch norm with given statistics; its second and third results are empty.

    One multiply-add per element: scale and shift are computed per channel first, as eager does.
    """
    channels = running_mean.shape
    dtype = compute_dtype(running_var.dtype)
    inverse = [running_var] if weight is None else [running_var, weight]

    def scale_of(v: Expr, w: Expr | None = None) -> Expr:
        root = call("rsqrt", add(v, lit(v, eps)))
        return root if w is None else mul(root, w)

    def shift_of(m: Expr, s: Expr, b: Expr | None = None) -> Expr:
        moved = call("neg", mul(m, s))
        return moved if b is None else add(b, moved)

    scale = ctx.materialize(ctx.pointwise(scale_of, *inverse, dtype=dtype, shape=channels))
    offsets = [running_mean, scale] if bias is None else [running_mean, scale, bias]
    shift = ctx.materialize(ctx.pointwise(shift_of, *offsets, dtype=dtype, shape=channels))
    y = ctx.pointwise(lambda a, s, b: add(mul(a, s), b), x, channelwise(scale, x.shape), channelwise(shift, x.shape))
    return y, None, None
