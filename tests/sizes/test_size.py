"""Sizes: arithmetic agrees with numbers at every value of the symbols; comparisons never claim what some value refutes."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_hybrid_backend.sizes import forms
from torch_hybrid_backend.sizes import size as sizes
from torch_hybrid_backend.sizes.size import Dim, Size, Undecided, evaluate, function, symbol

S, T = symbol("s0", 7), symbol("s1", 5)
VALUES = [{"s0": a, "s1": b} for a, b in itertools.product((0, 1, 2, 3, 7, 16, 33), (0, 1, 5, 8))]


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> Dim:
    """Sizes made of two symbols and small numbers by every operation."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from([S, T, 1, 2, 3, 16]))
    left = draw(expressions(depth=depth - 1))
    operation = draw(st.sampled_from(["+", "-", "*", "//", "%", "max", "min"]))
    if operation in ("//", "%"):
        right: Dim = draw(st.sampled_from([1, 2, 3, 16, T + 1]))
        return left // right if operation == "//" else left % right
    right = draw(expressions(depth=depth - 1))
    if operation in ("max", "min"):
        return function(operation, left, right)
    return left + right if operation == "+" else left - right if operation == "-" else left * right


@settings(max_examples=150, derandomize=True, deadline=None)
@given(expressions(), expressions())
def test_arithmetic_agrees_with_numbers(a: Dim, b: Dim) -> None:
    """Sums, products, quotients and remainders of sizes have the values that numbers would."""
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
    """What is said to be below, at most, equal or at least a bound is so at all values."""
    for values in VALUES:
        x, y = evaluate(a, values), evaluate(b, values)
        assert x >= sizes.low(a)
        assert x < y or not sizes.below(a, b)
        assert x <= y or not sizes.at_most(a, b)
        assert x == y or a != b


@settings(max_examples=100, derandomize=True, deadline=None)
@given(expressions())
def test_texts_and_pickles_come_back(a: Dim) -> None:
    """A size is read back from its text and its pickle as the equal size."""
    assert forms.parse(str(a)) == a
    assert pickle.loads(pickle.dumps(a)) == a  # within one process's test: nothing is unpickled from disk


def test_symbols_that_only_a_text_names_come_back() -> None:
    """Two of them in one size stay two."""
    a = symbol("[u0 + 1]") * symbol("[u1]") + S
    assert forms.parse(str(a)) == a


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
    """Quotients that are sizes themselves come out as such; what is a number is an int."""
    assert found == expected
    assert isinstance(found, int) == isinstance(expected, int)


@pytest.mark.parametrize("question", [lambda: S < T, lambda: bool(S), lambda: int(S), lambda: S > 1, lambda: range(S)])
def test_what_depends_on_the_value_is_undecided(question: object) -> None:
    """Questions whose answer depends on the symbols raise Undecided, also where Python asks for a number."""
    assert callable(question)
    with pytest.raises(Undecided):
        question()


def test_symbols_and_typical_values() -> None:
    """Symbols are found once each, in order; the typical value is that of the hints; other names give other texts."""
    size = sizes.ceil_div(T * S, 16) + T
    assert isinstance(size, Size)
    assert {s.name for s in sizes.symbols([size, S])} == {"s0", "s1"}
    assert sizes.typical(size) == 3 + 5
    renamed = forms.render(size, lambda s: s.name.upper())
    assert "S0" in renamed
    assert forms.render(sizes.ceil_div(S * T, 16) + T, lambda s: s.name.upper()) == renamed


def test_hints_of_equal_sizes_stay_apart() -> None:
    """Two graphs may call a symbol alike: what was computed for one never gives the other its typical value."""
    for hint in (7, 100, 31):
        s = symbol("s0", hint)
        assert sizes.typical(s + 1) == hint + 1
        assert sizes.typical(s * 3) == hint * 3
        assert sizes.typical((s * 12) // 4) == hint * 3
        assert sizes.typical(sizes.ceil_div(s + 5, 16) * 2) == -(-(hint + 5) // 16) * 2
    assert symbol("s0", 7) == symbol("s0", 100)


@pytest.mark.parametrize("text", ["s0 +", "print(s0)", "s0 ** 2", "1.5"])
def test_other_texts_are_refused(text: str) -> None:
    """What is no size is a ValueError, and nothing of it is run."""
    with pytest.raises(ValueError, match="is no size"):
        forms.parse(text)
