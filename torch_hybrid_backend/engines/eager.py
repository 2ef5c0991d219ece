"""The eager engine: PyTorch itself.

It accepts every operator. It is the fallback, the reference of the accuracy gate, and a candidate like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Supported, Verdict


class EagerRegion:
    """A region run by PyTorch, operator by operator, through the code that fx generated for its graph."""

    program: Program | None = None

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self._graph_module = graph_module

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on the region's inputs, in order; returns its outputs, in order. Records no gradient."""
        with torch.no_grad():
            return list(self._graph_module(*inputs))


class EagerEngine:
    """Runs every region with PyTorch's own operators; nothing is compiled."""

    name: str = "eager"
    keeps_deadline = True
    keep_ops: frozenset[torch._ops.OpOverload] = frozenset()

    def available(self) -> Verdict:
        return Supported()

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Supported()

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [EagerRegion(region.graph_module) for region in regions]
