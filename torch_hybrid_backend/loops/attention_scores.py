"""Scores of attention, computed from the product of a query and a key, and the keys that a query can see.

(q . k, (*lead, s, t)) -> score                                     `loops.ir.ScoreFn`
where(t <= cache_position[s], q . k * scale, -inf)                  an example, as an expression
visible(score, t) -> t <= cache_position[s], exactly                what follows from it for every key
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch_hybrid_backend.loops.index import Index, LoopVar
from torch_hybrid_backend.loops.ir import (
    INDEX_DTYPE,
    Buffer,
    Call,
    Const,
    Expr,
    FromIndex,
    Load,
    Value,
    domain_vars,
    indices,
    parts,
)
from torch_hybrid_backend.loops.ops import (
    COMPARE,
    add,
    call,
    cast,
    from_index,
    is_float,
    literal,
    mul,
    sub,
    times_literal,
    where,
)

_MASK_CALLS = (
    12  # a causal window within a cache's length is 8; a table of relative positions is some 30, with a logarithm
)


def is_cheap_mask(expr: Expr) -> bool:
    """True if a mask costs less to compute than to read: a few operations, those of indices included."""
    return sum(isinstance(e, Call) for e in parts([expr], within_indices=True)) <= _MASK_CALLS


def tells_last_key(mask: Value) -> bool:
    """True if a mask, (*lead, S, T), is of one query and bounds the keys that this one sees."""
    index = domain_vars(mask.shape)
    if len(index) < 2 or mask.shape[-2] != 1 or not index[-1].terms:
        return False
    key = index[-1].terms[0][0]
    expr = mask.at(index)
    if expr.dtype == "bool":
        expr = where(expr, literal(0.0, "float32"), literal(-math.inf, "float32"))
    return isinstance(key, LoopVar) and is_cheap_mask(expr) and bool(visible(expr, key).bounds.highs)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SdpaScore:
    """The score of `scaled_dot_product_attention`, a `ScoreFn`: product * scale + mask, and -inf where t > s if it is causal.

    `mask`: floats to add, (*lead, S, T).
    """

    scale: float
    causal: bool = False
    mask: Value | None = None

    def __call__(self, product: Expr, index: tuple[Index, ...]) -> Expr:
        *_, s, t = index
        value = mul(product, literal(self.scale, product.dtype))
        if self.mask is not None:
            value = masked(value, cast(self.mask.at(index), product.dtype))
        if self.causal:
            seen = call("le", from_index(t), from_index(s))
            value = where(seen, value, literal(-math.inf, product.dtype))
        return value


def unscaled(score: Expr, product: Buffer) -> tuple[float, Expr | None]:
    """(scale, score of scaled products): the positive factor of every product, and the score without it; None if only a product is left."""
    factors = {_factor(e, product) for e in parts([score])} - {0.0}
    factor = factors.pop() if len(factors) == 1 else 1.0
    if isinstance(score, Load) or not 0 < factor < math.inf:
        return 1.0, None if isinstance(score, Load) else score
    own = _of_scaled(score, product, factor)
    return factor, None if isinstance(own, Load) else own


def _factor(e: Expr, product: Buffer) -> float:
    """The literal that an operation multiplies the product by: NaN for any other operation on the product, 0 for one that does not read it."""
    if not isinstance(e, Call) or not any(isinstance(x, Load) and x.buffer is product for x in e.args):
        return 0.0
    found = times_literal(e)
    return math.nan if found is None else found[1] or math.nan


def _of_scaled(score: Expr, product: Buffer, factor: float) -> Expr:
    """A score with the product in place of every product times `factor`."""
    done: dict[Expr, Expr] = {}

    def visit(e: Expr) -> Expr:
        if e not in done:
            found = times_literal(e) if _factor(e, product) == factor else None
            if found is not None:
                done[e] = found[0]
            else:
                done[e] = e.with_args(map(visit, e.args)) if isinstance(e, Call) else e
        return done[e]

    return visit(score)


def masked(value: Expr, mask: Expr) -> Expr:
    """value + mask. A mask of 0 and -inf becomes a choice instead, which saves an operation for each score."""
    match mask:
        case Call(op="where", args=(condition, Const(value=inside), Const(value=outside))):
            if inside == 0 and outside == -math.inf:
                return where(condition, value, mask.args[2])
            if inside == -math.inf and outside == 0:
                return where(condition, mask.args[1], value)
    return add(value, mask)


def scaled(e: Expr, factor: float) -> Expr:
    """e * factor, for a positive factor. Literals in `e` absorb the factor if they can."""
    match e:
        case Const(dtype, value):
            return literal(value * factor, dtype)
        case Call(op="mul", args=(x, Const() as by)):
            return mul(x, scaled(by, factor))
        case Call(op="mul", args=(Const() as by, x)):
            return mul(scaled(by, factor), x)
        case Call(op="div", args=(x, Const(value=by))):
            return mul(x, literal(factor / by, e.dtype))
        case Call(op="where" | "guard", args=(condition, inside, outside)):
            return Call(e.dtype, e.op, (condition, scaled(inside, factor), scaled(outside, factor)))
        case Call(op="add" | "sub", args=(x, y)) if _takes_factor(x) and _takes_factor(y):
            return Call(e.dtype, e.op, (scaled(x, factor), scaled(y, factor)))
    return mul(e, literal(factor, e.dtype))


def _takes_factor(e: Expr) -> bool:
    match e:
        case Const():
            return True
        case Call(op="mul" | "div", args=(x, y)):
            return isinstance(y, Const) or (e.op == "mul" and isinstance(x, Const))
        case Call(op="where" | "guard", args=(_, inside, outside)):
            return _takes_factor(inside) and _takes_factor(outside)
    return False


@dataclass(frozen=True, slots=True)
class Bounds:
    """Keys from every one of `lows` to every one of `highs`, both included: int64 scalars that do not depend on the key."""

    lows: tuple[Expr, ...] = ()
    highs: tuple[Expr, ...] = ()

    def __and__(self, other: Bounds) -> Bounds:
        return Bounds((*self.lows, *other.lows), (*self.highs, *other.highs))

    def __or__(self, other: Bounds) -> Bounds:
        """The least bounds that hold both. Each side's own are first made one."""
        lows = _extreme("min", [_extreme("max", side.lows) for side in (self, other)])
        highs = _extreme("max", [_extreme("min", side.highs) for side in (self, other)])
        return Bounds(() if lows is None else (lows,), () if highs is None else (highs,))


def _extreme(op: str, values: list[Expr | None] | tuple[Expr, ...]) -> Expr | None:
    result: Expr | None = None
    for value in values:
        if value is None:
            return None
        result = value if result is None else call(op, result, value)
    return result


@dataclass(frozen=True, slots=True)
class Visible:
    """Keys for which a score may be more than -inf: none outside `bounds`.

    `decided`: conditions of the score, each with the value that it has for all keys within both `bounds` and `inner`.
    """

    bounds: Bounds
    inner: Bounds
    decided: Mapping[Expr, bool]


def visible(score: Expr, t: LoopVar) -> Visible:
    """Keys that are visible by a score; `t` is the variable of the key's number.

    They follow from conditions that compare the key's number, times 1 or -1, with an expression that does not depend on the key; loads are
    allowed in the expression. Kernels compute no product for a key outside: a NaN that an infinite key would have made does not show.
    """
    decided: dict[Expr, tuple[bool, Bounds]] = {}

    def of(e: Expr) -> Bounds | None:
        """Bounds by one part of the score; None where that is -inf for every key."""
        match e:
            case Const(value=value) if value == -math.inf:
                return None
            case Call(op="where" | "guard", args=(condition, inside, outside)):
                if_true, if_false = of(inside), of(outside)
                if if_true is None and if_false is None:
                    return None
                if if_false is None or if_true is None:
                    truth = if_false is None
                    rest = if_true if truth else if_false
                    assert rest is not None
                    return when(condition, truth) & rest
                return if_true | if_false
            case Call(op="add", args=(x, y)):
                first, second = of(x), of(y)
                return None if first is None or second is None else first & second
            case Call(op="sub", args=(x, _)) if is_float(e.dtype):
                return of(x)
            case Call(op="cast" | "round", args=(x, *_)) if is_float(x.dtype):
                return of(x)
            case Call(op="mul" | "div", args=(x, Const(value=by))) if by > 0:
                return of(x)
        return Bounds()

    def when(condition: Expr, truth: bool) -> Bounds:
        found = _bounds(condition, truth, t)
        for part, value, bounds in found.exact:
            decided[part] = (value, bounds)
        return found.bounds

    bounds = of(score)
    if bounds is None:
        zero = literal(-1, INDEX_DTYPE)
        return Visible(Bounds((), (zero,)), Bounds(), {})
    inner = Bounds()
    for _, own in decided.values():
        inner = inner & own
    return Visible(bounds, inner, {part: value for part, (value, _) in decided.items()})


@dataclass(frozen=True, slots=True)
class _ConditionBounds:
    """Bounds of the keys for which a condition may have a value.

    `exact`: parts of the condition, each with a value and the bounds within which exactly the part has that value.
    """

    bounds: Bounds
    exact: tuple[tuple[Expr, bool, Bounds], ...] = ()


_FLIPPED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def _bounds(condition: Expr, truth: bool, t: LoopVar) -> _ConditionBounds:
    """Bounds of the keys for which a condition may have the value `truth`."""
    match condition:
        case Call(op="not", args=(x,)):
            return _bounds(x, not truth, t)
        case Call(op="and" | "mul" | "bitand" | "or" | "add" | "bitor", dtype="bool", args=(x, y)):
            first, second = _bounds(x, truth, t), _bounds(y, truth, t)
            if (condition.op in ("and", "mul", "bitand")) == truth:
                return _ConditionBounds(first.bounds & second.bounds, (*first.exact, *second.exact))
            return _ConditionBounds(first.bounds | second.bounds)
        case Call(op="where" | "guard", args=(choice, inside, Const(value=other))):
            # choice and inside, or: not choice or inside
            first, second = _bounds(choice, truth != bool(other), t), _bounds(inside, truth, t)
            if truth != bool(other):
                return _ConditionBounds(first.bounds & second.bounds, (*first.exact, *second.exact))
            return _ConditionBounds(first.bounds | second.bounds)
        case Call(op="cast", dtype="bool", args=(x,)) if x.dtype == "bool":
            return _bounds(x, truth, t)
        case Call(op=op, args=(x, y)) if op in COMPARE:
            found = _compared(op if truth else _FLIPPED[op], x, y, t)
            if found is not None:
                exact = ((condition, truth, found),) if found.lows or found.highs else ()
                return _ConditionBounds(found, exact)
    return _ConditionBounds(Bounds())


def _compared(op: str, x: Expr, y: Expr, t: LoopVar) -> Bounds | None:
    """Bounds of exactly the keys for which x `op` y holds; None if those keys are no range."""
    left, right = _linear(x, t), _linear(y, t)
    if left is None or right is None or op == "ne":
        return None
    times = left[0] - right[0]
    if times not in (1, -1):
        return None
    # times * t `op` limit
    above, below = (right[1], left[1]) if times == 1 else (left[1], right[1])
    limit = above if isinstance(below, Const) and below.value == 0 else sub(above, below)
    if times == -1:
        op = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(op, op)
    one = literal(1, INDEX_DTYPE)
    match op:
        case "lt":
            return Bounds((), (sub(limit, one),))
        case "le":
            return Bounds((), (limit,))
        case "gt":
            return Bounds((add(limit, one),), ())
        case "ge":
            return Bounds((limit,), ())
    return Bounds((limit,), (limit,))


def _linear(e: Expr, t: LoopVar) -> tuple[int, Expr] | None:
    """(c, rest) with e == c * t + rest and a rest that does not depend on t, an int64; None where there is no such form."""
    if is_float(e.dtype) or e.dtype == "bool":
        return None
    if is_free_of(e, t):
        return 0, cast(e, INDEX_DTYPE)
    match e:
        case FromIndex(index=index):
            times = dict(index.terms).get(t)
            if not isinstance(times, int):
                return None
            rest = index - Index(((t, times),), 0)
            return None if not is_free_of(from_index(rest), t) else (times, from_index(rest))
        case Call(op="cast", args=(FromIndex() as x,)) if e.dtype in ("int32", INDEX_DTYPE):
            return _linear(x, t)  # no index of a kernel's is beyond 32 bits
        case Call(op="add" | "sub", dtype="int64", args=(x, y)):
            left, right = _linear(x, t), _linear(y, t)
            if left is None or right is None:
                return None
            sign = 1 if e.op == "add" else -1
            return left[0] + sign * right[0], call(e.op, left[1], right[1])
        case Call(op="neg", dtype="int64", args=(x,)):
            inner = _linear(x, t)
            return None if inner is None else (-inner[0], sub(literal(0, INDEX_DTYPE), inner[1]))
    return None


def is_free_of(e: Expr, variable: LoopVar, env: Mapping[LoopVar, Index] | None = None) -> bool:
    """True if no part of an expression depends on a loop variable. `env`: what its own variables are in terms of others."""
    values = dict(env or {})
    for part in parts([e], within_indices=True):
        for index in indices(part):
            moved = index.substitute(values) if values else index
            if any(leaf == variable for leaf in moved.leaves()):
                return False
    return True


def simplified(e: Expr, decided: Mapping[Expr, bool]) -> Expr:
    """The expression where conditions have the values that are decided."""
    done: dict[Expr, Expr] = {}

    def visit(x: Expr) -> Expr:
        if x in decided:
            return Const("bool", decided[x])
        if x not in done:
            result = x
            if isinstance(x, Call):
                args = tuple(map(visit, x.args))
                if any(a is not b for a, b in zip(args, x.args, strict=True)):
                    result = _folded(x, args)
            done[x] = result
        return done[x]

    return visit(e)


def _folded(x: Call, args: tuple[Expr, ...]) -> Expr:
    match x.op, args:
        case (("where" | "guard"), (Const(value=truth), inside, outside)):
            return inside if truth else outside
        case "not", (Const(value=truth),):
            return Const("bool", not truth)
        case (("and" | "mul" | "bitand"), (first, second)) if x.dtype == "bool":
            return _connected(x, first, second, True)
        case (("or" | "add" | "bitor"), (first, second)) if x.dtype == "bool":
            return _connected(x, first, second, False)
    return Call(x.dtype, x.op, args)


def _connected(x: Call, first: Expr, second: Expr, neutral: bool) -> Expr:
    for a, b in ((first, second), (second, first)):
        if isinstance(a, Const):
            return b if bool(a.value) == neutral else a
    return Call(x.dtype, x.op, (first, second))
