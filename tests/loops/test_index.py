"""The index algebra: simplification never changes a value, ranges bound values, reshapes are the row-major bijection."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_hybrid_backend.loops.index import (
    FloorDiv,
    Index,
    LoopVar,
    Mod,
    as_index,
    contiguous_strides,
    is_wide,
    linear,
    reach,
    reshape_index,
    var,
)
from torch_hybrid_backend.sizes.size import symbol

NAMES = ("i", "j", "k")


def value_of(index: Index, at: dict[str, int]) -> int:
    """An index evaluated as it stands."""
    total = index.const
    for atom, coefficient in index.terms:
        match atom:
            case LoopVar(name, _):
                part = at[name]
            case FloorDiv(numerator, divisor):
                part = value_of(numerator, at) // divisor
            case Mod(numerator, divisor):
                part = value_of(numerator, at) % divisor
            case _:
                raise AssertionError(atom)
        total += coefficient * part
    return total


@dataclass(frozen=True)
class Expression:
    """Index arithmetic as a tree: evaluated by Python's integers, or built (and simplified) as an Index."""

    op: str
    left: Expression | str | int
    right: Expression | int = 0

    def evaluate(self, at: dict[str, int]) -> int:
        left = _evaluate(self.left, at)
        right = _evaluate(self.right, at)
        return {
            "+": left + right,
            "-": left - right,
            "*": left * right,
            "//": left // (right or 1),
            "%": left % (right or 1),
        }[self.op]

    def build(self, extents: dict[str, int]) -> Index:
        left, right = _build(self.left, extents), self.right
        if isinstance(right, Expression):
            return left + right.build(extents) if self.op == "+" else left - right.build(extents)
        return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "//": left.__floordiv__, "%": left.__mod__}[
            self.op
        ](right)


def _evaluate(part: Expression | str | int, at: dict[str, int]) -> int:
    if isinstance(part, Expression):
        return part.evaluate(at)
    return at[part] if isinstance(part, str) else part


def _build(part: Expression | str | int, extents: dict[str, int]) -> Index:
    if isinstance(part, Expression):
        return part.build(extents)
    return var(part, extents[part]) if isinstance(part, str) else as_index(part)


leaves = st.one_of(st.sampled_from(NAMES), st.integers(-6, 6))


def _grow(children: st.SearchStrategy[Expression | str | int]) -> st.SearchStrategy[Expression]:
    trees = children.map(lambda c: c if isinstance(c, Expression) else Expression("+", c, 0))
    return st.one_of(
        st.builds(Expression, st.sampled_from("+-"), trees, trees),
        st.builds(Expression, st.just("*"), trees, st.integers(-5, 12)),
        st.builds(Expression, st.sampled_from(["//", "%"]), trees, st.integers(1, 12)),
    )


expressions = st.recursive(leaves, _grow, max_leaves=8).map(
    lambda c: c if isinstance(c, Expression) else Expression("+", c, 0)
)
all_extents = st.fixed_dictionaries({name: st.integers(1, 6) for name in NAMES})


def points(extents: dict[str, int]) -> list[dict[str, int]]:
    return [dict(zip(NAMES, p, strict=True)) for p in itertools.product(*(range(extents[n]) for n in NAMES))]


@settings(max_examples=400, deadline=None)
@given(expressions, all_extents)
def test_simplification_keeps_values_within_range(expression: Expression, extents: dict[str, int]) -> None:
    """A simplified index equals the plain arithmetic everywhere, and lies between its `low` and `high`."""
    index = expression.build(extents)
    for at in points(extents):
        value = value_of(index, at)
        assert value == expression.evaluate(at)
        assert index.low <= value <= index.high


@settings(max_examples=200, deadline=None)
@given(expressions, expressions, all_extents)
def test_substitution(outer: Expression, inner: Expression, extents: dict[str, int]) -> None:
    """Replacing a variable by an index of the same range is evaluating it there."""
    size = extents["i"]
    position = inner.build(extents) % size
    index = outer.build(extents)
    replaced = index.substitute({LoopVar("i", size): position}) if size > 1 else index
    for at in points(extents):
        assert value_of(replaced, at) == value_of(index, {**at, "i": value_of(position, at)})


@settings(max_examples=200, deadline=None)
@given(expressions, expressions, all_extents)
def test_equality_and_hash(first: Expression, second: Expression, extents: dict[str, int]) -> None:
    """Equal indices hash equally and have equal values; a sum does not depend on its order."""
    a, b = first.build(extents), second.build(extents)
    for at in points(extents):
        assert value_of(a + b, at) == value_of(b + a, at)
    if a == b:
        assert hash(a) == hash(b)
        assert all(value_of(a, at) == value_of(b, at) for at in points(extents))


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with one element count."""
    factors = draw(st.lists(st.integers(1, 4), min_size=0, max_size=5))

    def grouped() -> tuple[int, ...]:
        shape: list[int] = []
        for factor in factors:
            if shape and draw(st.booleans()):
                shape[-1] *= factor
            else:
                shape.append(factor)
            if draw(st.integers(0, 4)) == 0:
                shape.append(1)
        return tuple(shape)

    return grouped(), grouped()


@settings(max_examples=300, deadline=None)
@given(regroupings())
def test_reshape_is_the_row_major_bijection(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Element n of the target, in row-major order, is element n of the source; going back is the identity."""
    source, target = shapes
    variables = tuple(var(f"i{d}", n) for d, n in enumerate(target))
    index = reshape_index(variables, source, target)
    assert len(index) == len(source)
    offset = linear(index, contiguous_strides(source))
    for n, place in enumerate(itertools.product(*map(range, target))):
        at = {f"i{d}": p for d, p in enumerate(place)}
        assert value_of(offset, at) == n
        assert all(0 <= value_of(i, at) < size for i, size in zip(index, source, strict=True))
    assert all(i.low >= 0 and i.high < size for i, size in zip(index, source, strict=True))
    back = reshape_index(index, target, source)
    for place in itertools.product(*map(range, target)):
        at = {f"i{d}": p for d, p in enumerate(place)}
        assert tuple(value_of(i, at) for i in back) == place


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((12, 8), (96,)),
        ((96,), (12, 8)),
        ((2, 3, 4), (6, 4)),
        ((6, 4), (2, 3, 4)),
        ((4, 6), (4, 2, 3)),
        ((4, 6), (3, 8)),
    ],
)
def test_reshape_there_and_back_simplifies(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    """A reshape undone leaves no division behind: this is what keeps epilogues recognisable."""
    variables = tuple(var(f"i{d}", n) for d, n in enumerate(target))
    assert reshape_index(reshape_index(variables, source, target), target, source) == variables


def test_splits_simplify() -> None:
    """Quotient and remainder of a split variable are the parts; put together again they are the variable."""
    i, j = var("i", 4), var("j", 8)
    assert (i * 8 + j) // 8 == i
    assert (i * 8 + j) % 8 == j
    k = var("k", 32)
    assert (k // 8) * 8 + k % 8 == k
    assert (k // 4) // 2 == k // 8
    assert (k % 8) % 4 == k % 4


def test_one_iteration_is_a_constant() -> None:
    """A loop of one iteration has no variable."""
    assert var("i", 1) == 0
    assert var("i", 1).is_const


def test_division_by_nothing_is_an_error() -> None:
    """Divisors are positive."""
    with pytest.raises(ValueError, match="positive"):
        var("i", 4) // 0
    with pytest.raises(ValueError, match="positive"):
        var("i", 4) % -2


def test_row_major_strides() -> None:
    """The last dimension moves fastest."""
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides(()) == ()
    assert math.prod((2, 3, 4)) == linear((as_index(1), as_index(2), as_index(3)), (12, 4, 1)).const + 1


def test_which_indices_take_64_bits() -> None:
    """Those with integers that may be any, and those that reach beyond 2^31; sizes are checked where they are known."""
    s, n = symbol("s"), symbol("n", 2, -(1 << 63), (1 << 63) - 1)
    i = var("i", s)
    assert [is_wide(index) for index in (i * 4 + s, as_index(n), i - n, (i + n) % 8, var("j", 8) * (1 << 29))] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert reach(i * 4 + s - 3) == (s + 1) * 4 + s + 3
    assert reach(var("j", 8) * 5 - 3) == 38
