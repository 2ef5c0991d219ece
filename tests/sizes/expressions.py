"""Sizes of two symbols, and values for these."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from torch_hybrid_backend.sizes.size import Dim, function, symbol

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
