"""The cost of boundaries between regions, by estimate."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.region import PartitionedGraph
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.partition.boundary import callbacks_us, conversions_us
from torch_hybrid_backend.partition.estimate import CALLBACK_US
from torch_hybrid_backend.partition.regions import partition_graph


class _ReadsHalf(FakeEngine):
    """Its kernels read float16."""

    def reads(self, spec: TensorSpec) -> TensorSpec:
        return dataclasses.replace(spec, dtype="float16")


@pytest.fixture
def graph() -> PartitionedGraph:
    """A region, eager's sort, a region."""
    module = trace(lambda x: torch.sort((x @ x).sin()).values @ x, torch.randn(64, 64))
    found = partition_graph(module, [FakeEngine(refuses=["sort"])], Config()).graph
    assert [segment.engine_hint for segment in found.segments] == ["fake", "eager", "fake"]
    return found


def test_eager_between_regions_is_a_call_of_python(graph: PartitionedGraph) -> None:
    """A segment of eager's is one call of Python; none where eager runs it all."""
    names = [segment.region.name for segment in graph.segments]
    assert callbacks_us(graph, dict(zip(names, ["fake", "eager", "fake"], strict=True))) == CALLBACK_US
    assert callbacks_us(graph, dict(zip(names, ["eager", "eager", "fake"], strict=True))) == 2 * CALLBACK_US
    assert callbacks_us(graph, dict.fromkeys(names, "eager")) == 0.0


def test_a_region_without_a_program_is_a_call_of_python_too(graph: PartitionedGraph) -> None:
    """Also where there is no other; one that eager runs in its place is counted once."""
    first, middle, last = [segment.region.name for segment in graph.segments]
    runs = {first: "fake", middle: EAGER, last: "fake"}
    assert callbacks_us(graph, runs, {last}) == 2 * CALLBACK_US
    assert callbacks_us(graph, runs, {middle, last}) == 2 * CALLBACK_US
    assert callbacks_us(graph, dict.fromkeys(runs, "fake"), set(runs)) == 3 * CALLBACK_US


def test_a_value_in_another_form_is_copied(graph: PartitionedGraph) -> None:
    """Each input of a region that its engine reads in another dtype costs a copy, the more the larger it is; one that it reads as it is costs
    none."""
    runs = {segment.region.name: segment.engine_hint for segment in graph.segments}
    assert conversions_us(graph, runs, {"fake": FakeEngine()}) == 0.0
    half = conversions_us(graph, runs, {"fake": _ReadsHalf()})
    assert half
    large = trace(lambda x: torch.sort((x @ x).sin()).values @ x, torch.randn(512, 512))
    larger = conversions_us(
        partition_graph(large, [FakeEngine(refuses=["sort"])], Config()).graph, runs, {"fake": _ReadsHalf()}
    )
    assert larger
    assert larger > 10 * half


def test_without_a_roofline_nothing_is_estimated(graph: PartitionedGraph) -> None:
    """A copy on a device that nothing is known of has no cost that could be compared."""
    moved = dataclasses.replace(
        graph,
        segments=tuple(
            dataclasses.replace(s, region=dataclasses.replace(s.region, device=Device("cuda"))) for s in graph.segments
        ),
    )
    runs = {segment.region.name: segment.engine_hint for segment in graph.segments}
    assert conversions_us(moved, runs, {"fake": _ReadsHalf()}) is None
    assert conversions_us(moved, runs, {"fake": FakeEngine()}) == 0.0
