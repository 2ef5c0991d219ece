"""Pointwise operators: one element of the result from one element of each (broadcast) operand.

Result dtypes are those of the node's fake tensors, so promotion is PyTorch's own; comparisons compare in `torch.result_type` of
their operands. Half types compute in float32. Integer division by zero, an error in eager, gives an arbitrary number here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import contiguous_strides
from torch_hybrid_backend.loops.ir import Expr, Value, compute_dtype, nearest, rounded
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.lowerings import arithmetic as formula
from torch_hybrid_backend.loops.lowerings.arithmetic import lit
from torch_hybrid_backend.loops.ops import FLOAT_UNARY, add, call, const, div, is_float, mul, sub, where
from torch_hybrid_backend.sizes.size import Size
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten
prims = torch.ops.prims

Operand = Value | float | Size


@functools.cache
def _sample(dtype: str, scalar: bool) -> torch.Tensor:
    return torch.empty(() if scalar else (1,), dtype=getattr(torch, dtype), device="meta")


def promoted(*operands: Operand) -> str:
    """The dtype PyTorch computes a binary operator of these operands in (`torch.result_type`), folded from the left.

    A tensor without dimensions or a Python number does not widen a tensor of the same kind.
    """
    first, second = map(_stand_in, operands)
    return str(torch.result_type(first, second)).removeprefix("torch.")


def _stand_in(operand: Operand) -> torch.Tensor | float:
    if isinstance(operand, Value):
        return _sample(operand.dtype, not operand.shape)
    return 1 if isinstance(operand, Size) else operand  # any integer promotes alike


def _unary(target: OpOverload, fn: Callable[[Expr], Expr]) -> None:
    @lowers(target)
    def lower(ctx: Context, x: Value) -> Value:
        return ctx.pointwise(fn, x)


def _op(name: str) -> Callable[..., Expr]:
    return functools.partial(call, name)


for _name in sorted(FLOAT_UNARY - {"floor", "ceil", "round_even", "trunc"}):
    _unary(getattr(aten, _name).default, _op(_name))
_unary(aten.neg.default, _op("neg"))
_unary(aten.sign.default, formula.sign)
_unary(aten.sgn.default, formula.sign)
_unary(aten.silu.default, lambda a: mul(a, call("sigmoid", a)))
_unary(aten.relu.default, lambda a: where(call("lt", a, lit(a, 0)), lit(a, 0), a))
_unary(aten.relu6.default, lambda a: formula.clamp(a, lit(a, 0), lit(a, 6)))
_unary(aten.hardswish.default, lambda a: mul(mul(a, formula.six_above(a)), lit(a, 1 / 6)))
_unary(aten.hardsigmoid.default, formula.hard_sigmoid)
_unary(aten.mish.default, lambda a: mul(a, call("tanh", call("log1p", call("exp", a)))))
_unary(aten.reciprocal.default, lambda a: div(lit(a, 1), a))
_unary(aten.square.default, lambda a: mul(a, a))
_unary(aten.frac.default, lambda a: sub(a, call("trunc", a)))
_unary(aten.log_sigmoid.default, formula.log_sigmoid)


@lowers(aten.abs.default)
def abs_(ctx: Context, x: Value) -> Value:
    """|x|; unsigned numbers as they are."""
    return ctx.pointwise(lambda a: a if a.dtype in ("uint8", "bool") else call("abs", a), x)


def _rounding(target: OpOverload, name: str) -> None:
    @lowers(target)
    def lower(ctx: Context, x: Value) -> Value:
        return ctx.pointwise(lambda a: call(name, a) if is_float(a.dtype) else a, x)


for _target, _name in (
    (aten.floor.default, "floor"),
    (aten.ceil.default, "ceil"),
    (aten.trunc.default, "trunc"),
    (aten.fix.default, "trunc"),
    (aten.round.default, "round_even"),
):
    _rounding(_target, _name)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(ctx: Context, x: Value) -> tuple[Value, Value | None]:
    """log(sigmoid(x)), and exp(-|x|), which the backward pass reads."""
    buffer = ctx.pointwise(lambda a: call("exp", call("neg", call("abs", a))), x) if ctx.wants(1) else None
    return ctx.pointwise(formula.log_sigmoid, x), buffer


@lowers(aten.gelu.default)
def gelu(ctx: Context, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "none" and _is_of_onednn(ctx):
        # Eager's kernel doubles before it halves, and gives NaN for infinity.
        def fn(a: Expr) -> Expr:
            doubled = mul(a, add(lit(a, 1), call("erf", mul(a, lit(a, math.sqrt(0.5))))))
            return where(call("eq", a, lit(a, math.inf)), lit(a, math.nan), mul(doubled, lit(a, 0.5)))

        return ctx.pointwise(fn, x)
    return ctx.pointwise(lambda a: formula.gelu(a, approximate), x)


def _is_of_onednn(ctx: Context) -> bool:
    """True if eager computes the node by oneDNN: float32 or bfloat16 on the host, more than one element, in the order of memory."""
    assert ctx.node is not None
    spec = TensorSpec.of(ctx.node.all_input_nodes[0].meta["val"])
    is_one = all(size == 1 for size in spec.shape)
    return (
        spec.device.is_host
        and spec.dtype in ("float32", "bfloat16")
        and not is_one
        and spec.strides == contiguous_strides(spec.shape)
    )


@lowers(aten.leaky_relu.default)
def leaky_relu(ctx: Context, x: Value, negative_slope: float = 0.01) -> Value:
    return ctx.pointwise(lambda a: where(call("gt", a, lit(a, 0)), a, mul(a, lit(a, negative_slope))), x)


@lowers(aten.elu.default)
def elu(ctx: Context, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    return ctx.pointwise(lambda a: formula.elu(a, alpha * scale, scale, input_scale), x)


@lowers(aten.celu.default)
def celu(ctx: Context, x: Value, alpha: float = 1.0) -> Value:
    return ctx.pointwise(lambda a: formula.elu(a, alpha, 1, 1 / alpha), x)


@lowers(aten.selu.default)
def selu(ctx: Context, x: Value) -> Value:
    """The constants are those of Klambauer et al., 2017, as ATen has them."""
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return ctx.pointwise(lambda a: formula.elu(a, alpha * scale, scale, 1), x)


@lowers(aten.softplus.default)
def softplus(ctx: Context, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    return ctx.pointwise(lambda a: formula.softplus(a, beta, threshold), x)


@lowers(aten.threshold.default)
def threshold_(ctx: Context, x: Value, threshold: float, value: float) -> Value:
    return ctx.pointwise(lambda a: where(call("le", a, lit(a, threshold)), lit(a, value), a), x)


@lowers(aten.threshold_backward.default)
def threshold_backward(ctx: Context, gradient: Value, x: Value, threshold: float) -> Value:
    """The gradient where x exceeds the threshold (or is NaN), else 0."""
    return ctx.pointwise(lambda g, a: where(call("le", a, lit(a, threshold)), lit(g, 0), g), gradient, x)


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(ctx: Context, gradient: Value, y: Value) -> Value:
    return ctx.pointwise(lambda g, a: mul(g, mul(sub(lit(a, 1), a), a)), gradient, y)


@lowers(aten.tanh_backward.default)
def tanh_backward(ctx: Context, gradient: Value, y: Value) -> Value:
    return ctx.pointwise(lambda g, a: mul(g, sub(lit(a, 1), mul(a, a))), gradient, y)


@lowers(aten.logit.default)
def logit(ctx: Context, x: Value, eps: float | None = None) -> Value:
    def fn(a: Expr) -> Expr:
        if eps is not None:
            # Not `clamp`: eager lets NaN pass by comparing, and so does this.
            a = where(call("lt", a, lit(a, eps)), lit(a, eps), a)
            a = where(call("gt", a, lit(a, 1 - eps)), lit(a, 1 - eps), a)
        # Eager rounds each step to a half type.
        odds = div(a, rounded(sub(lit(a, 1), a), ctx.out.dtype))
        return call("log", rounded(odds, ctx.out.dtype))

    return ctx.pointwise(fn, x)


@lowers(aten.nan_to_num.default)
def nan_to_num(
    ctx: Context, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    if not is_float(compute_dtype(ctx.out.dtype)):
        return ctx.pointwise(lambda a: a, x)
    limits = torch.finfo(ctx.out.torch_dtype)
    high, low = limits.max if posinf is None else posinf, limits.min if neginf is None else neginf

    def fn(a: Expr) -> Expr:
        finite = where(call("eq", a, lit(a, -math.inf)), lit(a, low), a)
        finite = where(call("eq", a, lit(a, math.inf)), lit(a, high), finite)
        return where(call("isnan", a), lit(a, nan or 0.0), finite)

    return ctx.pointwise(fn, x)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(ctx: Context, x: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    return _clamp(ctx, x, min, max)


@lowers(aten.hardtanh.default)
def hardtanh(ctx: Context, x: Value, min_val: float = -1, max_val: float = 1) -> Value:
    return _clamp(ctx, x, min_val, max_val)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(ctx: Context, x: Value, min: Operand) -> Value:
    return _clamp(ctx, x, min, None)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(ctx: Context, x: Value, max: Operand) -> Value:
    return _clamp(ctx, x, None, max)


def _clamp(ctx: Context, x: Value, low: Operand | None, high: Operand | None) -> Value:
    bounds = [bound for bound in (low, high) if bound is not None]

    def fn(a: Expr, *limits: Expr) -> Expr:
        rest = list(limits)
        return formula.clamp(a, rest.pop(0) if low is not None else None, rest.pop(0) if high is not None else None)

    return ctx.pointwise(fn, x, *bounds)


# Binary


def _common(ctx: Context, operand: Operand) -> Operand:
    """An operand in the result's dtype, as eager's kernels of the host convert it: a number, or a tensor without dimensions, beside a half type
    is rounded to the half type."""
    if not ctx.out.device.is_host:
        return operand
    if isinstance(operand, Value):
        is_narrowed = compute_dtype(ctx.out.dtype) != ctx.out.dtype != operand.dtype
        return ctx.pointwise(lambda a: a, operand, shape=operand.shape) if is_narrowed else operand
    return operand if isinstance(operand, Size) else _common_number(ctx, operand)


def _common_number(ctx: Context, number: float) -> float:
    return nearest(number, ctx.out.dtype) if ctx.out.device.is_host else number


def _binary(targets: tuple[OpOverload, ...], fn: Callable[[Expr, Expr], Expr]) -> None:
    @lowers(*targets)
    def lower(ctx: Context, x: Operand, y: Operand) -> Value:
        return ctx.pointwise(fn, _common(ctx, x), _common(ctx, y))


def _scaling(targets: tuple[OpOverload, ...], fn: Callable[[Expr, Expr], Expr]) -> None:
    """Lower as `_binary`, but with a number beside a half tensor in float32: eager multiplies and divides so."""

    @lowers(*targets)
    def lower(ctx: Context, x: Operand, y: Operand) -> Value:
        return ctx.pointwise(fn, x, y)


@lowers(aten.add.Tensor, aten.add.Scalar)
def add_(ctx: Context, x: Value, y: Operand, alpha: float = 1) -> Value:
    alpha, y = _common_number(ctx, alpha), _common(ctx, y)
    return ctx.pointwise(lambda a, b: formula.plus(a, formula.scaled(b, alpha)), x, y)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub_(ctx: Context, x: Value, y: Operand, alpha: float = 1) -> Value:
    alpha, y = _common_number(ctx, alpha), _common(ctx, y)
    return ctx.pointwise(lambda a, b: sub(a, formula.scaled(b, alpha)), x, y)


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: Context, x: Value, y: Operand, alpha: float = 1) -> Value:
    alpha, y = _common_number(ctx, alpha), _common(ctx, y)
    return ctx.pointwise(lambda a, b: sub(b, formula.scaled(a, alpha)), x, y)


_scaling((aten.mul.Tensor, aten.mul.Scalar), formula.times)
_scaling((aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor), div)
_binary((aten.atan2.default,), _op("atan2"))
_binary((aten.hypot.default,), formula.hypot)
_binary((aten.copysign.Tensor, aten.copysign.Scalar), formula.copysign)
_binary((aten.logaddexp.default,), lambda a, b: formula.log_add_exp(a, b, "exp", "log"))
_binary((aten.logaddexp2.default,), lambda a, b: formula.log_add_exp(a, b, "exp2", "log2"))


def _quotient(targets: tuple[OpOverload, ...], fn: Callable[[Expr, Expr], Expr], *, scales: bool) -> None:
    """Lower as `_scaling` or `_binary`. Integers divided by 0 are refused, as in eager."""

    @lowers(*targets)
    def lower(ctx: Context, x: Operand, y: Operand) -> Value:
        return _divided(ctx, x, y, fn) if scales else _divided(ctx, _common(ctx, x), _common(ctx, y), fn)


_quotient((aten.floor_divide.default, aten.floor_divide.Scalar), formula.floor_div, scales=True)
_quotient((aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor), formula.remainder, scales=False)
_quotient((aten.fmod.Tensor, aten.fmod.Scalar), formula.fmod, scales=False)


@lowers(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def xlogy(ctx: Context, x: Operand, y: Operand) -> Value:
    dtype = ctx.out.dtype
    return ctx.pointwise(lambda a, b: formula.xlogy(a, b, dtype), _common(ctx, x), _common(ctx, y))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: Context, x: Value, y: Operand, *, rounding_mode: str | None) -> Value:
    formulas = {None: div, "trunc": formula.trunc_div, "floor": formula.floor_div}
    return _divided(ctx, x, y, formulas[rounding_mode])


def _divided(ctx: Context, x: Operand, y: Operand, fn: Callable[[Expr, Expr], Expr]) -> Value:
    """A quotient or remainder. Integers divided by 0 are refused, as in eager."""
    if not is_float(compute_dtype(ctx.out.dtype)):
        if isinstance(y, Value):
            ctx.refuse(y, lambda divisor: call("eq", divisor, const(0, divisor.dtype)))
        elif y == 0:
            raise Refuse(Reason.ARGUMENT, "integers divided by 0 are an error in eager")
    return ctx.pointwise(fn, x, y)


def _extremum(targets: tuple[OpOverload, ...], op: str, skip_nan: bool) -> None:
    def fn(a: Expr, b: Expr) -> Expr:
        if a.dtype == "bool":
            return call("or" if op == "max" else "and", a, b)
        best = call(op, a, b)
        if skip_nan and is_float(a.dtype):
            return where(call("isnan", a), b, where(call("isnan", b), a, best))
        return best

    _binary(targets, fn)


_extremum((aten.maximum.default, aten.max.other), "max", skip_nan=False)
_extremum((aten.minimum.default, aten.min.other), "min", skip_nan=False)
_extremum((aten.fmax.default,), "max", skip_nan=True)
_extremum((aten.fmin.default,), "min", skip_nan=True)


@lowers(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: Context, x: Value, exponent: float) -> Value:
    if not is_float(compute_dtype(ctx.out.dtype)) and exponent < 0:
        raise Refuse(Reason.ARGUMENT, "integers to negative powers are an error in eager")
    return ctx.pointwise(lambda a: formula.power(a, _common_number(ctx, exponent), ctx.out.dtype), x)


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(ctx: Context, base: Operand, exponent: Value) -> Value:
    if not is_float(compute_dtype(ctx.out.dtype)):
        raise Refuse(Reason.DTYPE, "integer powers with a tensor of exponents are left to eager")
    if base == 2:
        return ctx.pointwise(lambda b: call("exp2", b), exponent)
    return ctx.pointwise(lambda a, b: call("pow", a, b), _common(ctx, base), _common(ctx, exponent))


@lowers(aten.bitwise_not.default)
def bitwise_not(ctx: Context, x: Value) -> Value:
    return ctx.pointwise(lambda a: call("not" if a.dtype == "bool" else "bitnot", a), x)


def _bitwise(name: str, logical: str, bitwise: str) -> None:
    packet = getattr(aten, name)
    _binary(
        (packet.Tensor, packet.Scalar, packet.Scalar_Tensor),
        lambda a, b: call(logical if a.dtype == "bool" else bitwise, a, b),
    )


_bitwise("bitwise_and", "and", "bitand")
_bitwise("bitwise_or", "or", "bitor")
_bitwise("bitwise_xor", "xor", "bitxor")

for _name, _op_name in (("left", "shl"), ("right", "shr")):
    _packet, _magic = getattr(aten, f"bitwise_{_name}_shift"), getattr(aten, f"__{_name[0]}shift__")
    _binary(
        (_packet.Tensor, _packet.Tensor_Scalar, _packet.Scalar_Tensor, _magic.Tensor, _magic.Scalar),
        functools.partial(formula.shift, _op_name),
    )


# Comparisons and logic: bool results


def _comparison(name: str) -> None:
    packet = getattr(aten, name)

    @lowers(packet.Tensor, packet.Scalar)
    def lower(ctx: Context, x: Value, y: Operand) -> Value:
        return ctx.pointwise(_op(name), x, y, compute=compute_dtype(promoted(x, y)))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name)


def _logical(target: OpOverload, name: str) -> None:
    @lowers(target)
    def lower(ctx: Context, *operands: Value) -> Value:
        return ctx.pointwise(_op(name), *operands, compute="bool")


for _name in ("and", "or", "xor", "not"):
    _logical(getattr(aten, f"logical_{_name}").default, _name)


def _predicate(target: OpOverload, fn: Callable[[Expr], Expr]) -> None:
    @lowers(target)
    def lower(ctx: Context, x: Value) -> Value:
        def test(a: Expr) -> Expr:
            return fn(a) if is_float(a.dtype) else const(False, "bool")

        return ctx.pointwise(test, x, compute=compute_dtype(x.dtype))


_predicate(aten.isnan.default, _op("isnan"))
_predicate(aten.isinf.default, _op("isinf"))
_predicate(aten.isposinf.default, lambda a: call("eq", a, lit(a, math.inf)))
_predicate(aten.isneginf.default, lambda a: call("eq", a, lit(a, -math.inf)))


# Ternary


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where_(ctx: Context, condition: Value, x: Operand, y: Operand) -> Value:
    test = ctx.pointwise(lambda a: a, condition, dtype="bool")
    return _choose(ctx, test, x, y)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: Context, x: Value, mask: Value, value: Operand) -> Value:
    return _choose(ctx, mask, value, x)


def _choose(ctx: Context, condition: Value, x: Operand, y: Operand) -> Value:
    """x where the condition holds, else y. The condition is cast to the operands' dtype on the way, which holds 0 and 1."""
    if ctx.out.dtype == "bool":
        return ctx.pointwise(where, condition, x, y)
    return ctx.pointwise(lambda c, a, b: where(formula.nonzero(c), a, b), condition, x, y)


@lowers(aten.addcmul.default)
def addcmul(ctx: Context, x: Value, y: Value, z: Value, *, value: float = 1) -> Value:
    return ctx.pointwise(lambda a, b, c: add(a, mul(formula.scaled(b, value), c)), x, y, z)


@lowers(aten.addcdiv.default)
def addcdiv(ctx: Context, x: Value, y: Value, z: Value, *, value: float = 1) -> Value:
    return ctx.pointwise(lambda a, b, c: add(a, div(formula.scaled(b, value), c)), x, y, z)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: Context, x: Value, end: Value, weight: Operand) -> Value:
    return ctx.pointwise(formula.lerp, x, end, weight)
