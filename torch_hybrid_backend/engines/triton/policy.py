"""Limits of inlining and fusion for kernels of a GPU: what is read and computed twice costs less than a pass over memory."""

from __future__ import annotations

import dataclasses

import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.loops.policy import Abilities, FusionPolicy


def _saturates_float8() -> bool:
    """True if this torch makes 448 of what is too large for float8_e4m3fn, as kernels do. Earlier ones made NaN of it."""
    return torch.tensor(1e4, device=str(CPU)).to(torch.float8_e4m3fn).float().item() == 448


POLICY = FusionPolicy(
    copies_columns=False,
    max_inline_calls=240,
    max_inline_loads=16,
    max_members=32,
    max_reads=24,
    min_rows=1,
    small_elements=1 << 30,  # whatever is computed around a reduction joins it
    channel_block=1,
    abilities=Abilities(
        float8=_saturates_float8(),
        scans=True,
        scatters="any",
        max_gathered=1 << 62,
        max_taps=16,
        any_convolution=True,
        attention_gradients=True,
        joined_moments=True,
    ),
    gathers_in_attention=True,
)
# Where torch.use_deterministic_algorithms is on.
DETERMINISTIC = dataclasses.replace(POLICY, abilities=dataclasses.replace(POLICY.abilities, scatters="ordered"))
