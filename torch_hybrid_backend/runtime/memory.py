"""Arena planning: offsets for buffers in one block of memory, such that buffers alive together never overlap.

Enters: sizes and live ranges. Leaves: offsets and the size of the block, which csrc/include/arena.h plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.limits import MEMORY_ALIGNMENT
from torch_hybrid_backend.runtime.native.ops import arena_offsets

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
    """`offsets[i]` is where buffer i starts; all offsets and `size_bytes` are multiples of the alignment."""

    offsets: tuple[int, ...]
    size_bytes: int


def alignment_on(device: Device) -> int:
    """Alignment of offsets in an arena of the device, in bytes."""
    return ALIGNMENT if device.is_host else MEMORY_ALIGNMENT


def plan_arena(ranges: Sequence[LiveRange], alignment: int = ALIGNMENT) -> ArenaLayout:
    """Places every buffer, empty ones at offset 0. Raises HybridError where the runtime cannot be loaded."""
    numbers = [number for live in ranges for number in (live.size_bytes, live.first, live.last)]
    *offsets, size_bytes = arena_offsets(numbers, alignment)
    return ArenaLayout(tuple(offsets), size_bytes)
