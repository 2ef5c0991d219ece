"""Arena planning: offsets for buffers in one block of memory, such that buffers alive together never overlap.

Enters: sizes and live ranges. Leaves: offsets and the size of the block. The largest buffers are placed first, each in
the smallest gap that fits between those placed already and alive with it ("greedy by size", Pisarchyk & Lee,
"Efficient Memory Management for Deep Neural Net Inference", 2020; best fit within). Where that takes more than is alive
at any one time, which no placement can go below, other orders are tried and the best kept: by first use, and then again
and again with what ended highest placed before all others (a hill climb over orders, as in Arm's Vela compiler).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.limits import MEMORY_ALIGNMENT

# A cache line, and the widest vector register: csrc/include/aligned_block.h aligns the arena itself to it.
ALIGNMENT = 64

# Orders tried where the first misses the bound, and pairs of buffers looked at for it: some 0.1 s.
_MAX_ORDERS, _MAX_PAIRS = 64, 500_000


@dataclass(frozen=True, slots=True)
class LiveRange:
    """A buffer of `size_bytes`, alive from step `first` to step `last`, both included."""

    size_bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """`offsets[i]` is where buffer i starts; all offsets and `size_bytes` are multiples of the alignment."""

    offsets: tuple[int, ...]
    size_bytes: int


def alignment_on(device: Device) -> int:
    """Alignment of offsets in an arena of the device, in bytes."""
    return ALIGNMENT if device.is_host else MEMORY_ALIGNMENT


def plan_arena(ranges: Sequence[LiveRange], alignment: int = ALIGNMENT) -> ArenaLayout:
    """Places every buffer. Empty buffers are placed too, at an offset of their own choosing (0)."""
    sizes = [-(-live.size_bytes // alignment) * alignment for live in ranges]
    buffers = [i for i in range(len(ranges)) if sizes[i]]
    together = _alive_together(ranges, buffers)
    least = _most_alive(ranges, sizes)
    most_orders = max(2, min(_MAX_ORDERS, _MAX_PAIRS // (1 + sum(map(len, together.values())))))

    def place(order: Sequence[int]) -> ArenaLayout:
        offsets: dict[int, int] = {}
        for i in order:
            neighbours = sorted((offsets[j], offsets[j] + sizes[j]) for j in together[i] if j in offsets)
            offsets[i] = _smallest_gap(neighbours, sizes[i])
        total = max((offset + sizes[i] for i, offset in offsets.items()), default=0)
        return ArenaLayout(tuple(offsets.get(i, 0) for i in range(len(ranges))), total)

    largest_first = sorted(buffers, key=lambda i: (-sizes[i], ranges[i].first, i))
    earliest_first = sorted(buffers, key=lambda i: (ranges[i].first, -sizes[i], i))
    best = place(largest_first)
    for start in (largest_first, earliest_first):
        order = start
        for _ in range(most_orders // 2):
            if best.size_bytes == least:
                return best
            layout = place(order)
            best = min(best, layout, key=lambda each: each.size_bytes)
            highest = max(order, key=lambda i: layout.offsets[i] + sizes[i])
            order = [highest, *(i for i in order if i != highest)]
    return best


def _alive_together(ranges: Sequence[LiveRange], buffers: Sequence[int]) -> dict[int, list[int]]:
    """For each of `buffers` the others of them that are alive at a step at which it is."""
    together: dict[int, list[int]] = {i: [] for i in buffers}
    alive: list[int] = []
    for i in sorted(buffers, key=lambda i: ranges[i].first):
        alive = [j for j in alive if ranges[j].last >= ranges[i].first]
        for j in alive:
            together[i].append(j)
            together[j].append(i)
        alive.append(i)
    return together


def _most_alive(ranges: Sequence[LiveRange], sizes: Sequence[int]) -> int:
    """The bytes alive at the step with the most: no placement takes less."""
    changes: dict[int, int] = defaultdict(int)
    for live, size in zip(ranges, sizes, strict=True):
        changes[live.first] += size
        changes[live.last + 1] -= size
    return max(itertools.accumulate(changes[step] for step in sorted(changes)), default=0)


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
