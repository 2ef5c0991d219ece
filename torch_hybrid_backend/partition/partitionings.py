"""Covers: the partitions of one graph that are worth pricing.

The engine that is asked first shapes the regions, so another engine's best regions never come to be: it is offered what the first one left, or
the first one's regions where it happens to support all of them. Hence one partition for each engine at the head of the order. On the
first call placement prices each on the real inputs and keeps the cheapest (`placement.choose`, `boundary`). A region that two covers have in
common is compiled and priced once.

    engines (a, b)      a supports conv, relu; b supports relu, softmax
    cover a, b          [conv relu] by a   [softmax] by b
    cover b, a          [conv] by a        [relu softmax] by b

An operator that one engine wants whole stays so only where that engine gets it. In a cover in which another engine comes first and
refuses it whole, it is decomposed if that engine takes all of its parts; so it is where no engine takes it whole.
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

# A cover whose estimate is so many times the best one's is not compiled. Estimates know no kernels: they rule out only what is hopeless.
_HOPELESS_RATIO = 3.0

# What tracing makes of an operator where only an engine's own `keep_ops` stay whole; None where it stays whole too.
Decomposed = Callable[[Node, Engine], torch.fx.GraphModule | None]
# A copy of a graph with some operators decomposed, and the copies of its other nodes.
Decompose = Callable[
    [torch.fx.GraphModule, Mapping[Node, torch.fx.GraphModule]], tuple[torch.fx.GraphModule, Mapping[Node, Node]]
]


@dataclass(frozen=True, slots=True)
class Cover:
    """A partition of a graph. `order`: the engines as they were asked, eager left out. `estimated_us`: one call, by estimate; None
    where there is none: on a device without a roofline, and of the only cover, which need not be compared."""

    order: tuple[str, ...]
    partition: Partition
    estimated_us: float | None


def covers(
    graph_module: torch.fx.GraphModule,
    engines: Sequence[Engine],
    config: Config,
    decomposed: Decomposed,
    decompose: Decompose,
    *,
    own_order: bool = False,
) -> tuple[Cover, ...]:
    """The partitions of a functional ATen graph among `engines` that are worth pricing, the cheapest by estimate first.

    There is one cover with at most one engine beside eager; with `own_order` the engines are asked in their own order only. Raises
    RegionError under `config.strict` where an engine raises instead of answering.
    """
    offered = tuple(engine for engine in engines if engine.name != EAGER)
    if len(offered) < 2 or own_order:
        only = partition_graph(graph_module, offered, config)
        return (Cover(tuple(engine.name for engine in offered), only, None),)
    verdicts = capability(dependencies(graph_module.graph).operators, offered, strict=config.strict)
    found: list[Cover] = []
    for order in _orders(offered):
        module, answers = graph_module, {node: _in_order(given, offered, order) for node, given in verdicts.items()}
        formulas = dict(_formulas(answers, order, decomposed, config))
        if formulas:
            module, copies = decompose(graph_module, formulas)
            answers = {copies[node]: given for node, given in answers.items() if node in copies}
        candidate = partition_graph(module, order, config, answers)
        if all(not _equal(candidate, other.partition) for other in found):
            found.append(Cover(tuple(engine.name for engine in order), candidate, _estimate(candidate, order)))
    return _worth_pricing(found)


def _worth_pricing(found: Sequence[Cover]) -> tuple[Cover, ...]:
    """The covers without the hopeless ones, the cheapest first; all, as they came, where one has no estimate."""
    estimated = [(cover.estimated_us, cover) for cover in found if cover.estimated_us is not None]
    if len(estimated) < len(found):
        return tuple(found)
    estimated.sort(key=lambda pair: pair[0])
    best_us = estimated[0][0]
    for us, cover in estimated:
        if us > _HOPELESS_RATIO * best_us:
            why = "the partition with %s first is not compiled: estimated %.1f us, the best %.1f us"
            _log.info(why, cover.order[0], us, best_us)
    return tuple(cover for us, cover in estimated if us <= _HOPELESS_RATIO * best_us)


def _orders(engines: Sequence[Engine]) -> Iterator[tuple[Engine, ...]]:
    """Each engine first, the others behind it in their own order."""
    for head in engines:
        yield head, *(engine for engine in engines if engine is not head)


def _in_order(given: Sequence[Verdict], engines: Sequence[Engine], order: Sequence[Engine]) -> tuple[Verdict, ...]:
    return tuple(given[engines.index(engine)] for engine in order)


def _formulas(
    answers: Mapping[Node, tuple[Verdict, ...]], order: Sequence[Engine], decomposed: Decomposed, config: Config
) -> Iterator[tuple[Node, torch.fx.GraphModule]]:
    """The operators to take apart in this order, each with its parts: those that an engine keeps whole for itself, where one before it
    refuses the whole and takes all of the parts."""
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


def _equal(a: Partition, b: Partition) -> bool:
    """True if the same operators make the same regions with the same candidates."""
    return _shape(a) == _shape(b)


def _shape(partition: Partition) -> list[tuple[tuple[str, ...], frozenset[str]]]:
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
