"""Sizes: arithmetic agrees with integers at all values of the symbols, and no comparison claims what some value refutes."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings

from tests.sizes.expressions import VALUES, S, T, expressions
from torch_hybrid_backend.sizes import size as sizes
from torch_hybrid_backend.sizes.size import Dim, Size, UndecidedSizeError, evaluate, function, symbol


@settings(max_examples=150, derandomize=True, deadline=None)
@given(expressions(), expressions())
def test_arithmetic_agrees_with_numbers(a: Dim, b: Dim) -> None:
    """Sums, products, quotients and remainders of sizes have the values of integer arithmetic."""
    for values in VALUES:
        x, y = evaluate(a, values), evaluate(b, values)
        assert evaluate(a + b, values) == x + y
        assert evaluate(a - b, values) == x - y
        assert evaluate(a * b, values) == x * y
        assert evaluate(a // 4, values) == x // 4
        assert evaluate(a % 6, values) == x % 6
        assert evaluate(sizes.ceil_div(a, 16), values) == -(-x // 16)
        quotient, rest = sizes.divide(a, b) if b != 0 else (0, a)
        assert evaluate(quotient * b + rest, values) == x


@settings(max_examples=150, derandomize=True, deadline=None)
@given(expressions(), expressions())
def test_comparisons_hold_at_every_value(a: Dim, b: Dim) -> None:
    """A comparison that answers holds at all values: less, at most, equal, or at least a bound."""
    for values in VALUES:
        x, y = evaluate(a, values), evaluate(b, values)
        assert x >= sizes.lower_bound(a)
        assert x < y or not sizes.known_less(a, b)
        assert x <= y or not sizes.known_at_most(a, b)
        assert x == y or a != b


@settings(max_examples=100, derandomize=True, deadline=None)
@given(expressions())
def test_pickles_come_back(a: Dim) -> None:
    """Unpickling a size gives an equal size."""
    assert pickle.loads(pickle.dumps(a)) == a  # within one process's test: nothing is unpickled from disk


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((S * 12) // 4, S * 3),
        ((S * 12 + 5) % 4, 1),
        (S * T // T, S),
        (S - S, 0),
        ((S + 1) * T // (S + 1), T),
        ((S * 768 * T) // (T * 64), S * 12),
        (function("max", S + 1, S), S + 1),
    ],
)
def test_what_divides_is_divided(found: Dim, expected: Dim) -> None:
    """Quotients that are polynomials become polynomials; constants become ints."""
    assert found == expected
    assert isinstance(found, int) == isinstance(expected, int)


@pytest.mark.parametrize("question", [lambda: S < T, lambda: bool(S), lambda: int(S), lambda: S > 1, lambda: range(S)])
def test_what_depends_on_the_value_is_undecided(question: object) -> None:
    """Questions whose answer depends on the symbols raise UndecidedSizeError, also where Python needs a number."""
    assert callable(question)
    with pytest.raises(UndecidedSizeError):
        question()


def test_symbols_and_typical_values() -> None:
    """`symbols` has each symbol once, in order; `size_hint` is the value for the hints."""
    size = sizes.ceil_div(T * S, 16) + T
    assert isinstance(size, Size)
    assert {s.name for s in sizes.symbols([size, S])} == {"s0", "s1"}
    assert sizes.size_hint(size) == 3 + 5


def test_hints_of_equal_sizes_stay_apart() -> None:
    """Two graphs may use one name: results computed for one graph never give the other graph its hint."""
    for hint in (7, 100, 31):
        s = symbol("s0", hint)
        assert sizes.size_hint(s + 1) == hint + 1
        assert sizes.size_hint(s * 3) == hint * 3
        assert sizes.size_hint((s * 12) // 4) == hint * 3
        assert sizes.size_hint(sizes.ceil_div(s + 5, 16) * 2) == -(-(hint + 5) // 16) * 2
    assert symbol("s0", 7) == symbol("s0", 100)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(expressions())
def test_no_value_is_beyond_the_interval_and_the_magnitude(size: Dim) -> None:
    """At all values of the symbols, the size lies in its interval, and its absolute value is at most its magnitude."""
    low, high = sizes.interval(size)
    for values in VALUES:
        assert low <= evaluate(size, values) <= high
        assert abs(evaluate(size, values)) <= evaluate(sizes.magnitude(size), values)


def test_integers_may_be_negative() -> None:
    """Answers about a size follow from its symbols' ranges, which are no part of its identity."""
    any_, negative = symbol("n", 2, -(1 << 63), (1 << 63) - 1), symbol("n", 2, -8, -1)
    assert any_ == negative
    assert sizes.interval(any_ * 2 + 1) == (-(1 << 64) + 1, (1 << 64) - 1)
    assert sizes.interval(negative + 8) == (0, 7)
    assert sizes.interval(negative * symbol("m", 1, 2, 3)) == (-24, -2)
    assert not sizes.known_at_most(0, any_)
    assert sizes.known_less(negative, 0)
    assert bool(negative)
    assert sizes.lower_bound(function("mod", any_, 8)) == 0
    assert [s.is_wide for s in sizes.symbols([any_])] == [True]
    assert [s.is_wide for s in sizes.symbols([negative])] == [False]


def test_nested_quotients_are_one() -> None:
    """Sizes behind several strides are equal however they are written, and their bounds are those of their values."""
    half = (S - 1) // 2 + 1
    assert (half - 1) // 2 + 1 == (S - 1) // 4 + 1
    assert (half + 2) // 3 == (S + 5) // 6
    assert sizes.interval((symbol("n", low=5, high=20) - 1) // 4 + 1) == (2, 5)
