"""Conclusions from scores, compared with the scores themselves at every point."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.loops.interpret import Environment, Frame
from torch_hybrid_backend.loops.attention_scores import (
    SdpaScore,
    is_free_of,
    masked,
    scaled,
    simplified,
    tells_last_key,
    unscaled,
    visible,
)
from torch_hybrid_backend.loops.index import Index, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, FromIndex, Map
from torch_hybrid_backend.loops.ops import add, call, cast, const, from_index, literal, mul, sub, where

ROWS, KEYS = 7, 11
PRODUCT = Buffer((ROWS, KEYS), "float32", "product")
POSITIONS = Buffer((ROWS,), "int32", "positions")
ALLOWED = Buffer((ROWS, KEYS), "bool", "allowed")
ENV: Environment = {
    PRODUCT: torch.randn(ROWS, KEYS),
    POSITIONS: torch.tensor([3, 0, 10, 7, -1, 20, 5], dtype=torch.int32),
    ALLOWED: torch.rand(ROWS, KEYS) > 0.3,
}
NOTHING = literal(-math.inf, "float32")
ZERO = literal(0, "float32")
Condition = Callable[[Index, Index], Expr]


def _load(buffer: Buffer, *index: Index) -> Expr:
    return buffer.at(index)


def _no_later(s: Index, t: Index) -> Expr:
    return call("le", from_index(t), from_index(s))


def _to_position(s: Index, t: Index) -> Expr:
    return call("ge", cast(_load(POSITIONS, s), "int64"), from_index(t))


CONDITIONS: dict[str, tuple[Condition, bool, bool]] = {  # (condition, has a low, has a high)
    "causal": (_no_later, False, True),
    "to a position": (_to_position, False, True),
    "int32": (lambda s, t: call("lt", cast(from_index(t), "int32"), _load(POSITIONS, s)), False, True),
    "window": (
        lambda s, t: call("and", _no_later(s, t), call("gt", from_index(t), from_index(s - 3))),
        True,
        True,
    ),
    "distance": (lambda s, t: call("lt", sub(from_index(s), from_index(t)), const(2, "int64")), True, False),
    "not": (lambda s, t: call("not", _no_later(s, t)), True, False),
    "chosen": (lambda s, t: where(_no_later(s, t), literal(1, "bool"), literal(0, "bool")), False, True),
    "either": (lambda s, t: call("or", _no_later(s, t), _to_position(s, t)), False, True),
    "or anything": (lambda s, t: call("or", _no_later(s, t), _load(ALLOWED, s, t)), False, False),
    "and anything": (lambda s, t: call("and", _no_later(s, t), _load(ALLOWED, s, t)), False, True),
    "one key": (lambda s, t: call("eq", from_index(t), from_index(s)), True, True),
    "all but one": (lambda s, t: call("ne", from_index(t), from_index(s)), False, False),
    "remainder": (lambda s, t: call("le", from_index(t % 4), from_index(s)), False, False),
    "doubled": (lambda s, t: call("le", from_index(t * 2), from_index(s)), False, False),
}


def _forms(condition: Expr, product: Expr) -> list[Expr]:
    value = mul(product, literal(0.3, "float32"))
    mask = where(condition, ZERO, NOTHING)
    return [
        where(condition, value, NOTHING),
        where(call("not", condition), NOTHING, value),
        add(value, mask),
        masked(value, mask),
        mul(add(call("tanh", value), mask), literal(2.0, "float32")),
        where(condition, add(value, ZERO), add(value, NOTHING)),
    ]


@pytest.mark.parametrize("name", CONDITIONS)
def test_bounds(name: str) -> None:
    """Beyond its bounds every score is -inf, and within the inner ones a score is as without the decided conditions."""
    condition, has_low, has_high = CONDITIONS[name]
    frame = Frame((ROWS, KEYS), ENV)
    s, t = frame.index
    ((variable, _),) = t.terms
    for score in _forms(condition(s, t), PRODUCT.at((s, t))):
        found = visible(score, variable)  # type: ignore[arg-type]
        assert (bool(found.bounds.lows), bool(found.bounds.highs)) == (has_low, has_high)
        exact = frame.expr(score, None).expand(ROWS, KEYS)
        keys = torch.arange(KEYS).expand(ROWS, KEYS)
        outside = torch.zeros(ROWS, KEYS, dtype=torch.bool)
        inside = torch.full((ROWS, KEYS), bool(found.decided))
        for low in found.bounds.lows:
            assert is_free_of(low, variable)  # type: ignore[arg-type]
            outside |= keys < frame.expr(low, None)
        for high in found.bounds.highs:
            outside |= keys > frame.expr(high, None)
        for low in found.inner.lows:
            inside &= keys >= frame.expr(low, None)
        for high in found.inner.highs:
            inside &= keys <= frame.expr(high, None)
        assert bool((exact[outside] == -math.inf).all())
        plain = frame.expr(simplified(score, found.decided), None).expand(ROWS, KEYS)
        torch.testing.assert_close(plain[inside], exact[inside])
        if has_high and name in ("causal", "window"):
            assert bool(inside.any())
            assert bool(outside.any())


def test_decided_conditions_are_gone() -> None:
    """A condition that holds everywhere within the bounds is not computed there."""
    frame = Frame((ROWS, KEYS), ENV)
    s, t = frame.index
    ((variable, _),) = t.terms
    product = PRODUCT.at((s, t))
    score = where(CONDITIONS["window"][0](s, t), product, NOTHING)
    assert simplified(score, visible(score, variable).decided) is product  # type: ignore[arg-type]


def test_nothing_is_visible() -> None:
    frame = Frame((ROWS, KEYS), ENV)
    ((variable, _),) = frame.index[1].terms
    (high,) = visible(NOTHING, variable).bounds.highs  # type: ignore[arg-type]
    assert isinstance(high, Const)
    assert high.value == -1


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_scaled(factor: float) -> None:
    """The factor goes into literals, also through division and choices; elsewhere it is a product."""
    frame = Frame((ROWS, KEYS), ENV)
    product = PRODUCT.at(frame.index)
    condition = CONDITIONS["causal"][0](*frame.index)
    half = literal(0.5, "float32")
    in_literals = [mul(product, half), mul(half, product), call("div", product, half)]
    in_literals += [where(condition, x, NOTHING) for x in in_literals] + [add(in_literals[0], in_literals[2])]
    for e in [*in_literals, product, call("tanh", product), add(product, mul(product, half))]:
        result = scaled(e, factor)
        torch.testing.assert_close(frame.expr(result, None), frame.expr(e, None) * factor)
    assert [_operations(scaled(e, factor)) for e in in_literals] == [_operations(e) for e in in_literals]


def _operations(e: Expr) -> int:
    return 1 + sum(map(_operations, e.args)) if isinstance(e, Call) else 0


def test_unscaled() -> None:
    """A positive factor of every product is taken out, of products and quotients alike; two factors, or a negative one, are not."""
    frame = Frame((ROWS, KEYS), ENV)
    product = PRODUCT.at(frame.index)
    quarter, bias = mul(product, literal(0.25, "float32")), ALLOWED.at(frame.index)
    hidden = where(bias, quarter, NOTHING)
    divided = call("tanh", call("div", product, literal(4.0, "float32")))
    for score, factor in (
        (hidden, 0.25),
        (divided, 0.25),
        (add(hidden, product), 1.0),
        (add(hidden, mul(product, ZERO)), 1.0),
    ):
        found, rest = unscaled(score, PRODUCT)
        assert found == factor
        assert rest is not None
        own = Frame((ROWS, KEYS), {**ENV, PRODUCT: ENV[PRODUCT] * factor})
        torch.testing.assert_close(own.expr(rest, None), frame.expr(score, None), equal_nan=True)
    assert unscaled(quarter, PRODUCT) == (0.25, None)
    assert unscaled(product, PRODUCT) == (1.0, None)
    negative = mul(product, literal(-1.0, "float32"))
    assert unscaled(negative, PRODUCT) == (1.0, negative)


def test_sdpa_score() -> None:
    """scale, mask, causal: a mask of 0 and -inf becomes a choice."""
    mask = Map((ROWS, KEYS), "float32", lambda i: where(call("lt", from_index(i[1]), from_index(4)), ZERO, NOTHING))
    frame = Frame((ROWS, KEYS), ENV)
    score = SdpaScore(scale=0.25, causal=True, mask=mask)(PRODUCT.at(frame.index), frame.index)
    rows, keys = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    want = (ENV[PRODUCT] * 0.25).masked_fill((keys > rows) | (keys >= 4), -math.inf)
    torch.testing.assert_close(frame.expr(score, None), want)
    assert _operations(score) == 5


def test_is_free_of() -> None:
    """Through indices, also those that are read from memory; in terms of other variables where they are given."""
    frame = Frame((ROWS, KEYS), ENV)
    s, t = frame.index
    ((row, _),) = s.terms
    ((key, _),) = t.terms
    e = add(PRODUCT.at((s, t)), PRODUCT.at((s, t)))
    assert not is_free_of(e, row)  # type: ignore[arg-type]
    assert is_free_of(POSITIONS.at((s,)), key)  # type: ignore[arg-type]
    assert is_free_of(POSITIONS.at((s,)), row, {row: index_of(key)})  # type: ignore[arg-type, dict-item]
    assert isinstance(from_index(t), FromIndex)


def test_masks_that_tell_the_last_key() -> None:
    """Those of one query that follow from a position, as choices or as numbers to add; not those that lie in memory, or of several queries."""
    position, flags = Buffer((1,), "int64", "position"), Buffer((KEYS,), "bool", "flags")

    def mask(rows: int, condition: Callable[[Index], Expr], is_added: bool = False) -> Map:
        def at(index: tuple[Index, ...]) -> Expr:
            seen = condition(index[1])
            return where(seen, ZERO, NOTHING) if is_added else seen

        return Map((rows, KEYS), "float32" if is_added else "bool", at)

    def to_position(t: Index) -> Expr:
        return call("le", from_index(t), _load(position, as_index(0)))

    def from_position(t: Index) -> Expr:
        return call("ge", from_index(t), _load(position, as_index(0)))

    assert tells_last_key(mask(1, to_position))
    assert tells_last_key(mask(1, to_position, is_added=True))
    assert not tells_last_key(mask(2, to_position))
    assert not tells_last_key(mask(1, from_position))
    assert not tells_last_key(mask(1, lambda t: _load(flags, t)))
    assert not tells_last_key(Buffer((KEYS,), "bool", "row"))
