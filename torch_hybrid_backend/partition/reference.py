"""Eager's outputs for a region's inputs, which checks compare with, or a refusal. Runs that draw the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.errors import OperatorRefusedError, failures, is_out_of_memory
from torch_hybrid_backend.generators import Replay
from torch_hybrid_backend.partition.fallback import run_refusal


def replay_of(region: Region) -> Replay:
    """Replay that lets runs of the region draw the same random numbers, from the generator's current state."""
    return Replay(region.device, draws=region.draws)


def run_eager(region: Region, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Eager's outputs. Raises what PyTorch raises."""
    with torch.no_grad():
        return region.eager(inputs)


def reference(region: Region, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | Refused:
    """Eager's outputs, or a refusal if eager cannot compute them although the inputs are right. Raises PyTorch's error for wrong inputs."""
    try:
        with torch.no_grad():
            return region.eager.run(inputs)
    except failures(Exception) as error:  # raised again, unless memory is short or an operator has no kernel
        return unable_to_run(error)


def unable_to_run(error: Exception) -> Refused:
    """The reason why eager cannot run a region although its inputs are right: memory is short, or an operator has no kernel.

    Raises PyTorch's error if the inputs are wrong: their values, or dtypes that do not go together."""
    if isinstance(error, OperatorRefusedError) and error.is_mistake:
        raise error.error from None
    if isinstance(error, OperatorRefusedError) or is_out_of_memory(error):
        return run_refusal(error)
    raise error
