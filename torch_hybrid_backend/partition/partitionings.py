"""Candidate partitionings of one graph: those that are worth pricing.

The engine that is asked first shapes the regions. Other engines get the operators that it left, or those of its regions that they support
whole, so their own best regions never form. Hence there is one partitioning for each engine at the head of the order. In the first call
placement prices each on the real inputs and keeps the cheapest (`placement.choose`, `boundary`). A region that two partitionings share is
compiled and priced once.

    engines (a, b)           a supports conv, relu; b supports relu, softmax
    partitioning a, b        [conv relu] by a   [softmax] by b
    partitioning b, a        [conv] by a        [relu softmax] by b

An operator that an engine asks to keep whole (`Engine.keep_ops`) stays whole only where that engine gets the operator. If another engine comes
first, refuses the operator and takes all of its parts, then the operator is decomposed. An operator that no engine takes whole is decomposed
under the same condition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.fx
from torch.fx import Node

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import EAGER, Engine
from torch_hybrid_backend.core.verdict import Verdict
from torch_hybrid_backend.partition.boundary import callbacks_us, conversions_us
from torch_hybrid_backend.partition.capability import capability
from torch_hybrid_backend.partition.dependencies import dependencies
from torch_hybrid_backend.partition.estimate import eager_us, fused_us, roofline
from torch_hybrid_backend.partition.regions import Partition, partition_graph

_log = logging.getLogger(__name__)

# A partitioning whose estimate is more than this many times the best estimate is not compiled. Estimates know no kernels, so the limit is wide.
_HOPELESS_RATIO = 3.0

# Traces an operator into its parts, where only the engine's own `keep_ops` stay whole; None if the operator itself stays whole.
Decomposed = Callable[[Node, Engine], torch.fx.GraphModule | None]
# A copy of a graph with some operators decomposed, and the copies of its other nodes.
Decompose = Callable[
    [torch.fx.GraphModule, Mapping[Node, torch.fx.GraphModule]], tuple[torch.fx.GraphModule, Mapping[Node, Node]]
]


@dataclass(frozen=True, slots=True)
class Partitioning:
    """A partition of a graph, made by asking the engines in one order.

    `order`: names of the engines as they were asked, without eager. `estimated_us`: estimated microseconds of one call; None on a device
    without a roofline, and for an only partitioning, which is compared with no other.
    """

    order: tuple[str, ...]
    partition: Partition
    estimated_us: float | None


def partitionings(
    graph_module: torch.fx.GraphModule,
    engines: Sequence[Engine],
    config: Config,
    decomposed: Decomposed,
    decompose: Decompose,
    *,
    own_order: bool = False,
) -> tuple[Partitioning, ...]:
    """Partitionings of a functional ATen graph among `engines` that are worth pricing, the cheapest by estimate first.

    With at most one engine beside eager there is one partitioning. With `own_order` the engines are asked in their given order only, which
    makes one partitioning too. Raises RegionError under `config.strict` if an engine raises instead of answering.
    """
    offered = tuple(engine for engine in engines if engine.name != EAGER)
    if len(offered) < 2 or own_order:
        only = partition_graph(graph_module, offered, config)
        return (Partitioning(tuple(engine.name for engine in offered), only, None),)
    verdicts = capability(dependencies(graph_module.graph).operators, offered, strict=config.strict)
    distinct: list[Partitioning] = []
    for order in _orders(offered):
        module, answers = (
            graph_module,
            {node: _in_order(answered, offered, order) for node, answered in verdicts.items()},
        )
        formulas = dict(_formulas(answers, order, decomposed, config))
        if formulas:
            module, copies = decompose(graph_module, formulas)
            answers = {copies[node]: answered for node, answered in answers.items() if node in copies}
        candidate = partition_graph(module, order, config, answers)
        if all(not _are_equal(candidate, other.partition) for other in distinct):
            distinct.append(
                Partitioning(tuple(engine.name for engine in order), candidate, _estimate(candidate, order))
            )
    return _worth_pricing(distinct)


def _worth_pricing(candidates: Sequence[Partitioning]) -> tuple[Partitioning, ...]:
    """Partitionings within `_HOPELESS_RATIO` of the best estimate, the cheapest first; all of them, in order, if one has no estimate."""
    estimated = [
        (partitioning.estimated_us, partitioning)
        for partitioning in candidates
        if partitioning.estimated_us is not None
    ]
    if len(estimated) < len(candidates):
        return tuple(candidates)
    estimated.sort(key=lambda pair: pair[0])
    best_us = estimated[0][0]
    for us, partitioning in estimated:
        if us > _HOPELESS_RATIO * best_us:
            why = "the partition with %s first is not compiled: estimated %.1f us, the best %.1f us"
            _log.info(why, partitioning.order[0], us, best_us)
    return tuple(partitioning for us, partitioning in estimated if us <= _HOPELESS_RATIO * best_us)


def _orders(engines: Sequence[Engine]) -> Iterator[tuple[Engine, ...]]:
    """Yield one order for each engine: that engine first, then the others in their given order."""
    for head in engines:
        yield head, *(engine for engine in engines if engine is not head)


def _in_order(verdicts: Sequence[Verdict], engines: Sequence[Engine], order: Sequence[Engine]) -> tuple[Verdict, ...]:
    return tuple(verdicts[engines.index(engine)] for engine in order)


def _formulas(
    answers: Mapping[Node, tuple[Verdict, ...]], order: Sequence[Engine], decomposed: Decomposed, config: Config
) -> Iterator[tuple[Node, torch.fx.GraphModule]]:
    """Yield the operators to decompose in this order, each with its parts.

    These are operators that some engine keeps whole, if an engine before it refuses the whole operator and takes all of the parts.
    """
    for node, verdicts in answers.items():
        keepers = [engine for engine in order if node.target in engine.keep_ops]
        if not keepers:
            continue
        for engine, verdict in zip(order, verdicts, strict=True):
            if verdict:
                break
            if engine in keepers:
                continue
            formula = decomposed(node, engine)
            if formula is not None and _takes_all(engine, formula, config):
                yield node, formula
                break


def _takes_all(engine: Engine, formula: torch.fx.GraphModule, config: Config) -> bool:
    parts = dependencies(formula.graph).operators
    return all(verdict for (verdict,) in capability(parts, [engine], strict=config.strict).values())


def _are_equal(a: Partition, b: Partition) -> bool:
    """True if the same operators make the same regions with the same candidates."""
    return _regions_of(a) == _regions_of(b)


def _regions_of(partition: Partition) -> list[tuple[tuple[str, ...], frozenset[str]]]:
    return [
        (segment.region.node_names, frozenset(partition.able[segment.region.name]))
        for segment in partition.graph.segments
    ]


def _estimate(partition: Partition, engines: Sequence[Engine]) -> float | None:
    """Microseconds of one call, each region run by the engine that claimed it; None where a device has no roofline."""
    graph = partition.graph
    runs = {segment.region.name: segment.engine_hint for segment in graph.segments}
    total = conversions_us(graph, runs, {engine.name: engine for engine in engines})
    for segment in graph.segments:
        on = roofline(segment.region.device)
        if on is None or total is None:
            return None
        total += eager_us(segment.region, on) if segment.engine_hint == EAGER else fused_us(segment.region, on)
    return None if total is None else total + callbacks_us(graph, runs)
