"""Partition and choices -> the frozen Plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch_hybrid_backend.core.plan import Plan, RegionDecision
from torch_hybrid_backend.partition.regions import Partition


def make_plan(graph: str, kind: str, partition: Partition, decisions: Sequence[RegionDecision]) -> Plan:
    """The plan of one graph. `decisions`: the engine that runs each claimed region; a region without a decision runs on the engine that
    claimed it."""
    engine = {decision.name: decision.engine for decision in decisions}
    nodes = tuple(
        dataclasses.replace(node, engine=engine.get(node.region, node.engine)) if node.region else node
        for node in partition.nodes
    )
    outputs = tuple(value for value in partition.graph.outputs if isinstance(value, str))
    return Plan(
        graph, kind, nodes, tuple(decisions), inputs=partition.inputs, outputs=outputs, modules=partition.modules
    )
