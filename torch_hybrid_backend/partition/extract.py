"""Extraction of one segment of the graph as a region with its own module."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.region import Region, RegionInput, Segment
from torch_hybrid_backend.core.tensor_spec import TensorSpec, dim, is_computable
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.graph.schema import draws_numbers, is_in_flight
from torch_hybrid_backend.graph.source import source_line
from torch_hybrid_backend.partition.dependencies import is_operator
from torch_hybrid_backend.partition.region_key import region_key
from torch_hybrid_backend.sizes.size import Dim, symbols
from torch_hybrid_backend.torch_private import make_graph_module, use_lazy_graph_module


def extract(
    name: str,
    nodes: Sequence[Node],
    engine: str,
    device: Device,
    whole: torch.fx.GraphModule,
    constants: frozenset[str],
) -> Segment:
    """The segment of `nodes` (operators of `whole`, in its order) on `device`, with its own GraphModule. `meta` is copied.

    Inputs are in the order of their first use, outputs in graph order. Tensor constants (get_attr) are not inputs:
    the region's module holds them and shares their memory.
    """
    inside = set(nodes)
    sources: dict[Node, None] = {}
    attributes: dict[str, object] = {}
    for node in nodes:
        if node.op == "get_attr":
            attributes[str(node.target)] = operator.attrgetter(str(node.target))(whole)
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                attributes[str(source.target)] = operator.attrgetter(str(source.target))(whole)
            elif source not in inside:
                sources[source] = None
    if engine != EAGER:
        sources.update(dict.fromkeys(_size_inputs(nodes, tuple(sources), whole)))
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for source in sources:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.node_copy(source)
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [node for node in nodes if any(_leaves(user, inside) for user in node.users)]
    graph.output(tuple(copies[node] for node in outputs))
    with use_lazy_graph_module(True):  # most regions never run from Python again: generate code only for those that do
        module = make_graph_module(attributes, graph, name)
    inputs = tuple(
        RegionInput(source.name, _spec(source), source.name in constants, size_of(source)) for source in sources
    )
    region = Region(
        name=name,
        graph_module=module,
        eager=EagerGraph(module),
        inputs=inputs,
        outputs=tuple(_spec(node) for node in outputs),
        node_names=tuple(node.name for node in nodes),
        key=region_key(module, inputs),
        device=device,
        source=next(filter(None, map(source_line, nodes)), ""),
        draws=draws_numbers(module),
    )
    return Segment(region, tuple(source.name for source in sources), tuple(node.name for node in outputs), engine)


def _leaves(user: Node, inside: set[Node]) -> bool:
    return user not in inside and (user.op == "output" or is_operator(user))


def _spec(node: Node) -> TensorSpec | None:
    """The spec of a value; None if it is no strided tensor, or if a collective still writes it, so that it must not be copied yet."""
    value = node.meta.get("val")
    if is_in_flight(node) or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return TensorSpec.of(value)


def size_of(node: Node) -> Dim | None:
    """The node's value as a size; None if the value is no size, or one that depends on data."""
    value = node.meta.get("val")
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        return None
    size = dim(value)
    return size if is_computable(size) else None


def sizes_of(graph: torch.fx.Graph) -> Mapping[str, Dim]:
    """The graph's values that are sizes, by name."""
    sizes = ((node.name, size_of(node)) for node in graph.nodes if node.op != "output")
    return {name: size for name, size in sizes if size is not None}


def _size_inputs(nodes: Sequence[Node], sources: Sequence[Node], whole: torch.fx.GraphModule) -> list[Node]:
    """The graph's size inputs that the region needs in addition: its sizes must follow from its inputs."""
    entering = [size for size in map(size_of, sources) if size is not None]
    used: list[Dim] = entering.copy()
    known = set(map(str, entering))
    for node in (*sources, *nodes):
        values = node.meta.get("val")
        for value in values if isinstance(values, list | tuple) else (values,):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                spec = TensorSpec.of(value)
                used += (*spec.shape, *spec.strides)
                if node in sources:
                    known.update(str(size) for size in spec.shape)
    needed = {s.name for s in symbols(used)} - known
    if not needed:
        return []
    placeholders = [node for node in whole.graph.nodes if node.op == "placeholder" and node not in sources]
    return [node for node in placeholders if str(size_of(node)) in needed]


def constants_of(graph: torch.fx.Graph) -> frozenset[str]:
    """Names of placeholders that hold parameters, buffers or folded values (`meta["constant"]`)."""
    return frozenset(node.name for node in graph.nodes if node.op == "placeholder" and node.meta.get("constant"))


def by_level(operators: Sequence[Node], levels: Sequence[int]) -> Mapping[int, list[Node]]:
    """The operators of each level, in graph order, levels ascending."""
    groups: dict[int, list[Node]] = {}
    for node, level in zip(operators, levels, strict=True):
        groups.setdefault(level, []).append(node)
    return dict(sorted(groups.items()))
