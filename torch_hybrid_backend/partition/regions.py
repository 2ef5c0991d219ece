"""Partition of the main graph: the operators that run together, and the engine that is to run them.

Each operator is claimed by the first engine, in order, that supports it; eager takes the rest. `levels` cuts the
coloured graph into convex segments. A colour is an engine and a device, so that no engine's region has values of two
devices. Segments too small to pay are demoted: their operators go to the next engine that supports them, in the end to
eager. Then the graph is cut again, so that the segments which they separated grow together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import EAGER, Engine
from torch_hybrid_backend.core.plan import GraphInput, ModuleCall, NodeDecision
from torch_hybrid_backend.core.region import PartitionedGraph, Segment
from torch_hybrid_backend.core.verdict import Reason, Refused, Verdict
from torch_hybrid_backend.graph.devices import device_of
from torch_hybrid_backend.graph.operator_calls import why_python
from torch_hybrid_backend.graph.schema import is_control_flow, is_item, is_view
from torch_hybrid_backend.graph.values import outputs_of
from torch_hybrid_backend.partition.capability import capability
from torch_hybrid_backend.partition.dependencies import Dependencies, dependencies
from torch_hybrid_backend.partition.extract import by_level, constants_of, extract, size_of, sizes_of
from torch_hybrid_backend.partition.flops import node_flops
from torch_hybrid_backend.partition.levels import segments, sink
from torch_hybrid_backend.partition.node_decisions import graph_inputs, module_calls, node_decision

# The most computing operators, none a product, for which a region between eager segments that run from Python is not worth it. The region
# splits eager in two, which costs one more call of Python, about 10 us. Fusing two passes over a small tensor gains less.
ISLAND_NODES = 2

# The most cuts per engine. Demotion makes regions grow together, which settles after two or three cuts. The bound keeps the time linear.
_MAX_CUTS = 8


@dataclass(frozen=True, slots=True)
class Partition:
    """A partitioned graph, and for each operator, in graph order, the engine that claimed it and the engines that refused it.

    `able[name]`: the engines (without eager) that support all operators of region `name`: first the engine that claimed the region, then the
    others in order of preference. Empty for eager's segments.
    """

    graph: PartitionedGraph
    nodes: tuple[NodeDecision, ...]
    able: Mapping[str, tuple[str, ...]]
    inputs: tuple[GraphInput, ...] = ()
    modules: tuple[ModuleCall, ...] = ()

    def candidates(self, segment: Segment, engine_names: Sequence[str]) -> tuple[str, ...]:
        """Names among `engine_names` that may run the segment's region; eager is never among them."""
        return tuple(name for name in self.able[segment.region.name] if name in engine_names)


def partition_graph(
    graph_module: torch.fx.GraphModule,
    engines: Sequence[Engine],
    config: Config,
    known: Mapping[Node, tuple[Verdict, ...]] = MappingProxyType({}),
) -> Partition:
    """Partition a functional ATen graph among `engines` (in order of preference; eager is implied).

    `known`: earlier verdicts of the engines, in their order, on operators of the graph; the engines are asked about other operators.

    Placeholders with `meta["constant"]` hold parameters or folded values. Every node carries `meta["val"]`. The graph
    is not changed. Raises RegionError under `config.strict` if an engine raises instead of answering.
    """
    graph = graph_module.graph
    offered = tuple(engine for engine in engines if engine.name != EAGER)
    names = (*(engine.name for engine in offered), EAGER)
    needs = dependencies(graph)
    verdicts = dict(capability(needs.operators, offered, strict=config.strict, known=known))
    flops = {node: node_flops(node) for node in needs.operators}
    devices = {node: device_of(node) for node in needs.operators}
    levels = _cut(needs, verdicts, devices, flops, config.min_region_nodes)
    constants = constants_of(graph)
    cut: list[Segment] = []
    home: dict[Node, Segment] = {}
    able: dict[str, tuple[str, ...]] = {}
    for index, nodes in enumerate(_apart(by_level(needs.operators, levels).values())):
        engine = names[_claimer(verdicts[nodes[0]])]
        mixed = {devices[node] for node in nodes}
        device = mixed.pop() if len(mixed) == 1 else None
        segment = extract(f"r{index}", nodes, engine, device or CPU, graph_module, constants)
        able[segment.region.name] = _able_engines(engine, nodes, verdicts, names)
        cut.append(segment)
        home.update(dict.fromkeys(nodes, segment))
    decisions = tuple(
        node_decision(node, devices[node], home[node], verdicts[node], names, flops[node]) for node in needs.operators
    )
    inputs = tuple(node.name for node in graph.nodes if node.op == "placeholder")
    outputs = tuple(value.name if isinstance(value, Node) else value for value in outputs_of(graph_module))
    partitioned = PartitionedGraph(inputs, constants, tuple(cut), outputs, sizes_of(graph))
    return Partition(partitioned, decisions, able, graph_inputs(graph, constants), module_calls(graph))


def _call(node: Node) -> Node | None:
    """The call of a control flow operator that a node makes, or takes a result of; None for other nodes."""
    called = node.args[0] if is_item(node) else node
    return called if isinstance(called, Node) and is_control_flow(called) else None


def _apart(levels: Iterable[list[Node]]) -> Iterator[list[Node]]:
    """The operators of each level, with those of each call of control flow as a segment of its own."""
    for nodes in levels:
        calls: dict[Node | None, list[Node]] = {}
        for node in nodes:
            calls.setdefault(_call(node), []).append(node)
        yield from calls.values()


def _claimer(verdicts: Sequence[Verdict]) -> int:
    """Index of the first engine that supports the operator; the number of engines, which stands for eager, if none does."""
    return next((i for i, verdict in enumerate(verdicts) if verdict), len(verdicts))


def _able_engines(
    claimed: str, nodes: Sequence[Node], verdicts: Mapping[Node, tuple[Verdict, ...]], names: Sequence[str]
) -> tuple[str, ...]:
    if claimed == EAGER:
        return ()
    takes_all = (name for i, name in enumerate(names[:-1]) if all(verdicts[node][i] for node in nodes))
    return tuple(dict.fromkeys((claimed, *takes_all)))


def _cut(
    needs: Dependencies,
    verdicts: dict[Node, tuple[Verdict, ...]],
    devices: Mapping[Node, Device | None],
    flops: Mapping[Node, int],
    minimum: int,
) -> list[int]:
    """The level of each operator. Demotions are written into `verdicts`. Calls of control flow share no level with other operators."""
    places = list(dict.fromkeys(devices.values()))
    engine_count = max((len(given) for given in verdicts.values()), default=0)
    sinkable = [_sinkable(node, ordered) for node, ordered in zip(needs.operators, needs.ordered, strict=True)]
    eager = engine_count * len(places)
    calls = [_call(node) is not None for node in needs.operators]
    colour_count = eager + 1 + any(calls)
    cuts = _MAX_CUTS * max(eager, 1)
    for attempt in range(cuts):
        claimers = [_claimer(verdicts[node]) for node in needs.operators]
        colours = [
            eager + calls[i] if claimer == engine_count else claimer * len(places) + places.index(devices[node])
            for i, (node, claimer) in enumerate(zip(needs.operators, claimers, strict=True))
        ]
        levels = segments(colours, needs.before, colour_count)
        levels = sink(levels, colours, needs.before, sinkable)
        demoted = _too_small(needs, (claimers, levels), flops, engine_count, minimum) if attempt < cuts - 1 else {}
        if not demoted:
            break
        for i, why in demoted.items():
            node = needs.operators[i]
            replaced = list(verdicts[node])
            replaced[claimers[i]] = Refused(Reason.TOO_SMALL, why)
            verdicts[node] = tuple(replaced)
    return levels


def _too_small(
    needs: Dependencies, cut: tuple[Sequence[int], Sequence[int]], flops: Mapping[Node, int], eager: int, minimum: int
) -> dict[int, str]:
    """The operators in segments not worth an engine, each with the reason. `cut`: the claimer of each operator, and its level.

    Only the operators of the first engine that has such segments are returned: another engine's regions may grow by them.
    """
    claimers, levels = cut
    computing: dict[int, int] = {}
    heavy: set[int] = set()
    reads_python: set[int] = set()
    read_by_python: set[int] = set()
    in_python = {
        levels[i] for i, node in enumerate(needs.operators) if claimers[i] == eager and why_python(node, draws=True)
    }
    for i, node in enumerate(needs.operators):
        level = levels[i]
        computing[level] = computing.get(level, 0) + (not is_view(node) and not is_item(node))
        if flops[node]:
            heavy.add(level)
        for u in needs.before[i]:
            if size_of(needs.operators[u]) is not None:
                continue  # sizes are at hand in every segment
            if levels[u] in in_python and claimers[i] != eager:
                reads_python.add(level)
            elif level in in_python and claimers[u] != eager:
                read_by_python.add(levels[u])
    demoted: dict[int, str] = {}
    for i, level in enumerate(levels):
        if claimers[i] == eager:
            continue
        count = computing[level]
        if count < minimum:
            demoted[i] = f"its region has {count} computing operators, HYBRID_MIN_REGION_NODES asks for {minimum}"
        elif count <= ISLAND_NODES and level not in heavy and level in reads_python and level in read_by_python:
            demoted[i] = f"its region has {count} cheap operators between operators that eager runs from Python"
    first = min((claimers[i] for i in demoted), default=eager)
    return {i: why for i, why in demoted.items() if claimers[i] == first}


def _sinkable(node: Node, ordered: bool) -> bool:
    """True if the node may move to its first user: its result is larger than its inputs, apart from the graph's inputs and constants."""
    value = node.meta.get("val")
    if ordered or is_item(node) or not isinstance(value, torch.Tensor):
        return False
    carried = [source for source in node.all_input_nodes if source.op not in ("placeholder", "get_attr")]
    read = sum(_elements(source.meta.get("val")) for source in carried)
    made = _elements(value)
    return made >= read if is_view(node) else made > read


def _elements(value: object) -> int:
    """The number of elements of a tensor, broadcast dimensions included. Symbolic sizes count with their hints, 0 if unknown."""
    if not isinstance(value, torch.Tensor):
        return 0
    count = 1
    for size in value.shape:
        hint = size if isinstance(size, int) else size.node.hint
        count *= int(hint) if hint is not None else 0
    return count
