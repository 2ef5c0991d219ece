"""Which nodes compute a value and do nothing else, and which values share memory.

Everything is read off the operators' schemas (mutation, aliasing) and tags (randomness), so that an operator nobody
here has heard of is classed rightly.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.fx

aten = torch.ops.aten
_OWN = frozenset({"aten", "prims"})


def is_random(node: torch.fx.Node) -> bool:
    """Whether the node draws from a random generator."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_mutating(node: torch.fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def has_mutation(gm: torch.fx.GraphModule) -> bool:
    """Whether any node of the graph writes to an argument: values are then not only what their expression says."""
    return any(is_mutating(node) for node in gm.graph.nodes)


def is_pure(node: torch.fx.Node) -> bool:
    """Whether the node may be merged with its like, moved, or dropped when unused: a deterministic function of its
    arguments.

    Of what is not an ATen-style operator only tuple access and arithmetic on sizes are pure; higher-order operators
    are not (their sub-graphs are not looked into).
    """
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not (is_random(node) or is_mutating(node) or node.is_impure())
    return node.target is operator.getitem or isinstance(
        node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float
    )


def is_repeatable(gm: torch.fx.GraphModule) -> bool:
    """Whether a call of the graph can be repeated unnoticed: all it does is compute, by operators that PyTorch itself answers for.

    What another library's operators do besides computing is not known, whatever their schemas declare.
    """
    return all(
        is_pure(node) and (not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace in _OWN)
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "output")
    )


def constant_nodes(gm: torch.fx.GraphModule, constants: frozenset[str]) -> set[torch.fx.Node]:
    """Nodes that depend on the placeholders `constants`, and on buffers, alone."""
    found: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        if (node.op == "placeholder" and node.name in constants) or (
            is_pure(node) and all(argument in found for argument in node.all_input_nodes)
        ):
            found.add(node)
    return found


def is_view(node: torch.fx.Node) -> bool:
    """Whether the operator's result shares the memory of its first argument (by its schema)."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


def storage_root(node: torch.fx.Node) -> torch.fx.Node:
    """The node that made the memory which this node's value lives in: itself, unless it is a view."""
    while True:
        base = node.args[0] if node.args else None
        if not isinstance(base, torch.fx.Node):
            return node
        takes_member = node.target is operator.getitem and is_view(base)
        if not (takes_member or is_view(node) or is_mutating(node)):
            return node
        node = base


def outputs_of(gm: torch.fx.GraphModule) -> tuple[object, ...]:
    """The graph's outputs in order: nodes and literals."""
    (returned,) = gm.graph.output_node().args
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def output_nodes(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes among the graph's outputs, in order, repeated where the graph returns one twice."""
    return (value for value in outputs_of(gm) if isinstance(value, torch.fx.Node))


def returned_roots(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, int]:
    """Makers of the memory that the graph returns -> how many outputs live in it."""
    counts: dict[torch.fx.Node, int] = {}
    for node in output_nodes(gm):
        root = storage_root(node)
        counts[root] = counts.get(root, 0) + 1
    return counts
