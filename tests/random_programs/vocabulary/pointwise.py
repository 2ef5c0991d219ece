"""Operations element by element: functions, arithmetic, comparisons, choices, casts, integers and bits."""

from __future__ import annotations

import torch

from tests.random_programs.noise import ARITHMETIC, MOVE, SMOOTH, STEP
from tests.random_programs.program import INTEGERS, dtype_text
from tests.random_programs.scope import Scope, Step, Value

UNARY_SMOOTH = """
torch.sin({0}) | torch.cos({0}) | torch.tan({0} * 0.25) | torch.tanh({0}) | torch.sigmoid({0}) | torch.erf({0}) | torch.erfc({0})
torch.exp(-{0}.abs()) | torch.exp({0}.clamp(-4, 4)) | torch.exp2({0}.clamp(-4, 4)) | torch.expm1({0}.clamp(-4, 4))
torch.log({0}.abs() + 0.5) | torch.log2({0}.abs() + 0.5) | torch.log10({0}.abs() + 1) | torch.log1p({0}.abs())
torch.sqrt({0}.abs() + 0.25) | torch.rsqrt({0}.abs() + 0.25) | torch.reciprocal({0}.abs() + 0.5) | ({0} * {0} + 1).rsqrt()
torch.asin({0}.sin() * 0.9) | torch.acos({0}.sin() * 0.9) | torch.atan({0}) | torch.sinh({0}.clamp(-3, 3)) | torch.cosh({0}.clamp(-3, 3))
torch.asinh({0}) | torch.acosh({0}.abs() + 1.5) | torch.atanh({0}.sin() * 0.9) | F.gelu({0}) | F.gelu({0}, approximate="tanh")
F.silu({0}) | F.elu({0}) | F.elu({0}, 0.5) | F.celu({0}, 1.5) | F.selu({0}) | F.softplus({0}) | F.softplus({0}, 2.0, 3.0)
F.mish({0}) | F.logsigmoid({0}) | F.leaky_relu({0}, 0.2) | F.hardswish({0}) | F.hardsigmoid({0}) | F.softsign({0}) | F.tanhshrink({0})
torch.square({0}.clamp(-9, 9)) | {0}.pow(3).clamp(-99, 99) | ({0}.abs() + 0.5).pow(-1.5) | ({0}.abs() + 0.25) ** 0.5
{0}.clamp(-2, 2).pow(2)
torch.sinc({0} * 0.25) | torch.logit({0}.sigmoid(), 0.01) | {0} / 3 | {0} * 0.3 | {0} + 0.1 | 1.5 - {0} * 0.7 | 2 / ({0}.abs() + 1)
torch.special.log_ndtr({0}.clamp(-2, 2)) | torch.i0({0}.clamp(-2, 2)) | torch.deg2rad({0}) | torch.rad2deg({0}.clamp(-2, 2))
torch.lgamma({0}.abs() + 0.5) | torch.digamma({0}.abs() + 1) | torch.special.ndtr({0}) | torch.special.erfcx({0}.abs())
torch.xlogy({0}, 2.5)
"""
UNARY_MOVE = """
torch.abs({0}) | -{0} | F.relu({0}) | {0}.clamp(-1, 1) | {0}.clamp(min=0.5) | {0}.clamp(max=-0.25) | F.relu6({0})
F.hardtanh({0}, -0.5, 1.0)
torch.positive({0}) | {0}.clone() | {0}.contiguous() | {0}.detach() | torch.nan_to_num({0}, 0.5) | {0} * 2 | {0} * 0.5
{0}.clone(memory_format=torch.contiguous_format)
"""
# Not continuous: for exact values alone.
UNARY_STEP = """
torch.floor({0}) | torch.ceil({0}) | torch.trunc({0}) | torch.round({0}) | torch.frac({0}) | torch.sign({0}) | torch.sgn({0})
F.threshold({0}, 0.25, -1.0)
torch.isnan({0}) | torch.isinf({0}) | torch.isfinite({0}) | {0} > 0 | {0} <= 0.5 | {0} == 1 | {0} != 0 | torch.signbit({0})
{0} >= -0.125 | {0} < 1
{0}.bool() | {0}.to(torch.int64) | {0}.to(torch.int32) | {0}.to(torch.int8) | torch.logical_not({0}) | F.hardshrink({0})
{0}.remainder(1.5) | {0}.fmod(0.75) | {0} // 2 | torch.div({0}, 0.5, rounding_mode="trunc") | torch.heaviside({0}, {0}.new_full((), 0.5))
"""
BINARY_ARITHMETIC = """
{0} + {1} | {0} - {1} | {0} * {1} | torch.add({0}, {1}, alpha=2) | torch.sub({0}, {1}, alpha=0.5) | torch.rsub({0}, {1})
{0}.mul({1}).clamp(-60, 60)
torch.addcmul({0}, {0}, {1}, value=0.5) | torch.lerp({0}, {1}, 0.25)
"""
BINARY_MOVE = """
torch.maximum({0}, {1}) | torch.minimum({0}, {1}) | torch.fmax({0}, {1}) | torch.fmin({0}, {1}) | {0}.clamp(min={1}) | {0}.clamp(max={1})
"""
BINARY_SMOOTH = """
{0} / ({1}.abs() + 0.5) | torch.atan2({0}, {1}.abs() + 0.5) | torch.hypot({0}, {1}) | torch.logaddexp({0}, {1}) | torch.logaddexp2({0}, {1})
({0}.abs() + 0.5) ** {1}.clamp(-2, 2) | torch.xlogy({0}, {1}.abs() + 0.5) | torch.addcdiv({0}, {1}, {1}.abs() + 1, value=0.5)
torch.lerp({0}, {1}, torch.sigmoid({1})) | F.smooth_l1_loss({0}, {1}, reduction="none")
F.huber_loss({0}, {1}, reduction="none", delta=0.5)
F.mse_loss({0}, {1}, reduction="none").clamp(max=90) | F.binary_cross_entropy_with_logits({0}, {1}, reduction="none")
"""
BINARY_STEP = """
{0} < {1} | {0} <= {1} | {0} > {1} | {0} >= {1} | {0} == {1} | {0} != {1} | torch.copysign({0}, {1}) | torch.isclose({0}, {1})
torch.floor_divide({0}, {1}.abs() + 0.5) | torch.remainder({0}, {1}.abs() + 0.5) | torch.fmod({0}, {1}.abs() + 0.5)
torch.logical_and({0}, {1}) | torch.logical_or({0}, {1}) | torch.logical_xor({0}, {1})
"""
INTEGER_UNARY = """
-{0} | {0} + 1 | {0} * 3 | {0}.abs() | ~{0} | {0} & 5 | {0} | 2 | {0} ^ 3 | {0} << 1 | {0} >> 1 | {0} // 3 | {0} % 3
{0}.clamp(-3, 4) | {0} > 0 | {0} == 2
{0}.remainder(4) | {0}.fmod(3) | torch.div({0}, 2, rounding_mode="trunc") | torch.div({0}, 2, rounding_mode="floor") | {0}.sign()
{0}.bool() | {0}.square()
{0} ** 2 | 7 - {0} | {0}.pow(3) | {0} * {0} | F.relu({0})
"""
INTEGER_BINARY = """
{0} + {1} | {0} - {1} | {0} * {1} | {0} & {1} | {0} | {1} | {0} ^ {1} | torch.maximum({0}, {1}) | torch.minimum({0}, {1})
{0} < {1} | {0} == {1} | {0} >= {1}
{0} // ({1}.abs() % 5 + 1) | {0} % ({1}.abs() % 5 + 1) | {0} << ({1} & 3) | {0} >> ({1} & 3) | {0}.fmod(({1} & 3) + 1) | torch.gcd({0}, {1})
"""
BOOL_UNARY = (
    "~{0} | torch.logical_not({0}) | {0}.to(torch.int64) | {0}.to(torch.uint8) | {0} * 3 | {0} + 1 | {0}.clone()"
)
BOOL_BINARY = """
{0} & {1} | {0} ^ {1} | torch.logical_and({0}, {1}) | torch.logical_or({0}, {1}) | {0} == {1} | {0} != {1} | {0} <= {1}
{0} + {1} | {0} * {1} | torch.maximum({0}, {1})
"""


def _split(table: str) -> list[str]:
    # " | " is also Python's or: an entry with two braces around it would be cut, so those are spelt torch.bitwise_or.
    return [part.strip() for line in table.strip().splitlines() for part in line.split(" | ") if "{0}" in part]


_TABLES = {name: _split(table) for name, table in list(globals().items()) if name.isupper() and isinstance(table, str)}
_TABLES["INTEGER_UNARY"] += ["torch.bitwise_or({0}, 2)"]
_TABLES["INTEGER_BINARY"] += ["torch.bitwise_or({0}, {1})"]
_TABLES["BOOL_BINARY"] += ["torch.bitwise_or({0}, {1})"]


def _is_float(value: Value) -> bool:
    return value.dtype.is_floating_point


def is_integer(value: Value) -> bool:
    return not value.dtype.is_floating_point and value.dtype is not torch.bool


def _is_bool(value: Value) -> bool:
    return value.dtype is torch.bool


def unary(scope: Scope) -> Step | None:
    table, kind = scope.draw.choose(
        [("UNARY_SMOOTH", SMOOTH)] * 4 + [("UNARY_MOVE", MOVE)] * 2 + [("UNARY_STEP", STEP)] * 2
    )
    a = scope.pick(lambda v: _is_float(v) and (v.exact or kind != STEP))
    if a is None:
        return None
    text = scope.draw.choose(_TABLES[table])
    return Step(text.format(a), ARITHMETIC if " * " in text and kind == MOVE else kind)


def partner(scope: Scope, a: Value, *, exact: bool = False) -> Value:
    """A value of `a`'s kind that broadcasts with it: one there is, or a new input."""

    def fits(v: Value) -> bool:
        same_kind = (_is_float(v), _is_bool(v)) == (_is_float(a), _is_bool(a))
        return same_kind and (v.exact or not exact) and _broadcasts(a.shape, v.shape)

    found = scope.pick(fits) if not scope.draw.chance(4) else None
    if found is not None:
        return found
    shape = [1 if scope.draw.chance(3) else size for size in a.shape]
    start = scope.draw.integer(0, len(shape)) if scope.draw.chance(3) else 0
    dtype = scope.draw.choose(scope.dtypes) if _is_float(a) and scope.draw.chance(4) else a.dtype
    return scope.fresh(shape[start:], dtype)


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


def binary(scope: Scope) -> Step | None:
    choices = [("BINARY_ARITHMETIC", ARITHMETIC)] * 4 + [("BINARY_MOVE", MOVE)] + [("BINARY_SMOOTH", SMOOTH)] * 2
    table, kind = scope.draw.choose([*choices, ("BINARY_STEP", STEP), ("BINARY_STEP", STEP)])
    a = scope.pick(lambda v: _is_float(v) and (v.exact or kind != STEP))
    if a is None:
        return None
    b = partner(scope, a, exact=kind == STEP)
    first, second = (a, b) if scope.draw.chance(2) else (b, a)
    return Step(scope.draw.choose(_TABLES[table]).format(first, second), kind)


def integers(scope: Scope) -> Step | None:
    a = scope.pick(is_integer)
    if a is None:
        scope.fresh([scope.draw.choose(scope.sizes) for _ in range(2)], scope.draw.choose(INTEGERS))
        return None
    if scope.draw.chance(3):
        dtype = dtype_text(scope.draw.choose([*INTEGERS, torch.bool, *scope.dtypes]))
        return Step(f"{a}.to({dtype})", ARITHMETIC)
    if scope.draw.chance(2):
        return Step(scope.draw.choose(_TABLES["INTEGER_UNARY"]).format(a), STEP)
    return Step(scope.draw.choose(_TABLES["INTEGER_BINARY"]).format(a, partner(scope, a)), STEP)


def booleans(scope: Scope) -> Step | None:
    a = scope.pick(_is_bool)
    if a is None:
        return None
    if scope.draw.chance(3):
        return Step(f"{a}.to({dtype_text(scope.draw.choose(scope.dtypes))})", ARITHMETIC)
    if scope.draw.chance(2):
        return Step(scope.draw.choose(_TABLES["BOOL_UNARY"]).format(a), STEP)
    return Step(scope.draw.choose(_TABLES["BOOL_BINARY"]).format(a, partner(scope, a)), STEP)


def choice(scope: Scope) -> Step | None:
    """A choice by where and masked_fill."""
    a = scope.pick(_is_float)
    if a is None:
        return None
    condition = scope.pick(lambda v: _is_bool(v) and _broadcasts(a.shape, v.shape))
    if condition is None:
        condition = scope.fresh(a.shape, torch.bool)
    form = scope.draw.integer(0, 3)
    if form == 0:
        return Step(f"torch.where({condition}, {a}, {partner(scope, a)})", MOVE)
    if form == 1:
        return Step(f"torch.where({condition}, {a}, {scope.draw.choose(['0.0', '1.5', '-0.25'])})", MOVE)
    if form == 2 and len(condition.shape) <= a.rank:
        return Step(f"{a}.masked_fill({condition}, {scope.draw.choose(['0', '2.0', '-0.5'])})", MOVE)
    return Step(f"{a} * {condition}", ARITHMETIC)


def cast(scope: Scope) -> Step | None:
    """To another floating-point dtype, and back as it happens."""
    a = scope.pick(_is_float)
    others = [dtype for dtype in scope.dtypes if a is not None and dtype != a.dtype]
    if a is None or not others:
        return None
    return Step(f"{a}.to({dtype_text(scope.draw.choose(others))})", ARITHMETIC)


TEMPLATES = ((unary, 10), (binary, 10), (integers, 3), (booleans, 2), (choice, 3), (cast, 2))
