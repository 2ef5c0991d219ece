"""Limits of inlining and fusion for kernels of a processor."""

from __future__ import annotations

from torch_hybrid_backend.core.limits import MAX_CHANNELS_TOGETHER
from torch_hybrid_backend.loops.policy import Abilities, FusionPolicy

POLICY = FusionPolicy(
    max_inline_calls=160,  # longer expressions cost more to print and compile than a pass over memory
    max_inline_loads=12,
    max_members=16,
    max_reads=12,
    min_rows=8,  # fewer leave cores idle when a whole row belongs to one task
    small_elements=16_384,  # not worth a second kernel
    channel_block=MAX_CHANNELS_TOGETHER,
    skips_keys=True,
    updates_in_attention=True,
    abilities=Abilities(
        scatters="any", open_images=True, integer_products=True, flags=True, recurrent=True, segments=True
    ),
)
