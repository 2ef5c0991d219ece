"""Conversions of sizes: from sympy, to text and back, with other names, and solved for their symbol."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from tests.sizes.expressions import VALUES, S, T, expressions
from torch_hybrid_backend.sizes import forms
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, evaluate, function, size_hint, symbol

_s0, _s1 = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("s0", "s1"))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(expressions())
def test_texts_come_back(a: Dim) -> None:
    """Parsing a size's text gives an equal size."""
    assert forms.parse(str(a)) == a


def test_symbols_that_only_a_text_names_come_back() -> None:
    """Two such symbols in one size stay two."""
    a = symbol("[u0 + 1]") * symbol("[u1]") + S
    assert forms.parse(str(a)) == a


@pytest.mark.parametrize("text", ["s0 +", "print(s0)", "s0 ** 2", "1.5", "", "s0.real", "max(s0)", "s0 if s1 else 1"])
def test_other_texts_are_refused(text: str) -> None:
    """Other texts raise ValueError, and nothing in them is executed."""
    with pytest.raises(ValueError, match="is no size"):
        forms.parse(text)


@st.composite
def _expressions(draw: st.DrawFn, depth: int = 3) -> sympy.Expr:
    """Sympy expressions as torch's symbolic shapes hold them."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from([_s0, _s1, *map(sympy.Integer, (0, 1, 3, 16, -2))]))
    left, right = draw(_expressions(depth=depth - 1)), draw(_expressions(depth=depth - 1))
    divisor = draw(st.sampled_from([sympy.Integer(3), _s1 + 1]))
    make = draw(
        st.sampled_from(
            [
                lambda: left + right,
                lambda: left * right,
                lambda: left - right,
                lambda: left**2,
                lambda: Max(left, right),
                lambda: Min(left, right, 5),
                lambda: FloorDiv(left, divisor),
                lambda: PythonMod(left, divisor),
                lambda: Mod(_s0, divisor),
                lambda: CleanDiv(_s0 * divisor, divisor),
                lambda: CeilDiv(_s0, divisor),
            ]
        )
    )
    return make()


def _value(expression: sympy.Expr, s0: int, s1: int) -> object:
    """The value of an expression as torch computes it."""
    return sympy_interp(PythonReferenceAnalysis, {_s0: s0, _s1: s1}, expression)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(_expressions())
def test_sizes_of_sympy_have_its_values(expression: sympy.Expr) -> None:
    """An expression of torch's becomes a size of the same value, whatever the symbols are. A number becomes an int."""
    size = forms.from_sympy(expression, {_s0: symbol("s0", 7), _s1: symbol("s1", 5)}.__getitem__)
    assert size is not None
    assert isinstance(size, int) or expression.free_symbols
    for values in VALUES:
        assert evaluate(size, values) == _value(expression, values["s0"], values["s1"])
    assert size_hint(size) == _value(expression, 7, 5)


@pytest.mark.parametrize(
    "expression", [_s0 / 2, sympy.sqrt(_s0), 2**_s0, 1 / _s0, sympy.log(_s0 + 1), sympy.Float(1.5)], ids=str
)
def test_other_expressions_have_no_size(expression: sympy.Expr) -> None:
    """Other expressions than sums, products and divisions of integers give None, alone and within others."""
    for whole in (expression, expression + _s1, FloorDiv(_s1 * expression, 3)):
        assert forms.from_sympy(whole, {_s0: symbol("s0", 7), _s1: symbol("s1", 5)}.__getitem__) is None


def test_renamed_sizes_are_equal_where_they_compute_the_same() -> None:
    """Two graphs with different names of symbols give one text. Different sizes give different texts."""
    names = {"s0": "n0", "s1": "n1", "s7": "n0", "s5": "n1"}

    def text(size: Dim) -> str:
        return forms.render(size, lambda s: names[s.name])

    other_s, other_t = symbol("s7"), symbol("s5")
    assert text(ceil_div(T * S, 16) + T) == text(ceil_div(other_s * other_t, 16) + other_t)
    sizes: list[Dim] = [
        S,
        T,
        S + T,
        S * T,
        S * S,
        S * 2,
        S + 2,
        S // 2,
        S % 2,
        function("max", S, T),
        function("min", S, T),
        3,
    ]
    assert len({text(size) for size in sizes}) == len(sizes)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(-9, 9), st.integers(-9, 9))
def test_multiples_with_an_offset_are_solved(factor: int, offset: int) -> None:
    """`factor * s0 + offset` gives its symbol, factor and offset; an int gives None."""
    size = S * factor + offset
    assert forms.linear(size) == (("s0", factor, offset) if factor else None)


@pytest.mark.parametrize("size", [S * T, S * S + 1, S + T, S // 2, function("max", S, 3), 7, None])
def test_other_sizes_are_not_solved(size: Size | int | None) -> None:
    """Sizes of several symbols, powers and quotients give None."""
    assert forms.linear(size) is None
