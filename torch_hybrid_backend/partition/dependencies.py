"""Order in which operators must run, in a graph of ATen operators.

Besides the edges of the graph there are hidden ones. Operators with effects keep their order among each other: in-place writes such as the
`copy_` epilogues that AOTAutograd appends, random numbers, assertions, collectives. An in-place write waits for every earlier reader of the
memory that it writes, also through views, and precedes every later reader. Waiting for a collective counts as a write: a later reader of
the memory may not be moved before the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.graph.schema import has_effects, is_item, shared_arguments, written_arguments
from torch_hybrid_backend.torch_private import HigherOrderOperator


@dataclass(frozen=True, slots=True)
class Dependencies:
    """`operators` in graph order. `before[i]`: positions of the operators that must run before operator i (each < i).
    `ordered[i]`: true if operator i has effects."""

    operators: tuple[Node, ...]
    before: tuple[tuple[int, ...], ...]
    ordered: tuple[bool, ...]


def is_operator(node: Node) -> bool:
    """True if the node must be run by some segment. A get_attr counts only if the graph returns it directly;
    each segment that reads the constant has its own copy of the node."""
    if node.op == "get_attr":
        return any(user.op == "output" for user in node.users)
    return node.op not in ("placeholder", "output")


def _shared_with(node: Node) -> Sequence[Node]:
    """The inputs whose memory the node's value may share."""
    if is_item(node) or isinstance(node.target, HigherOrderOperator):
        return node.all_input_nodes
    return shared_arguments(node)


def dependencies(graph: torch.fx.Graph) -> Dependencies:
    """The dependencies of the graph's operators. Linear in nodes and edges: a write clears the readers that it waited for."""
    operators = tuple(node for node in graph.nodes if is_operator(node))
    position = {node: i for i, node in enumerate(operators)}
    memory: dict[Node, frozenset[Node]] = {}  # the nodes that own the memory a value may live in
    readers: dict[Node, list[int]] = {}  # owner -> operators that read it since it was last written
    writer: dict[Node, int] = {}  # owner -> the operator that last wrote it
    before: list[tuple[int, ...]] = []
    ordered: list[bool] = []
    last_ordered = -1

    def owners(node: Node) -> frozenset[Node]:
        return memory.get(node, frozenset((node,)))

    for i, node in enumerate(operators):
        needed = {position[source] for source in node.all_input_nodes if source in position}
        for owner in frozenset().union(*(owners(source) for source in node.all_input_nodes)):
            if owner in writer:
                needed.add(writer[owner])
            readers.setdefault(owner, []).append(i)
        ordered.append(has_effects(node))
        if ordered[-1]:
            needed.add(last_ordered)
            last_ordered = i
        for target in written_arguments(node):
            for owner in owners(target):
                needed.update(readers.get(owner, ()))
                readers[owner] = [i]
                writer[owner] = i
        shared = _shared_with(node)
        if shared:
            memory[node] = frozenset().union(*(owners(source) for source in shared))
        needed -= {-1, i}
        before.append(tuple(sorted(needed)))
    return Dependencies(operators, tuple(before), tuple(ordered))
