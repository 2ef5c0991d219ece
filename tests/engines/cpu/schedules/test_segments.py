"""Embedding bags as kernels beside eager in float64: empty bags, padding, weights, widths that are no whole vectors, NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW
from tests.partition.engines_for_tests import trace
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.engine import KernelEngine, KernelRegion
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.errors import RefusedValuesError
from torch_hybrid_backend.loops.kernels import SegmentKernel
from torch_hybrid_backend.partition.regions import partition_graph

aten = torch.ops.aten
_OFFSETS = torch.tensor([0, 3, 3, 20, 57, 100])


def _region(function: Any, *inputs: torch.Tensor, target: Target = HOST) -> tuple[KernelRegion, list[torch.Tensor]]:
    engine = KernelEngine(TvmBackend(target), Config(), services())
    graph = partition_graph(trace(function, *inputs), [engine], Config()).graph
    (segment,) = graph.segments
    (region,) = engine.compile([segment.region], Deadline(120.0))
    assert isinstance(region, KernelRegion), region
    assert any(isinstance(kernel, SegmentKernel) for kernel in region.kernels.kernels)
    return region, [inputs[graph.inputs.index(name)] for name in segment.inputs]


def _check(weight: torch.Tensor, *others: torch.Tensor, mode: int = 0, target: Target = HOST, **settings: Any) -> None:
    indices = torch.randint(0, weight.shape[0], (100,))

    def bags(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        given = others[0] if others else None
        return aten._embedding_bag_forward_only(
            weight,
            indices,
            offsets,
            False,
            mode,
            False,
            given,
            settings.get("last", False),
            settings.get("padding", -1),
        )[0]

    region, taken = _region(bags, weight, indices, _OFFSETS, *others, target=target)
    exact = bags(weight.double(), indices, _OFFSETS, *(other.double() for other in others))
    tolerance = 2e-2 if weight.dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(region(taken)[0].double(), exact, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("mode", [0, 1], ids=["sum", "mean"])
@pytest.mark.parametrize("width", [1, 20, 300])
def test_bags(mode: int, width: int) -> None:
    """Bags of nothing are 0; the last bag ends with the indices, or where the last offset says; a row may not count."""
    _check(torch.randn(40, width), mode=mode)
    _check(torch.randn(4, width), mode=mode, last=True, padding=2, target=NARROW)


def test_weights_and_dtypes() -> None:
    """Each row is multiplied by its sample's weight. Half types are added up in float32."""
    _check(torch.randn(40, 33), torch.randn(100))
    _check(torch.randn(40, 33).double(), torch.randn(100).double())
    _check(torch.randn(40, 33).bfloat16())


def test_nan() -> None:
    """Rows of NaN and infinities reach their own bags alone, and none where they do not count."""
    weight = torch.randn(40, 8)
    weight[3], weight[5, 1] = torch.nan, torch.inf
    _check(weight)
    _check(weight, mode=1, padding=3)


def test_values_that_eager_refuses() -> None:
    """Indices beyond the table, and offsets that do not begin with 0 or lie beyond the indices, end the call."""

    def bags(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return aten._embedding_bag_forward_only(weight, indices, offsets)[0]

    weight, indices = torch.randn(10, 4), torch.randint(0, 10, (7,))
    region, _ = _region(bags, weight, indices, torch.tensor([0, 3]))
    for changed, offsets in ((torch.full((7,), 10), [0, 3]), (indices, [1, 3]), (indices, [0, 9])):
        with pytest.raises(RefusedValuesError):
            region([weight, changed, torch.tensor(offsets)])
