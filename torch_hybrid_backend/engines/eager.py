"""The eager engine: PyTorch itself.

It accepts every operator. It is the fallback, the reference of the accuracy gate, and a candidate like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import EAGER, CompiledRegion, CompiledRegionBase, EngineBase
from torch_hybrid_backend.core.region import EagerRun, Region
from torch_hybrid_backend.core.verdict import Supported, Verdict


class EagerRegion(CompiledRegionBase):
    """A region run by PyTorch, operator by operator."""

    def __init__(self, eager: EagerRun) -> None:
        self._eager = eager

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on the region's inputs, in order; returns its outputs, in order. Records no gradient."""
        with torch.no_grad():
            return self._eager(inputs)


class EagerEngine(EngineBase):
    """Runs every region with PyTorch's own operators; nothing is compiled."""

    name: str = EAGER
    devices: frozenset[str] = frozenset()  # every one
    keeps_deadline: bool = True

    def version(self, device: Device) -> str:
        """PyTorch's: its kernels are."""
        return torch.__version__

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Supported()

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [EagerRegion(region.eager) for region in regions]
