"""Limits of inlining and fusion for kernels of a GPU: what is read and computed twice costs less than a pass over memory."""

from __future__ import annotations

from torch_hybrid_backend.loops.policy import FusionPolicy

POLICY = FusionPolicy(
    copies_columns=False,
    max_inline_calls=240,
    max_inline_loads=16,
    max_members=32,
    max_reads=24,
    min_rows=1,
    small_elements=1 << 30,  # whatever is computed around a reduction joins it
    channel_block=1,
)
