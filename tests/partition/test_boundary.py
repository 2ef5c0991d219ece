"""What boundaries between regions cost, by estimate."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import PartitionedGraph
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.partition.boundary import CALLBACK_US, boundaries_us
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
    """One for each segment of eager's; none where eager runs it all, and nothing where every region reads values as they are."""
    names = [segment.region.name for segment in graph.segments]
    engine = {"fake": FakeEngine()}
    assert boundaries_us(graph, dict(zip(names, ["fake", "eager", "fake"], strict=True)), engine) == CALLBACK_US
    assert boundaries_us(graph, dict(zip(names, ["eager", "eager", "fake"], strict=True)), engine) == 2 * CALLBACK_US
    assert boundaries_us(graph, dict.fromkeys(names, "eager"), engine) == 0.0


def test_a_value_in_another_form_is_copied(graph: PartitionedGraph) -> None:
    """Each input of a region that its engine reads in another dtype costs a copy, and more the larger it is."""
    runs = {segment.region.name: segment.engine_hint for segment in graph.segments}
    half = boundaries_us(graph, runs, {"fake": _ReadsHalf()})
    assert half > CALLBACK_US
    large = trace(lambda x: torch.sort((x @ x).sin()).values @ x, torch.randn(512, 512))
    larger = partition_graph(large, [FakeEngine(refuses=["sort"])], Config()).graph
    assert boundaries_us(larger, runs, {"fake": _ReadsHalf()}) - CALLBACK_US > 10 * (half - CALLBACK_US)
