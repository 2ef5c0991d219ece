"""The scalar operations, and smart constructors for them.

`OPS` is the whole vocabulary an engine's printer must know. Semantics are PyTorch's: `max`/`min` propagate NaN, `round_even` rounds halves
to even, integer `floordiv` and `mod` round towards minus infinity, `truncdiv` towards zero, shifts and bit operations act on integers.

Two ways to choose: `where` evaluates both sides; `guard` evaluates its second argument only where the condition holds (its loads may
lie outside a tensor elsewhere).
"""

from __future__ import annotations

import math
import operator
import struct

from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import INDEX_DTYPE, Call, Const, Expr, FromIndex, compute_dtype, rounded
from torch_hybrid_backend.sizes.size import Dim, Size, known_at_most, known_less

FLOAT_UNARY = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc sigmoid floor ceil round_even trunc".split()
)
# exp_nonpositive: e^x where x <= 0 is known, with 0 in the place of denormals.
UNARY = FLOAT_UNARY | frozenset(("neg", "abs", "sign", "bitnot", "exp_nonpositive"))
BINARY = frozenset("add sub mul div floordiv truncdiv mod fmod pow atan2 max min bitand bitor bitxor shl shr".split())
COMPARE = frozenset("eq ne lt le gt ge".split())
_OF_LITERALS = {name: getattr(operator, name) for name in COMPARE}
LOGICAL = frozenset("and or xor not".split())
PREDICATE = frozenset("isnan isinf".split())
# cast(x): to the call's dtype as C would, float -> int truncating, anything -> bool by != 0.
# round(x): float32 rounded to the narrower dtype named by the second argument's Const (its number in
# ROUND_TARGETS) and widened again. What is too large becomes 448 in float8_e4m3fn and infinity in the others, as in PyTorch.
OTHER = frozenset("cast round where guard fma".split())
# random_uniform, random_normal(seed, counter, position, threads, vector, per_group): an element's number as cuRAND makes it of Philox4x32-10,
# uniform in (0, 1] or of the standard normal distribution (`loops.random_numbers.Draw`). seed and counter are int64, the others int32, or int64
# where there are more elements. Only where the kernels can (`loops.policy.Abilities.random_blocks`).
RANDOM = frozenset(("random_uniform", "random_normal"))
OPS = UNARY | BINARY | COMPARE | LOGICAL | PREDICATE | OTHER | RANDOM

_FLOATS = ("float32", "float64")


def is_float(dtype: str) -> bool:
    """True if a compute dtype is a floating-point one."""
    return dtype in _FLOATS


# The width of every integer dtype.
INTEGER_BITS = {"int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8}


def const(value: float | Size, dtype: str) -> Expr:
    """A literal of a compute dtype, rounded or wrapped to what the dtype can hold; a size only known at run time as a scalar."""
    return from_index(as_index(value), dtype) if isinstance(value, Size) else literal(value, dtype)


def times_literal(e: Expr) -> tuple[Expr, float] | None:
    """(x, factor) of an expression x * literal or x / literal; None for others."""
    match e:
        case Call(op="mul", args=(x, Const(value=by))) | Call(op="mul", args=(Const(value=by), x)):
            return x, float(by)
        case Call(op="div", args=(x, Const(value=by))) if by != 0:
            return x, 1 / by
    return None


def literal(value: float, dtype: str) -> Const:
    """A literal of a compute dtype, rounded or wrapped to what the dtype can hold."""
    if dtype == "bool":
        return Const(dtype, bool(value))
    if dtype == "float64":
        return Const(dtype, float(value))
    if dtype == "float32":
        try:
            return Const(dtype, float(struct.unpack("f", struct.pack("f", value))[0]))
        except OverflowError:
            return Const(dtype, math.copysign(math.inf, value))
    bits = INTEGER_BITS[dtype]
    wrapped = int(value) & ((1 << bits) - 1)
    return Const(dtype, wrapped - (1 << bits) if dtype != "uint8" and wrapped >> (bits - 1) else wrapped)


def call(op: str, *args: Expr, dtype: str | None = None) -> Expr:
    """`op(*args)`, of the first argument's dtype by default. Literals are folded where that is exact."""
    if op not in OPS:
        raise ValueError(f"{op!r} is not a scalar operation of the loops language; legal: {sorted(OPS)}")
    if dtype is None:
        dtype = "bool" if op in COMPARE | LOGICAL | PREDICATE else args[0].dtype
    folded = _fold_index(op, *args) if len(args) == 2 else _fold_choice(op, args)
    return Call(dtype, op, args) if folded is None else folded


def _fold_choice(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """`not` and `where` of a literal condition."""
    if not isinstance(args[0], Const) or args[0].dtype != "bool":
        return None
    if op == "not":
        return Const("bool", not args[0].value)
    if op == "where":
        return args[1] if args[0].value else args[2]
    return None


def _as_index(x: Expr) -> Index | None:
    if x.dtype != INDEX_DTYPE:
        return None
    if isinstance(x, FromIndex):
        return x.index
    return as_index(int(x.value)) if isinstance(x, Const) else None


def _fold_index(op: str, x: Expr, y: Expr) -> Expr | None:
    """Arithmetic on indices is index arithmetic; comparisons of literals, and those that the ranges decide, are literals."""
    if op in COMPARE and isinstance(x, Const) and isinstance(y, Const):
        return Const("bool", _OF_LITERALS[op](x.value, y.value))
    a, b = _as_index(x), _as_index(y)
    if a is None or b is None:
        return None
    if op in ("add", "sub"):
        return from_index(a + b if op == "add" else a - b)
    if op == "mul" and (a.is_const or b.is_const):
        return from_index(a * b.const if b.is_const else b * a.const)
    if op in ("floordiv", "mod") and b.is_const and known_less(0, b.const):
        return from_index(a // b.const if op == "floordiv" else a % b.const)
    if op in ("min", "max") and (known_at_most(a.high, b.low) or known_at_most(b.high, a.low)):
        return x if known_at_most(a.high, b.low) == (op == "min") else y
    if op not in COMPARE:
        return None
    # Each comparison by where it certainly holds and where it certainly fails.
    less, greater = known_less(a.high, b.low), known_less(b.high, a.low)
    equal = a == b
    verdicts = {
        "lt": (less, equal or known_at_most(b.high, a.low)),
        "le": (equal or known_at_most(a.high, b.low), greater),
        "gt": (greater, equal or known_at_most(a.high, b.low)),
        "ge": (equal or known_at_most(b.high, a.low), less),
        "eq": (equal, less or greater),
        "ne": (less or greater, equal),
    }
    holds, fails = verdicts[op]
    return Const("bool", holds) if holds or fails else None


def cast(x: Expr, dtype: str) -> Expr:
    """`x` converted to a compute dtype, as C converts."""
    if x.dtype == dtype:
        return x
    if isinstance(x, Const) and (math.isfinite(x.value) or is_float(dtype)):
        return literal(x.value, dtype)
    if dtype == "bool" and isinstance(x, Call) and x.op == "cast" and x.args[0].dtype == "bool":
        return x.args[0]  # a condition that passed through a wider dtype
    return Call(dtype, "cast", (x,))


def round_to(x: Expr, dtype: str) -> Expr:
    """`x` cast to the compute dtype of `dtype`, and rounded to `dtype` if that is a narrow float."""
    return rounded(cast(x, compute_dtype(dtype)), dtype)


def from_index(index: Index | Dim, dtype: str = INDEX_DTYPE) -> Expr:
    """An index as a scalar of `dtype`."""
    index = as_index(index)
    scalar: Expr = (
        Const(INDEX_DTYPE, index.const)
        if isinstance(index.const, int) and index.is_const
        else FromIndex(INDEX_DTYPE, index)
    )
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


def decided(e: Expr, guard: Call, branch: int) -> Expr:
    """The expression with one guard replaced by its `inside` (branch 1) or its `outside` (branch 2), and so each of the same condition or its
    negation. Equal parts of the expression are one object (`sharing.Sharing`)."""
    condition = guard.args[0]
    done: dict[Expr, Expr] = {}

    def known(x: Call) -> int | None:
        """The branch of a guard with a decided condition; None for another guard."""
        if x.op != "guard":
            return None
        if x.args[0] is condition:
            return branch
        is_negated = isinstance(x.args[0], Call) and x.args[0].op == "not" and x.args[0].args[0] is condition
        return 3 - branch if is_negated else None

    def visit(x: Expr) -> Expr:
        if x not in done:
            result = x
            if isinstance(x, Call) and (left := known(x)) is not None:
                result = visit(x.args[left])
            elif isinstance(x, Call):
                args = tuple(visit(a) for a in x.args)
                if any(a is not b for a, b in zip(args, x.args, strict=True)):
                    result = Call(x.dtype, x.op, args)
            done[x] = result
        return done[x]

    return visit(e)


def logical_and(a: Expr, b: Expr) -> Expr:
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return y if x.value else x
    return call("and", a, b)


def logical_or(a: Expr, b: Expr) -> Expr:
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return x if x.value else y
    return call("or", a, b)


def index_in(index: Index, low: Dim, high: Dim) -> Expr:
    """True if `low <= index < high`, folded where the index's range decides."""
    result: Expr = Const("bool", True)
    if not known_at_most(low, index.low):
        result = logical_and(result, call("ge", from_index(index), from_index(low)))
    if not known_less(index.high, high):
        result = logical_and(result, call("lt", from_index(index), from_index(high)))
    return result
