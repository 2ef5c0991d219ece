"""Engines and graphs that the partition's tests are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase, EngineBase
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.loops import lowering


class FakeRegion(CompiledRegionBase):
    """Runs the region's graph, then lets the test change the outputs."""

    def __init__(self, region: Region, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        self.region = region
        self.change = change
        self.calls = 0

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        return self.change([output.clone() for output in self.region.graph_module(*inputs)])


class FakeEngine(EngineBase):
    """Takes the operators whose name contains one of `takes` ("" takes all), on `devices` (none: all); counts how often it was asked."""

    def __init__(
        self, name: str = "fake", takes: Sequence[str] = ("",), refuses: Sequence[str] = (), devices: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.devices = frozenset(devices)
        self.takes = takes
        self.refuses = refuses
        self.asked: list[str] = []

    def supports(self, node: torch.fx.Node) -> Verdict:
        self.asked.append(node.name)
        target = str(node.target)
        if any(part in target for part in self.takes) and not any(part in target for part in self.refuses):
            return Supported()
        return Refused(Reason.UNKNOWN_OPERATOR, f"{target} has no lowering")

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [FakeRegion(region, lambda outputs: outputs) for region in regions]


class LoopsEngine(FakeEngine):
    """Takes what the loops language has a lowering for, on `devices`."""

    keep_ops = frozenset(lowering.table())

    def __init__(self, name: str = "loops", devices: Sequence[str] = ()) -> None:
        super().__init__(name, devices=devices)

    def supports(self, node: torch.fx.Node) -> Verdict:
        self.asked.append(node.name)
        return lowering.supports(node)


def trace(function: Callable[..., object], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """The function as a graph of ATen operators with `meta["val"]`; in-place operators are kept."""
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
