"""Eager's outputs for a region's inputs: the reference of checks, or why there is none. Runs that draw the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.errors import OperatorRefusedError, failures, is_out_of_memory
from torch_hybrid_backend.generators import Replay
from torch_hybrid_backend.partition.fallback import run_refusal


def replay_of(region: Region) -> Replay:
    """Runs of the region that draw the same random numbers, beginning with the generator as it is now."""
    return Replay(region.device, draws=region.draws)


def run_eager(region: Region, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Eager's outputs. Raises what PyTorch raises."""
    with torch.no_grad():
        return region.eager(inputs)


def reference(region: Region, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | Refused:
    """Eager's outputs, or why it cannot compute them, where nothing is wrong with the inputs; raises what PyTorch raises for those."""
    try:
        with torch.no_grad():
            return region.eager.run(inputs)
    except failures(Exception) as error:  # raised again, but for what tells of the machine or of an operator
        return unable_to_run(error)


def unable_to_run(error: Exception) -> Refused:
    """The reason why eager cannot run a region although nothing is wrong with its inputs: it has too little memory, or lacks a kernel. Raises
    PyTorch's error where something is: their values, or dtypes that do not go together."""
    if isinstance(error, OperatorRefusedError) and error.is_mistake:
        raise error.error from None
    if isinstance(error, OperatorRefusedError) or is_out_of_memory(error):
        return run_refusal(error)
    raise error
