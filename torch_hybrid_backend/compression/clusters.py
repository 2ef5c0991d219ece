"""The k-means of numbers: as few values as wanted that stand for many, with the least squared error.

In one dimension clusters are intervals of the sorted values, and prefix sums give the error of any interval at once: the best partition is
found by dynamic programming (Wang & Song, Ckmeans.1d.dp, R Journal 2011), and its columns by divide and conquer, as the best start of the
last interval only moves to the right (Wu, Optimal quantization by matrix searching, 1991). Where there are many values, it runs
over a few thousand groups of neighbours, and Lloyd's iteration over all values finishes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Groups of as many values each, which are cut again at so many of the widest gaps: where there are few values, as the large weights, groups are
# small, and none reaches over the hole that pruning leaves.
_GROUPS = 2048
_GAPS = 1024
_ROUNDS = 100  # of Lloyd's iteration, which ends after a few


def k_means(values: Floats, clusters: int) -> Floats:
    """At most `clusters` centres, ascending, for `values` (n,), finite and at least one; distinct values that are fewer are the centres."""
    ordered = np.sort(values)
    gaps = np.diff(ordered)
    distinct = np.flatnonzero(gaps)
    if len(distinct) < clusters:
        last: Floats = ordered[np.append(distinct, len(ordered) - 1)]  # of each run of equal ones
        return last
    sums = _Sums(ordered)
    borders = _groups(gaps)
    starts = borders[_partition(sums, borders, clusters)]
    centres = sums.means(starts)
    for _ in range(_ROUNDS):
        # A value belongs to the nearest centre; one in the middle to the upper.
        moved = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2)
        # Equal values on both sides of a border may leave an interval empty: its centre is no loss.
        moved = np.unique(np.concatenate(([0], moved)))
        moved = moved[moved < len(ordered)]
        if np.array_equal(moved, starts):
            break
        starts, centres = moved, sums.means(moved)
    return centres


def nearest(values: Floats, centres: Floats) -> Integers:
    """For each value the index of the nearest of the ascending `centres`."""
    return np.searchsorted((centres[1:] + centres[:-1]) / 2, values, side="right")


class _Sums:
    """Sums over intervals of sorted values, less their mean: so the squares lose nothing where values are far from zero."""

    def __init__(self, ordered: Floats) -> None:
        self._middle = float(ordered.mean())
        centred = ordered - self._middle
        self._count = len(ordered)
        self._first = np.concatenate(([0.0], np.cumsum(centred)))
        self._second = np.concatenate(([0.0], np.cumsum(centred * centred)))

    def means(self, starts: Integers) -> Floats:
        """Means of the intervals that begin at `starts` and end where the next begins, at last with the values."""
        ends = np.append(starts[1:], self._count)
        means: Floats = (self._first[ends] - self._first[starts]) / (ends - starts) + self._middle
        return means

    def errors(self, starts: Integers, ends: Integers) -> Floats:
        """Squared distances to the mean, summed, of intervals that are not empty."""
        sums = self._first[ends] - self._first[starts]
        errors: Floats = self._second[ends] - self._second[starts] - sums * sums / (ends - starts)
        return errors


def _groups(gaps: Floats) -> Integers:
    """Beginnings of groups of neighbours, and the end."""
    count = len(gaps) + 1
    if count <= _GROUPS + _GAPS:
        return np.arange(count + 1)
    even = np.linspace(0, count, _GROUPS + 1).astype(np.int64)
    return np.union1d(even, np.argpartition(gaps, -_GAPS)[-_GAPS:] + 1)


def _partition(sums: _Sums, borders: Integers, clusters: int) -> Integers:
    """The groups at which the intervals of the best partition begin; there are `clusters` of them, and more groups than that."""
    last = len(borders) - 1
    ends = np.arange(1, last + 1)
    errors = np.concatenate(([0.0], sums.errors(np.zeros_like(ends), borders[ends])))  # by the end: the best so far
    begins = []  # by the number of intervals, then by the end: where the last one begins
    for number in range(1, clusters):
        errors, begin = _one_more(sums, borders, errors, number)
        begins.append(begin)
    starts = [last]
    for begin in reversed(begins):
        starts.append(int(begin[starts[-1]]))
    return np.array([0, *reversed(starts[1:])])


def _one_more(sums: _Sums, borders: Integers, errors: Floats, number: int) -> tuple[Floats, Integers]:
    """With one interval more than the `number` of `errors`: the error by the end, and where the last interval begins then.

    Ends are taken level by level: first the middle one, then those between the ones taken, each of which has its best start between theirs.
    """
    last = len(borders) - 1
    best = np.full(last + 1, np.inf)
    begin = np.full(last + 2, last - 1)  # by the end, for now as the upper bound of what is not known
    begin[: number + 1] = number
    step = 1 << (last - number).bit_length()
    while step > 1:
        ends = np.arange(number + step // 2, last + 1, step)
        step //= 2
        if not len(ends):
            continue
        low = begin[ends - step]
        high = np.minimum(begin[np.minimum(ends + step, last + 1)], ends - 1)
        # All candidates of all ends, one after the other.
        lengths = high - low + 1
        offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        candidates = np.arange(lengths.sum()) - np.repeat(offsets - low, lengths)
        totals = errors[candidates] + sums.errors(borders[candidates], borders[np.repeat(ends, lengths)])
        best[ends] = np.minimum.reduceat(totals, offsets)
        found = np.flatnonzero(totals == np.repeat(best[ends], lengths))
        first = found[np.searchsorted(found, offsets)]
        begin[ends] = candidates[first]
    return best, begin[:-1]
