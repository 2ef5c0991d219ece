"""Facts of values that a whole graph tells: which are returned, whose memory they live in, which follow from constants alone."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.graph.quantized import QUANTIZED, KeepsPacked, is_dequantized, keeps_nothing
from torch_hybrid_backend.graph.schema import (
    group_of,
    is_collective,
    is_control_flow,
    is_item,
    is_mutating,
    is_pure,
    is_view,
    is_wait,
    shared_arguments,
)
from torch_hybrid_backend.torch_private import OpOverload

_OF_PYTORCH = frozenset({"aten", "prims", QUANTIZED})


def outputs_of(gm: torch.fx.GraphModule) -> tuple[object, ...]:
    """The graph's outputs in order: nodes and literals."""
    (returned,) = gm.graph.output_node().args
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def output_nodes(gm: torch.fx.GraphModule) -> Iterator[Node]:
    """The nodes among the graph's outputs, in order, repeated where the graph returns one twice."""
    return (value for value in outputs_of(gm) if isinstance(value, Node))


def storage_root(node: Node) -> Node:
    """The node that made the memory which this node's value lives in: itself, unless it is a view or writes in place."""
    while True:
        if is_item(node):
            base = node.all_input_nodes[0]
            shared = [base] if is_view(base) else []
        else:
            shared = shared_arguments(node)
        if not shared:
            return node
        node = shared[0]


def returned_roots(gm: torch.fx.GraphModule) -> dict[Node, int]:
    """Makers of the memory that the graph returns -> how many outputs live in it."""
    counts: dict[Node, int] = {}
    for node in output_nodes(gm):
        root = storage_root(node)
        counts[root] = counts.get(root, 0) + 1
    return counts


def has_mutation(gm: torch.fx.GraphModule) -> bool:
    """True if any node of the graph writes to an argument: values are then not only what their expression says."""
    return any(is_mutating(node) for node in gm.graph.nodes)


def constant_nodes(
    gm: torch.fx.GraphModule, constants: frozenset[str], keeps_packed: KeepsPacked = keeps_nothing
) -> set[Node]:
    """Nodes that depend on the placeholders `constants`, and on buffers, alone, and that `passes.hoist` therefore computes ahead."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if (node.op == "placeholder" and node.name in constants) or (
            is_pure(node)
            and not is_dequantized(node, keeps_packed)
            and all(argument in found for argument in node.all_input_nodes)
        ):
            found.add(node)
    return found


def is_repeatable(gm: torch.fx.GraphModule) -> bool:
    """True if a call of the graph can be repeated unnoticed: all it does is compute, by operators that PyTorch itself answers for.

    What another library's operators do besides computing is not known, whatever their schemas declare.
    """
    return all(_only_computes(node) for node in gm.graph.nodes if node.op not in ("placeholder", "output"))


def _only_computes(node: Node) -> bool:
    is_known = not isinstance(node.target, OpOverload) or node.target.namespace in _OF_PYTORCH
    return is_pure(node) and is_known


def effects(gm: torch.fx.GraphModule) -> Iterator[Node]:
    """The nodes that do, or may do, more than compute, as `is_repeatable` has it; of control flow, those of its bodies."""
    for node in gm.graph.nodes:
        if is_control_flow(node):
            called = (operator.attrgetter(n.target)(gm) for n in node.all_input_nodes if n.op == "get_attr")
            for body in called:
                if isinstance(body, torch.fx.GraphModule):
                    yield from effects(body)
        elif node.op not in ("placeholder", "output") and not _only_computes(node):
            yield node


def holds_collectives(gm: torch.fx.GraphModule) -> bool:
    """True if the graph, or a sub-graph that it calls, works with other processes: no call of it may be repeated on one rank alone."""
    return next(collectives(gm), None) is not None


def groups_of(gm: torch.fx.GraphModule) -> set[str | None]:
    """Names of the process groups of the graph's collectives, sub-graphs included; None for a group whose name is not told."""
    return {group_of(node) for node in collectives(gm) if not is_wait(node)}


def collectives(gm: torch.fx.GraphModule) -> Iterator[Node]:
    """The steps of the graph, sub-graphs included, that work with other processes."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    return (node for graph in graphs for node in graph.nodes if is_collective(node))
