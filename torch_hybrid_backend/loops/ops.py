"""The scalar operations, and smart constructors for them.

`OPS` is the whole vocabulary an engine's printer must know. Semantics are PyTorch's: `max`/`min` propagate NaN, `round_even` rounds halves
to even, integer `floordiv` and `mod` round towards minus infinity, `truncdiv` towards zero, shifts and bit operations act on integers.

Two ways to choose: `where` evaluates both sides; `guard` evaluates its second argument only where the condition holds (its loads may
lie outside a tensor elsewhere).
"""

from __future__ import annotations

import math

from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import INDEX_DTYPE, Call, Const, Expr, FromIndex, Load

FLOAT_UNARY = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc sigmoid floor ceil round_even trunc".split()
)
UNARY = FLOAT_UNARY | frozenset(("neg", "abs", "sign", "bitnot"))
BINARY = frozenset("add sub mul div floordiv truncdiv mod fmod pow atan2 max min bitand bitor bitxor shl shr".split())
COMPARE = frozenset("eq ne lt le gt ge".split())
LOGICAL = frozenset("and or xor not".split())
PREDICATE = frozenset("isnan isinf".split())
# cast(x): to the call's dtype as C would, float -> int truncating, anything -> bool by != 0.
# round(x): float32 rounded to the narrower dtype named by the second argument's Const ("bfloat16" -> 0, "float16" -> 1) and widened again.
OTHER = frozenset("cast round where guard fma".split())
OPS = UNARY | BINARY | COMPARE | LOGICAL | PREDICATE | OTHER

_FLOATS = ("float32", "float64")
ROUND_TARGETS = ("bfloat16", "float16")


def is_float(dtype: str) -> bool:
    """Whether a compute dtype is a floating-point one."""
    return dtype in _FLOATS


def const(value: float, dtype: str) -> Const:
    """A literal of a compute dtype."""
    if dtype == "bool":
        return Const(dtype, bool(value))
    if is_float(dtype):
        return Const(dtype, float(value))
    return Const(dtype, int(value))


def call(op: str, *args: Expr, dtype: str | None = None) -> Expr:
    """`op(*args)`; the result has the first argument's dtype unless said otherwise. Literals are folded where that is exact."""
    if op not in OPS:
        raise ValueError(f"{op!r} is not a scalar operation of the loops language; legal: {sorted(OPS)}")
    if dtype is None:
        dtype = "bool" if op in COMPARE | LOGICAL | PREDICATE else args[0].dtype
    return Call(dtype, op, args)


def cast(x: Expr, dtype: str) -> Expr:
    """`x` converted to a compute dtype, as C converts."""
    if x.dtype == dtype:
        return x
    if isinstance(x, Const) and not (isinstance(x.value, float) and not math.isfinite(x.value)):
        return const(x.value, dtype)
    return Call(dtype, "cast", (x,))


def round_to(x: Expr, dtype: str) -> Expr:
    """A float32 scalar rounded to bfloat16 or float16 (and kept in float32); other dtypes: a cast."""
    if dtype not in ROUND_TARGETS:
        return cast(x, dtype)
    if isinstance(x, Load) and x.buffer.dtype == dtype:
        return x
    return Call("float32", "round", (cast(x, "float32"), Const("int64", ROUND_TARGETS.index(dtype))))


def from_index(index: Index | int, dtype: str = INDEX_DTYPE) -> Expr:
    """An index as a scalar of `dtype`."""
    index = as_index(index)
    scalar: Expr = Const(INDEX_DTYPE, index.const) if index.is_const else FromIndex(INDEX_DTYPE, index)
    return cast(scalar, dtype)


def add(a: Expr, b: Expr) -> Expr:
    return call("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return call("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return call("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    return call("div", a, b)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    return call("where", condition, a, b, dtype=a.dtype)


def guard(condition: Expr, inside: Expr, outside: Expr) -> Expr:
    """`inside` where the condition holds (evaluated only there), else `outside`."""
    if isinstance(condition, Const):
        return inside if condition.value else outside
    return call("guard", condition, inside, outside, dtype=inside.dtype)


def logical_and(a: Expr, b: Expr) -> Expr:
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return y if x.value else x
    return call("and", a, b)


def index_in(index: Index, low: int, high: int) -> Expr:
    """Whether `low <= index < high`, folded where the index's range decides."""
    result: Expr = Const("bool", True)
    if index.low < low:
        result = logical_and(result, call("ge", from_index(index), from_index(low)))
    if index.high >= high:
        result = logical_and(result, call("lt", from_index(index), from_index(high)))
    return result
