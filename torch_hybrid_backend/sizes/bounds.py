"""The least and the most that a size can be where its symbols have ranges.

>>> s, t = symbol("s"), symbol("t")
>>> bounds(s - t, {"s": (8, 64), "t": (1, 4)})
(4, 63)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

from torch_hybrid_backend.sizes.size import Atom, Dim, Interval, Symbol


def bounds(size: Dim, ranges: Mapping[str, Interval]) -> Interval:
    """Numbers that the size is never below and never above. `ranges`: the least and the most value of each of its symbols, by name.

    They are met at least where the size has each symbol once. Where one is there several times (`n - n % 4`), its places are taken as if they
    could differ: the bounds then hold, and may be wider than they need be. Raises KeyError for a symbol without a range.
    """
    if isinstance(size, int):
        return size, size
    powers = list(dict.fromkeys(factor for monomial in size.terms for factor in monomial))
    intervals = [_power(_of_atom(atom, ranges), exponent) for atom, exponent in powers]
    # A sum of products is linear in each of its factors: over a box of these its extremes are at corners, wherever it rises or falls.
    return _hull(
        sum(c * math.prod(corner[powers.index(factor)] for factor in monomial) for monomial, c in size.terms.items())
        for corner in itertools.product(*intervals)
    )


def _of_atom(atom: Atom, ranges: Mapping[str, Interval]) -> Interval:
    if isinstance(atom, Symbol):
        return ranges[atom.name]
    left, right = bounds(atom.left, ranges), bounds(atom.right, ranges)
    if atom.name == "max":
        return max(left[0], right[0]), max(left[1], right[1])
    if atom.name == "min":
        return min(left[0], right[0]), min(left[1], right[1])
    # A division by 0 counts as 0 (`size.evaluate`). On either side of it quotients rise or fall in both operands.
    parts = [(max(right[0], 1), right[1]), (right[0], min(right[1], -1))]
    divisors = [(low, high) for low, high in parts if low <= high]
    of = _quotient if atom.name == "floordiv" else _rest
    ends = [end for divisor in divisors for end in of(left, divisor)]
    return _hull([*ends, 0] if right[0] <= 0 <= right[1] else ends)


def _quotient(left: Interval, divisor: Interval) -> Interval:
    return _hull(a // b for a in left for b in divisor)


def _rest(left: Interval, divisor: Interval) -> Interval:
    """Remainders of a division by numbers that are all positive or all negative."""
    if divisor[0] == divisor[1] and left[0] // divisor[0] == left[1] // divisor[0]:
        # It rises with the dividend until that reaches the next multiple.
        return left[0] % divisor[0], left[1] % divisor[0]
    if divisor[1] < 0:
        return divisor[0] + 1, 0
    if left[0] < 0:
        return 0, divisor[1] - 1
    return left if left[1] < divisor[0] else (0, min(left[1], divisor[1] - 1))


def _power(base: Interval, exponent: int) -> Interval:
    ends = [end**exponent for end in base]
    return _hull([*ends, 0] if base[0] <= 0 <= base[1] else ends)


def _hull(numbers: Iterable[int]) -> Interval:
    all_numbers = list(numbers)
    return min(all_numbers), max(all_numbers)
