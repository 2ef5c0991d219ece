"""K-means in one dimension: the centres with the least sum of squared distances.

In one dimension, clusters are intervals of the sorted values, and prefix sums give the error of any interval. Dynamic programming finds the
best partition (Wang & Song, Ckmeans.1d.dp, R Journal 2011). Divide and conquer fills each column of its table, because the best start of the
last interval only moves to the right (Wu, Optimal quantization by matrix searching, 1991). Many values are first gathered in a few thousand
groups of neighbours; then Lloyd's algorithm refines the result over all values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Many values are divided into _GROUPS groups of equal size, and these again at the _GAPS widest gaps. So groups are small where values are
# sparse, as large weights are, and no group spans the gap around zero that pruning leaves.
_GROUPS = 2048
_GAPS = 1024
_ROUNDS = 100  # the most iterations of Lloyd's algorithm, which needs a few


def k_means(values: Floats, clusters: int) -> Floats:
    """Centres of `values` (n,), finite, n at least 1: at most `clusters`, ascending. If no more values are distinct, these are the centres."""
    ordered = np.sort(values)
    gaps = np.diff(ordered)
    distinct = np.flatnonzero(gaps)
    if len(distinct) < clusters:
        last: Floats = ordered[np.append(distinct, len(ordered) - 1)]  # the last of each run of equal values
        return last
    sums = _Sums(ordered)
    borders = _groups(gaps)
    starts = borders[_partition(sums, borders, clusters)]
    centres = sums.means(starts)
    for _ in range(_ROUNDS):
        # A value belongs to the nearest centre; halfway between two centres, to the upper.
        moved = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2)
        # Equal values on both sides of a border may leave an interval empty, which is dropped.
        moved = np.unique(np.concatenate(([0], moved)))
        moved = moved[moved < len(ordered)]
        if np.array_equal(moved, starts):
            break
        starts, centres = moved, sums.means(moved)
    return centres


def nearest(values: Floats, centres: Floats) -> Integers:
    """The index of the nearest centre for each value. `centres` are ascending."""
    return np.searchsorted((centres[1:] + centres[:-1]) / 2, values, side="right")


class _Sums:
    """Sums over intervals of sorted values. The mean is subtracted first, so that squares stay accurate if values are far from zero."""

    def __init__(self, ordered: Floats) -> None:
        self._middle = float(ordered.mean())
        centred = ordered - self._middle
        self._count = len(ordered)
        self._first = np.concatenate(([0.0], np.cumsum(centred)))
        self._second = np.concatenate(([0.0], np.cumsum(centred * centred)))

    def means(self, starts: Integers) -> Floats:
        """Means of the intervals that begin at `starts`. Each ends at the start of the next, the last at the end of the values."""
        ends = np.append(starts[1:], self._count)
        means: Floats = (self._first[ends] - self._first[starts]) / (ends - starts) + self._middle
        return means

    def errors(self, starts: Integers, ends: Integers) -> Floats:
        """Sums of squared distances to the mean, of intervals that are not empty."""
        sums = self._first[ends] - self._first[starts]
        errors: Floats = self._second[ends] - self._second[starts] - sums * sums / (ends - starts)
        return errors


def _groups(gaps: Floats) -> Integers:
    """Starts of the groups of neighbouring values, and the end of the last group."""
    count = len(gaps) + 1
    if count <= _GROUPS + _GAPS:
        return np.arange(count + 1)
    even = np.linspace(0, count, _GROUPS + 1).astype(np.int64)
    return np.union1d(even, np.argpartition(gaps, -_GAPS)[-_GAPS:] + 1)


def _partition(sums: _Sums, borders: Integers, clusters: int) -> Integers:
    """The first group of each interval of the best partition into `clusters` intervals. There are more groups than clusters."""
    last = len(borders) - 1
    ends = np.arange(1, last + 1)
    errors = np.concatenate(([0.0], sums.errors(np.zeros_like(ends), borders[ends])))  # by end: the least error so far
    begins = []  # by number of intervals, then by end: the start of the last interval
    for number in range(1, clusters):
        errors, begin = _one_more(sums, borders, errors, number)
        begins.append(begin)
    starts = [last]
    for begin in reversed(begins):
        starts.append(int(begin[starts[-1]]))
    return np.array([0, *reversed(starts[1:])])


def _one_more(sums: _Sums, borders: Integers, errors: Floats, number: int) -> tuple[Floats, Integers]:
    """Add an interval to the `number` intervals of `errors`. Returns the least error and the start of the last interval, both by end.

    Ends are computed level by level: first the middle, then the middles between computed ends. The best start of an end lies between the best
    starts of its computed neighbours.
    """
    last = len(borders) - 1
    best = np.full(last + 1, np.inf)
    begin = np.full(last + 2, last - 1)  # by end; at first an upper bound
    begin[: number + 1] = number
    step = 1 << (last - number).bit_length()
    while step > 1:
        ends = np.arange(number + step // 2, last + 1, step)
        step //= 2
        if not len(ends):
            continue
        low = begin[ends - step]
        high = np.minimum(begin[np.minimum(ends + step, last + 1)], ends - 1)
        # The candidates of all ends, concatenated.
        lengths = high - low + 1
        offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        candidates = np.arange(lengths.sum()) - np.repeat(offsets - low, lengths)
        totals = errors[candidates] + sums.errors(borders[candidates], borders[np.repeat(ends, lengths)])
        best[ends] = np.minimum.reduceat(totals, offsets)
        found = np.flatnonzero(totals == np.repeat(best[ends], lengths))
        first = found[np.searchsorted(found, offsets)]
        begin[ends] = candidates[first]
    return best, begin[:-1]
