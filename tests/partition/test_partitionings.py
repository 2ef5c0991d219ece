"""Partitionings: one for each engine that comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from unittest import mock

import torch
from torch.fx import Node

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.capture.decompositions import decomposed
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import Engine
from torch_hybrid_backend.partition import partitionings as module
from torch_hybrid_backend.partition.partitionings import Partitioning, partitionings
from torch_hybrid_backend.passes.decompose import decompose

aten = torch.ops.aten


def _partitionings(
    graph_module: torch.fx.GraphModule, engines: Sequence[Engine], **arguments: bool
) -> tuple[Partitioning, ...]:
    def parts(node: Node, engine: Engine) -> torch.fx.GraphModule | None:
        return decomposed(node, engine.keep_ops)

    return partitionings(graph_module, engines, Config(), parts, decompose, **arguments)


def _regions(partitioning: Partitioning) -> list[tuple[str, list[str]]]:
    """Engine and operators, segment by segment."""
    operators: Mapping[str, str] = {
        node.name: node.operator.removeprefix("aten.").split(".")[0] for node in partitioning.partition.nodes
    }
    return [
        (segment.engine_hint, [operators[name] for name in segment.region.node_names])
        for segment in partitioning.partition.graph.segments
    ]


def _function(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin().exp() @ x


def test_each_engine_comes_first_once() -> None:
    """Operators that both engines support go to the one that is asked first; so there is a partition in which each has its best regions."""
    first, second = FakeEngine("first", refuses=["exp"]), FakeEngine("second", takes=["sin", "exp"])
    partitionings = _partitionings(trace(_function, torch.randn(64, 64)), [first, second])
    found = {each.order: _regions(each) for each in partitionings}
    assert found == {
        ("first", "second"): [("first", ["mm", "sin"]), ("second", ["exp"]), ("first", ["mm"])],
        ("second", "first"): [("first", ["mm"]), ("second", ["sin", "exp"]), ("first", ["mm"])],
    }


def test_engines_are_asked_once_for_all_partitionings() -> None:
    """However many orders there are: an engine's answer may be costly."""
    engines = [FakeEngine(name, refuses=[refused]) for name, refused in (("a", "sin"), ("b", "exp"), ("c", "mm"))]
    graph_module = trace(_function, torch.randn(8, 8))
    assert len(_partitionings(graph_module, engines)) == 3
    operators = len(graph_module.graph.find_nodes(op="call_function", target=aten.mm.default)) + 2
    assert [len(engine.asked) for engine in engines] == [operators] * 3


def test_partitions_that_are_equal_count_once() -> None:
    """Two engines that support the same compete for the same regions, whoever is asked first. So it is with one engine, and with none."""
    graph_module = trace(_function, torch.randn(8, 8))
    assert [
        partitioning.order for partitioning in _partitionings(graph_module, [FakeEngine("a"), FakeEngine("b")])
    ] == [("a", "b")]
    assert [partitioning.order for partitioning in _partitionings(graph_module, [FakeEngine("a")])] == [("a",)]
    assert [partitioning.order for partitioning in _partitionings(graph_module, [])] == [()]


def test_one_order_can_be_asked_for() -> None:
    """A bisector switches single operators of single engines off: it needs one partition."""
    engines = [FakeEngine("first", refuses=["exp"]), FakeEngine("second", takes=["sin", "exp"])]
    (only,) = _partitionings(trace(_function, torch.randn(8, 8)), engines, own_order=True)
    assert only.order == ("first", "second")


def test_an_estimate_rules_out_what_is_hopeless() -> None:
    """The cheapest by estimate comes first; one that is many times as dear is not even compiled."""
    engines = [FakeEngine("first", refuses=["exp"]), FakeEngine("second", takes=["sin", "exp"])]
    graph_module = trace(_function, torch.randn(64, 64))
    for estimates, orders in (
        ((5.0, 4.0), ["second", "first"]),
        ((4.0, 100.0), ["first"]),
        ((100.0, 4.0), ["second"]),
        ((100.0, None), ["first", "second"]),  # nothing to rule it out by
    ):
        with mock.patch.object(module, "_estimate", side_effect=estimates):
            assert [partitioning.order[0] for partitioning in _partitionings(graph_module, engines)] == orders


class _Keeps(FakeEngine):
    """Wants layer norms whole."""

    keep_ops = frozenset({aten.native_layer_norm.default})


def _norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return aten.native_layer_norm(x @ x, [8], w, None, 1e-5)[0].relu()


def test_what_one_engine_keeps_whole_is_decomposed_for_the_other() -> None:
    """The engine that wants layer norms whole gets them so; where the other comes first, which refuses them whole, it gets the parts."""
    graph_module = trace(_norm, torch.randn(8, 8), torch.randn(8))
    keeps, other = _Keeps("keeps"), FakeEngine("other", refuses=["native_layer_norm", "mm"])
    found = {
        partitioning.order[0]: _regions(partitioning) for partitioning in _partitionings(graph_module, [keeps, other])
    }
    ((engine, operators),) = found["keeps"]
    assert engine == "keeps"
    assert "native_layer_norm" in operators
    (product, (engine, parts)) = found["other"]
    assert product == ("keeps", ["mm"])
    assert engine == "other"
    assert "var_mean" in parts
    assert "native_layer_norm" not in parts


def test_what_nobody_takes_whole_is_decomposed() -> None:
    """An operator that its keeper refuses after all goes in parts to the engine that takes those."""
    graph_module = trace(_norm, torch.randn(8, 8), torch.randn(8))
    keeps, other = _Keeps("keeps", takes=["mm"]), FakeEngine("other", refuses=["native_layer_norm", "mm"])
    for partitioning in _partitionings(graph_module, [keeps, other]):
        assert "native_layer_norm" not in str(_regions(partitioning))
        assert "eager" not in [engine for engine, _ in _regions(partitioning)]


def test_it_stays_whole_where_no_engine_takes_all_parts() -> None:
    """Eager runs one operator, not seven."""
    graph_module = trace(_norm, torch.randn(8, 8), torch.randn(8))
    keeps, other = _Keeps("keeps", takes=["mm"]), FakeEngine("other", refuses=["native_layer_norm", "rsqrt", "mm"])
    for partitioning in _partitionings(graph_module, [keeps, other]):
        assert ("eager", ["native_layer_norm"]) in [(e, o[:1]) for e, o in _regions(partitioning)]
