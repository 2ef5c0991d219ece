"""Bounds of sizes: no value of a size lies outside, and some values meet them."""

from __future__ import annotations

import itertools

import pytest

from torch_hybrid_backend.sizes.bounds import bounds
from torch_hybrid_backend.sizes.size import Dim, evaluate, function, symbol

A, B = symbol("a"), symbol("b")
RANGES = {"a": (3, 17), "b": (2, 6)}

# Sizes that have each symbol once: their bounds are met.
MET: list[Dim] = [
    A,
    A * 3 + 1,
    100 - A,
    A - B,
    B - A,
    A * B,
    20 * A - A * B,
    A * A,
    (A - B) * 5 - 7,
    A // 4,
    (A - B) // 2,
    (B - A) // 3,
    A // B,
    (0 - A) // B,
    A % 32,
    A % 5,
    (A + 40) % 50,
    (0 - A) % 5,
    (A + 1) // 2 - B % 3,
    function("max", A, 10),
    function("min", A, B),
    function("max", A - B, 1),
]
# And others, whose bounds hold.
HELD: list[Dim] = [
    A - A % 4,
    A * A - A,
    A - A // 2 * 2,
    A % B,
    (A - B) % B,
    A // (B - 4),
    A % (B - 4),
    (A - 9) * (A - 9) * B,
    A // (A - 9),
    A % (0 - B),
    function("min", A - B, B) * 3 - A // 5 * B,
]


def _values(size: Dim) -> list[int]:
    spans = [range(least, most + 1) for least, most in RANGES.values()]
    return [evaluate(size, dict(zip(RANGES, point, strict=True))) for point in itertools.product(*spans)]


@pytest.mark.parametrize("size", MET, ids=str)
def test_bounds_are_met(size: Dim) -> None:
    """Exact bounds also for sizes that fall as a symbol grows, quotients of negative numbers, and remainders that never reach a multiple."""
    values = _values(size)
    assert bounds(size, RANGES) == (min(values), max(values))


@pytest.mark.parametrize("size", HELD, ids=str)
def test_bounds_hold(size: Dim) -> None:
    """Bounds hold if a symbol occurs more than once, or a divisor may be 0."""
    least, most = bounds(size, RANGES)
    values = _values(size)
    assert least <= min(values)
    assert most >= max(values)


def test_numbers_and_symbols_without_a_range() -> None:
    """The bounds of an int are the int itself. A symbol without a range is an error of the caller."""
    assert bounds(7, {}) == (7, 7)
    with pytest.raises(KeyError, match="c"):
        bounds(A + symbol("c"), RANGES)
