"""Arena planning: offsets for buffers in one block of memory, such that buffers alive together never overlap.

Enters: sizes and live ranges. Leaves: offsets and the size of the block. The largest buffers are placed first, each in
the smallest gap that fits between those placed already and alive with it ("greedy by size", Pisarchyk & Lee,
"Efficient Memory Management for Deep Neural Net Inference", 2020; best fit within).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

# A cache line, and the widest vector register: csrc/include/aligned_block.h aligns the arena itself to it.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class LiveRange:
    """A buffer of `size_bytes`, alive from step `first` to step `last`, both included."""

    size_bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """`offsets[i]` is where buffer i starts; all offsets and `size_bytes` are multiples of ALIGNMENT."""

    offsets: tuple[int, ...]
    size_bytes: int


def plan_arena(ranges: Sequence[LiveRange]) -> ArenaLayout:
    """Places every buffer. Empty buffers are placed too, at an offset of their own choosing (0)."""
    offsets = [0] * len(ranges)
    total = 0
    placed: list[tuple[int, int, LiveRange]] = []  # (start, end, range), sorted by start
    largest_first = sorted(range(len(ranges)), key=lambda i: (-ranges[i].size_bytes, ranges[i].first, i))
    for i in largest_first:
        size = -(-ranges[i].size_bytes // ALIGNMENT) * ALIGNMENT
        if size == 0:
            continue
        neighbours = [(start, end) for start, end, other in placed if _overlap(other, ranges[i])]
        offsets[i] = _smallest_gap(neighbours, size)
        bisect.insort(placed, (offsets[i], offsets[i] + size, ranges[i]), key=lambda entry: entry[0])
        total = max(total, offsets[i] + size)
    return ArenaLayout(tuple(offsets), total)


def _overlap(a: LiveRange, b: LiveRange) -> bool:
    return a.first <= b.last and b.first <= a.last


def _smallest_gap(neighbours: Sequence[tuple[int, int]], size: int) -> int:
    """Start of the smallest gap of at least `size` between `neighbours` (sorted by start), or the end of them all."""
    best: tuple[int, int] | None = None  # (width, start)
    free_from = 0
    for start, end in neighbours:
        width = start - free_from
        if width >= size and (best is None or width < best[0]):
            best = (width, free_from)
        free_from = max(free_from, end)
    return best[1] if best else free_from
