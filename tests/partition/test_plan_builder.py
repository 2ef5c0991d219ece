"""The plan says who runs each operator: whom its region was given to, or who claimed it."""

from __future__ import annotations

import dataclasses

import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Refusal, RegionDecision
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.partition.plan_builder import make_plan
from torch_hybrid_backend.partition.regions import Partition, partition_graph


def _partition() -> Partition:
    """Two regions of two products each, around a sort that no engine takes."""
    module = trace(lambda x: (torch.sort(x @ x @ x)[0] @ x) @ x, torch.randn(8, 8))
    return partition_graph(
        module, [FakeEngine("first", refuses=["sort"]), FakeEngine("second", takes=["mm"])], Config()
    )


def _decision(region: Region, engine: str) -> RegionDecision:
    refusals = (Refusal("first", Reason.DEADLINE, "it took over 3 s"),)
    specs = tuple(given.spec for given in region.inputs if given.spec is not None)
    return RegionDecision(
        region.name,
        engine,
        region.key,
        region.node_names,
        specs,
        (),
        (),
        refusals,
        None,
        7,
        ("row_softmax",),
        region.source,
        region.device,
    )


def _runs(plan: object, nodes: tuple[str, ...]) -> set[str]:
    return {node.engine for node in plan.nodes if node.name in nodes}  # type: ignore[attr-defined]


def test_operators_follow_their_region() -> None:
    """Each region's operators run where it was decided, also against the engine that claimed them; those of no region stay eager's."""
    found = _partition()
    first, sort, last = (segment.region for segment in found.graph.segments)
    decisions = [_decision(first, "eager"), _decision(last, "second")]
    plan = make_plan("graph", "inference", found, decisions)
    assert _runs(plan, first.node_names) == {"eager"}
    assert _runs(plan, sort.node_names) == {"eager"}
    assert _runs(plan, last.node_names) == {"second"}
    assert (plan.graph, plan.kind, plan.regions, plan.call) == ("graph", "inference", tuple(decisions), None)


def test_a_region_without_a_decision_runs_as_it_was_claimed() -> None:
    """Before the first call nothing is decided: the plan shows what partitioning gave each engine."""
    found = _partition()
    first, _, last = (segment.region for segment in found.graph.segments)
    assert make_plan("graph", "forward", found, []).nodes == found.nodes
    plan = make_plan("graph", "forward", found, [_decision(last, "eager")])
    assert _runs(plan, first.node_names) == {"first"}
    assert _runs(plan, last.node_names) == {"eager"}


def test_only_the_engine_of_an_operator_is_rewritten() -> None:
    """Name, line, flops and refusals stay those of partitioning, operator by operator in the graph's order; the partition is left alone."""
    found = _partition()
    before = found.nodes
    decisions = [_decision(segment.region, "second") for segment in found.graph.segments[::2]]
    plan = make_plan("graph", "backward", found, decisions)
    assert any(node.refusals for node in plan.nodes)
    assert sum(node.flops for node in plan.nodes) == 4 * 2 * 8**3
    assert [dataclasses.replace(node, engine="") for node in plan.nodes] == [
        dataclasses.replace(node, engine="") for node in before
    ]
    assert found.nodes is before
