"""Limits of inlining and fusion, as the engine that prints the kernels wants them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FusionPolicy:
    """How far operations are fused. None of it changes a result but by rounding.

    `copies_columns`: a matrix product's left operand is copied where it does not lie along k; else it is read in any order of memory.
    `max_inline_calls`, `max_inline_loads`: scalar operations and loads of a value that is computed where it is read; a longer one gets memory.
    `max_members`, `max_reads`: operations of a group, and buffers it reads from outside.
    `min_rows`, `small_elements`: what is computed around a reduction joins it, row by row, where its domain has so many rows, or no more
    elements than that.
    `channel_block`: a convolution reads some channels of what another one writes in place where they begin at a multiple of it; else they are
    copied.
    """

    copies_columns: bool = field(default=True, kw_only=True)
    max_inline_calls: int
    max_inline_loads: int
    max_members: int
    max_reads: int
    min_rows: int
    small_elements: int
    channel_block: int
