"""A function as a region that the TVM engine has compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.codegen.engine import KernelEngine, KernelRegion
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.partition.regions import partition_graph

# A function of an input and of constants behind it, and what makes them.
RegionCase = tuple[Callable[..., torch.Tensor], Callable[[], Sequence[torch.Tensor]]]


def compiled_region(
    engine: KernelEngine, case: RegionCase, changing: int = 1
) -> tuple[Region, KernelRegion, list[torch.Tensor]]:
    """The case's one region, all inputs but the first `changing` constant; what the engine made of it; and the inputs."""
    function, make = case
    torch.manual_seed(0)
    inputs = list(make())
    (segment,) = partition_graph(trace(function, *inputs), [engine], Config()).graph.segments
    region = dataclasses.replace(
        segment.region,
        inputs=tuple(dataclasses.replace(i, is_constant=n >= changing) for n, i in enumerate(segment.region.inputs)),
    )
    (compiled,) = engine.compile([region], Deadline(120.0))
    assert isinstance(compiled, KernelRegion), compiled
    return region, compiled, inputs
