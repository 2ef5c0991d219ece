"""TIR expressions of the scalar operations of `loops.ops`, one each.

Operands are variables or literals, and may be used twice, but for the operations of `prints_operands_once`. `emit` raises ScheduleError
for an operation and dtype that have no meaning together (the lowerings never ask for one).
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable, Mapping

from tvm import tirx

from torch_hybrid_backend.engines.cpu.tir import math
from torch_hybrid_backend.engines.cpu.tir.builder import TirExpr
from torch_hybrid_backend.engines.cpu.tir.expressions import const
from torch_hybrid_backend.engines.cpu.tir.math import Let, opaque
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.ops import is_float

# Elementary functions that LLVM has intrinsics for: on vectors it calls libm for each lane by itself.
_LLVM = frozenset("exp exp2 log log2 log10 sin cos tan asin acos atan sinh cosh tanh".split())
_ROUNDING = {"floor": tirx.floor, "ceil": tirx.ceil, "trunc": tirx.trunc}
COMPARISONS = {"eq": tirx.EQ, "ne": tirx.NE, "lt": tirx.LT, "le": tirx.LE, "gt": tirx.GT, "ge": tirx.GE}


def emit(op: str, dtype: str, args: tuple[TirExpr, ...], operand: str, let: Let) -> TirExpr:
    """`op(*args)` of result dtype `dtype`; `operand` is the first argument's dtype. "guard" and "round" are the printer's own.

    The result is a number of its dtype: LLVM would make one multiply-add of a product and the sum behind it, and a product that overflows in
    eager (inf - inf) would not.
    """
    result = _emit(op, dtype, args, operand, let)
    return math.fenced(result, dtype) if isinstance(result, tirx.Mul) and is_float(dtype) else result


def _emit(op: str, dtype: str, args: tuple[TirExpr, ...], operand: str, let: Let) -> TirExpr:
    if op in COMPARISONS:
        return _compare(op, args[0], args[1], operand)
    if op in _BINARY:
        return _BINARY[op](args[0], args[1], dtype, let)
    if op in _UNARY:
        return _UNARY[op](args[0], dtype, let)
    if op == "round_even":
        return math.round_even(args[0], dtype) if is_float(dtype) else args[0]
    if op in _ROUNDING:
        return _ROUNDING[op](args[0]) if is_float(dtype) else args[0]
    if op == "where":
        return tirx.Select(*args)
    if op == "cast":
        return cast(args[0], operand, dtype)
    if op == "fma":
        return args[0] * args[1] + args[2]
    if op == "isnan":
        return math.is_nan(args[0], operand) if is_float(operand) else tirx.IntImm("bool", 0)
    if op == "isinf":
        return tirx.EQ(tirx.abs(args[0]), const(pymath.inf, operand)) if is_float(operand) else tirx.IntImm("bool", 0)
    if dtype == "float32" and op in math.UNARY:
        return math.UNARY[op](let, args[0])
    if op == "exp_nonpositive":
        op = "exp"
    if is_float(dtype) and op in _LLVM:
        return _llvm(op, dtype, args[0])
    if dtype == "float64" and op in ("erf", "erfc"):
        return tirx.call_pure_extern(dtype, op, args[0])
    raise ScheduleError(f"the scalar operation {op!r} has no code for dtype {dtype}")


def prints_operands_once(op: str, dtype: str) -> bool:
    """True if `emit` uses each operand once, so that any expression will do for one."""
    return op in COMPARISONS or (is_float(dtype) and op in ("add", "sub", "mul", "fma", "where"))


def _llvm(name: str, dtype: str, *args: TirExpr) -> TirExpr:
    return tirx.call_llvm_pure_intrin(dtype, f"llvm.{name}", *args)


def _compare(op: str, a: TirExpr, b: TirExpr, operand: str) -> TirExpr:
    if is_float(operand):
        # `x == x` would be folded to True.
        b = opaque(b, operand)
        if op == "ne":  # TVM's `!=` is false for NaN
            return tirx.Not(tirx.EQ(a, b))
    if operand == "bool":
        # TVM compiles comparisons of bool to comparisons of floats, which LLVM refuses.
        a, b = cast(a, "bool", "int32"), cast(b, "bool", "int32")
    return COMPARISONS[op](a, b)


def cast(x: TirExpr, source: str, target: str) -> TirExpr:
    """x converted as C would. A float outside the integer's range gives an unspecified integer, as in eager."""
    if source == target:
        return x
    if source == "bool":
        # A cast of a vector of bool cannot be bound (`Bindings.let`).
        return tirx.Select(x, const(1, target), const(0, target))
    if target == "bool":
        # A float by way of ==, as TVM's `!=` is false for NaN and a NaN is true.
        zero = const(0, source)
        return tirx.Not(tirx.EQ(x, zero)) if is_float(source) else tirx.NE(x, zero)
    if is_float(source) and target in ("int8", "uint8", "int16", "uint16"):
        # Through int32, as eager's compiled code goes: out-of-range values wrap alike.
        return tirx.Cast(target, tirx.Cast("int32", x))
    return tirx.Cast(target, x)


def _sub(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    return a - opaque(b, dtype) if is_float(dtype) else a - b


def _mul(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    if dtype == "bool":
        return tirx.And(a, b)
    if is_float(dtype):
        # x * 0 is NaN for infinite x: hide zeros from constant folding.
        a, b = (_hide_zero(v, dtype) for v in (a, b))
    return a * b


def _hide_zero(x: TirExpr, dtype: str) -> TirExpr:
    if not isinstance(x, tirx.FloatImm) or x.value != 0:
        return x
    return opaque(x, dtype)  # not a reinterpreted integer 0: TVM takes that for a null pointer


def _add(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    return tirx.Or(a, b) if dtype == "bool" else a + b


def _div(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    # A literal divisor 0 is an error of TVM's constant folding; hidden, it divides to infinity or NaN.
    return tirx.Div(a, _hide_zero(b, dtype)) if is_float(dtype) else _truncdiv(a, b, dtype, let)


def _is_signed(dtype: str) -> bool:
    return dtype.startswith("int")


def _safe_divisor(b: TirExpr, dtype: str, let: Let) -> tuple[TirExpr, TirExpr | None]:
    """(b, or 1 where dividing by it would trap, whether b is -1). The processor traps on x / 0 and on INT_MIN / -1."""
    zero, one = const(0, dtype), const(1, dtype)
    if isinstance(b, tirx.IntImm):
        return (b, None) if int(b.value) not in (0, -1) else (one, tirx.EQ(b, const(-1, dtype)))
    if not _is_signed(dtype):
        return let(tirx.Select(tirx.EQ(b, zero), one, b), dtype), None
    minus = let(tirx.EQ(b, const(-1, dtype)), "bool")
    return let(tirx.Select(tirx.Or(tirx.EQ(b, zero), minus), one, b), dtype), minus


def _truncdiv(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    if is_float(dtype):
        return tirx.trunc(_div(a, b, dtype, let))
    divisor, minus = _safe_divisor(b, dtype, let)
    quotient = tirx.truncdiv(a, divisor)
    return quotient if minus is None else tirx.Select(minus, const(0, dtype) - a, quotient)


def _truncmod(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    if is_float(dtype):
        # tirx.fmod has no code on CPU.
        return tirx.call_pure_extern(dtype, "fmodf" if dtype == "float32" else "fmod", a, b)
    # x % -1 is 0, and so is x % 1, which takes its place.
    return tirx.truncmod(a, _safe_divisor(b, dtype, let)[0])


def _floordiv(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    if not is_float(dtype):
        quotient = let(_truncdiv(a, b, dtype, let), dtype)
        if not _is_signed(dtype):
            return quotient
        remainder = let(_truncmod(a, b, dtype, let), dtype)
        return quotient - cast(_signs_differ(remainder, b, dtype), "bool", dtype)
    # c10::div_floor_floating: the quotient of what is left when the remainder is taken off, nudged to the nearest integer.
    remainder = let(_mod(a, b, dtype, let), dtype)
    zero = const(0, dtype)
    exact = let(tirx.Div(a - opaque(remainder, dtype), b), dtype)
    whole = let(tirx.floor(exact), dtype)
    nudged = tirx.Select(tirx.GT(exact - opaque(whole, dtype), const(0.5, dtype)), whole + const(1, dtype), whole)
    return tirx.Select(tirx.EQ(b, zero), tirx.Div(a, b), nudged)


def _signs_differ(remainder: TirExpr, b: TirExpr, dtype: str) -> TirExpr:
    """True if a non-zero remainder and the divisor have different signs."""
    zero = const(0, dtype)
    up = tirx.And(tirx.LT(remainder, zero), tirx.GT(b, zero))
    return tirx.Or(up, tirx.And(tirx.GT(remainder, zero), tirx.LT(b, zero)))


def _mod(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    remainder = let(_truncmod(a, b, dtype, let), dtype)
    if not is_float(dtype) and not _is_signed(dtype):
        return remainder
    return tirx.Select(_signs_differ(remainder, b, dtype), remainder + b, remainder)


def _pow(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    if isinstance(b, (tirx.FloatImm, tirx.IntImm)):
        value = float(b.value)
        if value.is_integer() and (0 <= value <= 64 or (-8 <= value < 0 and is_float(dtype))):
            result = _whole_power(a, abs(int(value)), dtype, let)
            return result if value >= 0 else tirx.Div(const(1, dtype), result)
        if value == 0.5:
            return tirx.sqrt(a)
        if value == -0.5:
            return tirx.Div(const(1, dtype), tirx.sqrt(a))
    if dtype == "float32":
        return math.power(let, a, b)
    if dtype == "float64":
        return _llvm("pow", dtype, a, b)
    return _integer_power(a, b, dtype, let)


def _whole_power(a: TirExpr, exponent: int, dtype: str, let: Let) -> TirExpr:
    """a^exponent by repeated squaring."""
    result = None
    while exponent:
        if exponent & 1:
            result = a if result is None else let(result * a, dtype)
        exponent >>= 1
        if exponent:
            a = let(a * a, dtype)
    return const(1, dtype) if result is None else result


def _integer_power(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    """a^b modulo 2^bits; 0 for negative b unless a is 1 or -1, as eager."""
    zero, one = const(0, dtype), const(1, dtype)
    result, base = one, a
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    for shift in range(bits - 1 if _is_signed(dtype) else bits):
        taken = tirx.EQ((b >> const(shift, dtype)) & one, zero)
        result = let(tirx.Select(taken, result, result * base), dtype)
        base = let(base * base, dtype)
    if not _is_signed(dtype):
        return result
    parity = tirx.Select(tirx.EQ(b & one, zero), one, const(-1, dtype))
    at_minus_one = tirx.Select(tirx.EQ(a, const(-1, dtype)), parity, zero)
    return tirx.Select(tirx.LT(b, zero), tirx.Select(tirx.EQ(a, one), one, at_minus_one), result)


def _extreme(compare: Callable[[TirExpr, TirExpr], TirExpr]) -> Callable[[TirExpr, TirExpr, str, Let], TirExpr]:
    def emit_extreme(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
        if not is_float(dtype):
            return tirx.Select(compare(a, b), a, b)
        if isinstance(a, tirx.FloatImm):
            a, b = b, a
        if isinstance(b, tirx.FloatImm) and not pymath.isnan(b.value):
            # One `maxps`: it returns its second operand, here the variable, when one is NaN.
            return tirx.Select(compare(b, a), b, a)
        return tirx.Select(math.is_nan(a, dtype), a, tirx.Select(compare(a, b), a, b))

    return emit_extreme


def _xor(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
    """Exclusive or of bool. Not `!=`, which TVM compiles to a comparison of floats where its operands are bool."""
    a, b = let(a, "bool"), let(b, "bool")
    return tirx.Or(tirx.And(a, tirx.Not(b)), tirx.And(b, tirx.Not(a)))


def _bits(bitwise: Callable[..., TirExpr], logical: Callable[..., TirExpr]) -> Callable[..., TirExpr]:
    return lambda a, b, dtype, let: logical(a, b) if dtype == "bool" else bitwise(a, b)


def _shift(op: Callable[..., TirExpr], is_left: bool) -> Callable[..., TirExpr]:
    def emit_shift(a: TirExpr, b: TirExpr, dtype: str, let: Let) -> TirExpr:
        """Shifting by a negative count or all bits: 0 (or the sign, to the right), as eager; the processor would wrap."""
        bits = int(dtype.removeprefix("u").removeprefix("int"))
        limit = const(bits - 1, dtype)
        inside = let(tirx.And(tirx.GE(b, const(0, dtype)), tirx.LE(b, limit)), "bool")
        if is_left or not _is_signed(dtype):
            return tirx.Select(inside, op(a, tirx.Select(inside, b, const(0, dtype))), const(0, dtype))
        return op(a, tirx.Select(inside, b, limit))

    return emit_shift


_BINARY: Mapping[str, Callable[[TirExpr, TirExpr, str, Let], TirExpr]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "floordiv": _floordiv,
    "truncdiv": _truncdiv,
    "mod": _mod,
    "fmod": _truncmod,
    "pow": _pow,
    "atan2": lambda a, b, dtype, let: _llvm("atan2", dtype, a, b),
    "max": _extreme(tirx.GT),
    "min": _extreme(tirx.LT),
    "bitand": _bits(tirx.bitwise_and, tirx.And),
    "bitor": _bits(tirx.bitwise_or, tirx.Or),
    "bitxor": lambda a, b, dtype, let: _xor(a, b, dtype, let) if dtype == "bool" else tirx.bitwise_xor(a, b),
    "shl": _shift(tirx.shift_left, True),
    "shr": _shift(tirx.shift_right, False),
    "and": lambda a, b, dtype, let: tirx.And(a, b),
    "or": lambda a, b, dtype, let: tirx.Or(a, b),
    "xor": _xor,
}


def _neg(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    # Times -1 and not 0 - x: -0.0 is the negative of 0.0.
    return x * const(-1, dtype) if is_float(dtype) else const(0, dtype) - x


def _abs(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    if is_float(dtype):
        return tirx.abs(x)
    return tirx.Select(tirx.LT(x, const(0, dtype)), const(0, dtype) - x, x) if _is_signed(dtype) else x


def _sign(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    if dtype == "bool":
        return x
    zero, one = const(0, dtype), const(1, dtype)
    below = tirx.Select(tirx.LT(x, zero), const(-1, dtype), zero) if is_float(dtype) or _is_signed(dtype) else zero
    return tirx.Select(tirx.GT(x, zero), one, below)


def _sigmoid(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    if dtype == "float32":
        return math.sigmoid(let, x)
    return const(1, dtype) / (const(1, dtype) + _llvm("exp", dtype, x * const(-1, dtype)))


def _expm1(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    if dtype == "float32":
        return math.expm1(let, x)
    # Kahan: (u - 1) x / log(u) with u = e^x.
    one = const(1, dtype)
    u = let(_llvm("exp", dtype, x), dtype)
    d = let(u - one, dtype)
    ordinary = let(d * x / _llvm("log", dtype, u), dtype)
    end = tirx.Or(tirx.EQ(d, const(-1, dtype)), tirx.EQ(u, const(pymath.inf, dtype)))
    return tirx.Select(tirx.EQ(d, const(0, dtype)), x, tirx.Select(end, d, ordinary))


def _log1p(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    if dtype == "float32":
        return math.log1p(let, x)
    u = let(opaque(x + const(1, dtype), dtype), dtype)
    d = let(u - const(1, dtype), dtype)
    ordinary = let(_llvm("log", dtype, u) * (x / d), dtype)
    near = tirx.Select(tirx.EQ(d, const(0, dtype)), x, ordinary)
    return tirx.Select(tirx.EQ(x, const(pymath.inf, dtype)), x, near)


def _asinh(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    """sign(x) log1p(a + a^2 / (1 + sqrt(a^2 + 1))), a = |x|; log(a) + log(2) where a^2 would overflow."""
    one = const(1, dtype)
    large = const(1e18, dtype)
    magnitude = let(tirx.abs(x), dtype)
    a = let(tirx.Select(tirx.GT(magnitude, large), large, magnitude), dtype)
    a2 = let(a * a, dtype)
    near = let(_log1p(let(a + a2 / (one + tirx.sqrt(a2 + one)), dtype), dtype, let), dtype)
    y = let(tirx.Select(tirx.GT(magnitude, large), _log_of_double(magnitude, dtype, let), near), dtype)
    signed = tirx.Select(tirx.LT(x, const(0, dtype)), y * const(-1, dtype), y)
    return tirx.Select(tirx.EQ(x, const(0, dtype)), x, signed)


def _log_of_double(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    log = math.log(let, x) if dtype == "float32" else _llvm("log", dtype, x)
    return log + const(pymath.log(2), dtype)


def _acosh(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    """log1p(t + sqrt(2 t + t^2)), t = x - 1."""
    large = const(1e18, dtype)
    bounded = let(tirx.Select(tirx.GT(x, large), large, x), dtype)
    t = let(bounded - const(1, dtype), dtype)
    near = let(_log1p(let(t + tirx.sqrt(t * const(2, dtype) + t * t), dtype), dtype, let), dtype)
    inside = let(tirx.Select(tirx.GT(x, large), _log_of_double(x, dtype, let), near), dtype)
    return tirx.Select(tirx.LT(t, const(0, dtype)), const(pymath.nan, dtype), inside)


def _atanh(x: TirExpr, dtype: str, let: Let) -> TirExpr:
    """log1p(2 x / (1 - x)) / 2 of |x|, with x's sign."""
    a = let(tirx.abs(x), dtype)
    ratio = let(a * const(2, dtype) / (const(1, dtype) - a), dtype)
    y = let(_log1p(ratio, dtype, let) * const(0.5, dtype), dtype)
    signed = tirx.Select(tirx.LT(x, const(0, dtype)), y * const(-1, dtype), y)
    return tirx.Select(tirx.EQ(x, const(0, dtype)), x, signed)


_UNARY: Mapping[str, Callable[[TirExpr, str, Let], TirExpr]] = {
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "bitnot": lambda x, dtype, let: tirx.Not(x) if dtype == "bool" else tirx.bitwise_not(x),
    "not": lambda x, dtype, let: tirx.Not(x),
    "sqrt": lambda x, dtype, let: tirx.sqrt(x),
    "rsqrt": lambda x, dtype, let: const(1, dtype) / tirx.sqrt(x),
    "sigmoid": _sigmoid,
    "expm1": _expm1,
    "log1p": _log1p,
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": _atanh,
}
