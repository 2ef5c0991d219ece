"""Regions are values: compared and printed without the graphs they hold; a graph knows whether its sizes are numbers."""

from __future__ import annotations

import dataclasses

import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.region import PartitionedGraph, Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.sizes.size import symbol


def _graph() -> PartitionedGraph:
    module = trace(lambda x: torch.sort(x @ x)[0] @ x, torch.ones(4, 4))
    return partition_graph(module, [FakeEngine(refuses=["sort"])], Config()).graph


def _with_region(graph: PartitionedGraph, region: Region) -> PartitionedGraph:
    first, *others = graph.segments
    return dataclasses.replace(graph, segments=(dataclasses.replace(first, region=region), *others))


def test_regions_of_two_compilations_are_equal() -> None:
    """Two traces of one program give equal regions though their graphs are other objects; another key makes another region."""
    first, second = _graph().segments[0].region, _graph().segments[0].region
    assert first.graph_module is not second.graph_module
    assert first == second
    assert hash(first) == hash(second)
    assert first != dataclasses.replace(first, key="0" * 64)


def test_a_printed_region_is_short() -> None:
    """Neither code nor objects: a region is part of messages and of logs."""
    text = repr(_graph().segments[0].region)
    assert "GraphModule" not in text
    assert "object at" not in text
    assert "\n" not in text


def test_a_graph_is_static_where_all_its_sizes_are_numbers() -> None:
    """A symbolic size decides: among a region's inputs, among its outputs, or as a value of the graph; what is no tensor does not."""
    graph, size = _graph(), symbol("s0")
    assert graph.is_static
    assert not dataclasses.replace(graph, sizes={"n": size}).is_static
    region = graph.segments[0].region
    dynamic = TensorSpec((size,), "float32", (1,), CPU)
    (given,) = region.inputs
    assert not _with_region(
        graph, dataclasses.replace(region, inputs=(dataclasses.replace(given, spec=dynamic),))
    ).is_static
    assert not _with_region(graph, dataclasses.replace(region, outputs=(dynamic,))).is_static
    assert _with_region(graph, dataclasses.replace(region, outputs=(None,))).is_static


def test_numbers_of_the_host_enter_a_region_of_another_device() -> None:
    """Numbers of the host are told by their positions; what is no tensor, and in a region of the host every input, is none of them."""
    region = _graph().segments[0].region
    (given,) = region.inputs
    gpu = Device("cuda", 1)
    specs = [
        TensorSpec((4,), "float32", (1,), gpu),
        TensorSpec((), "float32", (), CPU),
        None,
        TensorSpec((), "int64", (), CPU),
    ]
    mixed = dataclasses.replace(
        region, device=gpu, inputs=tuple(dataclasses.replace(given, spec=spec) for spec in specs)
    )
    assert mixed.numbers == (1, 3)
    assert dataclasses.replace(mixed, device=CPU).numbers == ()
