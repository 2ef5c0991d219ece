"""Scalar formulas that take more than one operation of the loops language, as eager computes them.

Each function maps scalars (`Expr`) of one compute dtype to a scalar of that dtype; nothing here knows tensors.
"""

from __future__ import annotations

import math

from torch_hybrid_backend.loops.ir import Expr, rounded
from torch_hybrid_backend.loops.ops import (
    INTEGER_BITS,
    add,
    call,
    cast,
    const,
    div,
    is_float,
    logical_and,
    logical_or,
    mul,
    sub,
    where,
)
from torch_hybrid_backend.sizes.size import Size

_SIGNED = ("int8", "int16", "int32", "int64")


def lit(like: Expr, value: float | Size) -> Expr:
    """A literal of another scalar's dtype."""
    return const(value, like.dtype)


def plus(a: Expr, b: Expr) -> Expr:
    """a + b; for bool: or."""
    return call("or", a, b) if a.dtype == "bool" else add(a, b)


def times(a: Expr, b: Expr) -> Expr:
    """a * b; for bool: and."""
    return call("and", a, b) if a.dtype == "bool" else mul(a, b)


def scaled(a: Expr, factor: float) -> Expr:
    """a * factor, without the multiplication by one."""
    return a if factor == 1 else times(a, lit(a, factor))


def _divisor(b: Expr) -> tuple[Expr, Expr]:
    """A divisor that cannot trap, and whether it stands for -1.

    Integer division by zero and of the smallest number by -1 stop the process on x86. Eager raises for the first (a kernel
    cannot: the quotient is then the dividend, and `Context.refuse` tells of it) and wraps in the second, as negation does.
    """
    zero = call("eq", b, lit(b, 0))
    minus_one = call("eq", b, lit(b, -1)) if b.dtype in _SIGNED else const(False, "bool")
    return where(logical_or(zero, minus_one), lit(b, 1), b), minus_one


def _integer_quotient(op: str, a: Expr, b: Expr) -> Expr:
    divisor, minus_one = _divisor(b)
    return where(minus_one, call("neg", a), call(op, a, divisor))


def trunc_div(a: Expr, b: Expr) -> Expr:
    """The quotient rounded towards zero."""
    return call("trunc", div(a, b)) if is_float(a.dtype) else _integer_quotient("truncdiv", a, b)


def floor_div(a: Expr, b: Expr) -> Expr:
    """The quotient rounded towards minus infinity.

    Floats: from the exact remainder, as c10::div_floor_floating does: floor(a / b) is off by one where a / b rounds up to an integer.
    """
    if not is_float(a.dtype):
        return _integer_quotient("floordiv", a, b)
    zero = lit(a, 0)
    rest = call("fmod", a, b)
    quotient = div(sub(a, rest), b)
    crosses = logical_and(call("ne", rest, zero), call("xor", call("lt", b, zero), call("lt", rest, zero)))
    quotient = where(crosses, sub(quotient, lit(a, 1)), quotient)
    whole = call("floor", quotient)
    whole = where(call("gt", sub(quotient, whole), lit(a, 0.5)), add(whole, lit(a, 1)), whole)
    return where(call("eq", b, zero), div(a, b), whole)


def remainder(a: Expr, b: Expr) -> Expr:
    """a modulo b with the sign of b; integers modulo 0 (an error in eager) give 0."""
    if not is_float(a.dtype):
        return call("mod", a, _divisor(b)[0])
    zero = lit(a, 0)
    rest = call("fmod", a, b)
    crosses = logical_and(call("ne", rest, zero), call("xor", call("lt", b, zero), call("lt", rest, zero)))
    return where(crosses, add(rest, b), rest)


def fmod(a: Expr, b: Expr) -> Expr:
    """a modulo b with the sign of a; integers modulo 0 (an error in eager) give 0."""
    if is_float(a.dtype):
        return call("fmod", a, b)
    divisor, _ = _divisor(b)
    return sub(a, mul(call("truncdiv", a, divisor), divisor))


def integer_power(a: Expr, exponent: int) -> Expr:
    """a ** exponent for an exponent >= 0, by squaring."""
    result: Expr | None = None
    square = a
    while exponent:
        if exponent & 1:
            result = square if result is None else times(result, square)
        exponent >>= 1
        if exponent:
            square = times(square, square)
    return lit(a, 1) if result is None else result


def power(a: Expr, exponent: float, dtype: str = "") -> Expr:
    """a ** exponent for a literal exponent; the small ones as eager writes them, which rounds each product to a `dtype` of half type."""
    if not is_float(a.dtype):
        return integer_power(a, int(exponent))
    if exponent in (2.0, 3.0, -2.0):
        square = rounded(mul(a, a), dtype)
        return square if exponent == 2 else mul(square, a) if exponent == 3 else div(lit(a, 1), square)
    if exponent in (0.0, 1.0, 4.0):
        return integer_power(a, int(exponent))
    if exponent == -1.0:
        return div(lit(a, 1), a)
    if exponent == 0.5:
        return call("sqrt", a)
    if exponent == -0.5:
        return call("rsqrt", a)
    return call("pow", a, lit(a, exponent))


def shift(op: str, a: Expr, b: Expr) -> Expr:
    """a << b ("shl") or a >> b ("shr"); a shift by fewer than 0 or too many places gives 0 or, rightwards, the sign."""
    bits = INTEGER_BITS[a.dtype]
    places = call("min", call("max", b, lit(b, 0)), lit(b, bits - 1))
    legal = call("lt", b, lit(b, bits))
    if b.dtype in _SIGNED:
        legal = logical_and(call("ge", b, lit(b, 0)), legal)
    far = call("shr", a, lit(a, bits - 1)) if op == "shr" and a.dtype in _SIGNED else lit(a, 0)
    return where(legal, call(op, a, places), far)


def clamp(a: Expr, low: Expr | None, high: Expr | None) -> Expr:
    """min(max(a, low), high); NaN in any of them passes."""
    if low is not None:
        a = call("or" if a.dtype == "bool" else "max", a, low)
    return a if high is None else call("and" if a.dtype == "bool" else "min", a, high)


def copysign(a: Expr, b: Expr) -> Expr:
    """|a| with the sign of b, the sign of zero included (of a NaN's sign nothing is known: it counts as plus)."""
    zero = lit(b, 0)
    negative_zero = logical_and(call("eq", b, zero), call("lt", div(lit(b, 1), b), zero))
    size = call("abs", a)
    return where(call("or", call("lt", b, zero), negative_zero), call("neg", size), size)


def lerp(a: Expr, b: Expr, weight: Expr) -> Expr:
    """a + weight * (b - a), computed from the nearer end."""
    span = sub(b, a)
    near = add(a, mul(weight, span))
    far = sub(b, mul(span, sub(lit(weight, 1), weight)))
    return where(call("lt", call("abs", weight), lit(weight, 0.5)), near, far)


def log_add_exp(a: Expr, b: Expr, exp: str, log: str) -> Expr:
    """log(exp(a) + exp(b)) in the given base, without overflow."""
    low, high = call("min", a, b), call("max", a, b)
    same_infinity = logical_and(call("isinf", a), call("eq", a, b))
    gap = call(exp, sub(low, high))
    tail = call("log1p", gap) if log == "log" else call("log2", add(lit(a, 1), gap))
    return where(same_infinity, a, add(high, tail))


def hypot(a: Expr, b: Expr) -> Expr:
    """sqrt(a^2 + b^2) without overflow."""
    a, b = call("abs", a), call("abs", b)
    low, high = call("min", a, b), call("max", a, b)
    ratio = where(call("eq", high, lit(a, 0)), lit(a, 0), div(low, high))
    length = mul(high, call("sqrt", add(lit(a, 1), mul(ratio, ratio))))
    return where(call("or", call("isinf", a), call("isinf", b)), lit(a, math.inf), length)


def xlogy(a: Expr, b: Expr, dtype: str = "") -> Expr:
    """a * log(b), 0 where a is 0, NaN where b is. Eager rounds the logarithm to the result's dtype."""
    product = where(call("eq", a, lit(a, 0)), lit(a, 0), mul(a, rounded(call("log", b), dtype)))
    return where(call("isnan", b), b, product)


def sign(a: Expr) -> Expr:
    """-1, 0 or 1; 0 for NaN."""
    if a.dtype == "bool":
        return a
    return call("sign", a)


def nonzero(a: Expr) -> Expr:
    """True if a differs from zero (NaN does)."""
    return cast(a, "bool")


def gelu(a: Expr, approximate: str) -> Expr:
    """x * Phi(x), exact ("none") or by tanh ("tanh")."""
    half = mul(a, lit(a, 0.5))
    if approximate == "tanh":
        cube = mul(mul(a, a), a)
        inner = mul(lit(a, math.sqrt(2 / math.pi)), add(a, mul(lit(a, 0.044715), cube)))
        return mul(half, add(lit(a, 1), call("tanh", inner)))
    return mul(half, add(lit(a, 1), call("erf", mul(a, lit(a, math.sqrt(0.5))))))


def elu(a: Expr, negative: float, positive: float, inner: float) -> Expr:
    """positive * a above zero, negative * expm1(inner * a) below."""
    below = mul(call("expm1", scaled(a, inner)), lit(a, negative))
    return where(call("le", a, lit(a, 0)), below, scaled(a, positive))


def softplus(a: Expr, beta: float, threshold: float) -> Expr:
    """log(1 + exp(beta * a)) / beta, a itself above the threshold."""
    steep = scaled(a, beta)
    smooth = call("log1p", call("exp", steep))
    return where(call("gt", steep, lit(a, threshold)), a, smooth if beta == 1 else div(smooth, lit(a, beta)))


def log_sigmoid(a: Expr) -> Expr:
    """log(sigmoid(a)) without overflow."""
    tail = call("log1p", call("exp", call("neg", call("abs", a))))
    return sub(call("min", a, lit(a, 0)), tail)


def six_above(a: Expr) -> Expr:
    """clamp(a + 3, 0, 6)."""
    return clamp(add(a, lit(a, 3)), lit(a, 0), lit(a, 6))


def hard_sigmoid(a: Expr) -> Expr:
    """clamp(a + 3, 0, 6) / 6."""
    return mul(six_above(a), lit(a, 1 / 6))
