"""What must run before what, in a graph of ATen operators.

Besides the wires there are edges no wire shows. Operators with effects (in-place writes such as the `copy_` epilogues
that AOTAutograd appends, random numbers, assertions) keep their order among each other; and an in-place write waits
for every earlier reader of the memory it writes, be it through views, and precedes every later one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.fx
from torch.fx import Node


@dataclass(frozen=True, slots=True)
class Dependencies:
    """`operators` in graph order; `before[i]` are the positions of those that must run before operator i (each < i).
    `ordered[i]` says that operator i has effects."""

    operators: tuple[Node, ...]
    before: tuple[tuple[int, ...], ...]
    ordered: tuple[bool, ...]


def is_operator(node: Node) -> bool:
    """Whether the node must be run by some segment. A get_attr counts only where the graph returns it directly;
    otherwise each segment that reads the constant has its own copy of the node."""
    if node.op == "get_attr":
        return any(user.op == "output" for user in node.users)
    return node.op not in ("placeholder", "output")


def is_item(node: Node) -> bool:
    """Whether the node picks one output of an operator with several."""
    return node.op == "call_function" and node.target is operator.getitem


def is_view(node: Node) -> bool:
    """Whether the node yields its input's memory and computes nothing."""
    return isinstance(node.target, torch._ops.OpOverload) and _effects(node.target).views


def has_effects(node: Node) -> bool:
    """Whether the node does more than compute its value: writes to an input, draws random numbers, asserts."""
    if isinstance(node.target, torch._ops.OpOverload):
        effects = _effects(node.target)
        return effects.ordered and not (effects.dropout_only and _argument(node, "dropout_p", 0.0) == 0)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True  # it may hide anything; none of them is worth reordering
    return node.op in ("call_module", "call_method")


def writes(node: Node) -> bool:
    """Whether the node writes to one of its inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(_effects(node.target).written)


@dataclass(frozen=True, slots=True)
class _Effects:
    written: tuple[tuple[int, str], ...]  # position and name of the arguments written to
    aliased: tuple[tuple[int, str], ...]  # of those whose memory an output may share
    ordered: bool
    views: bool
    dropout_only: bool  # ordered for its dropout alone: without it, attention is a function of its inputs


@functools.cache
def _effects(target: torch._ops.OpOverload) -> _Effects:
    arguments = list(enumerate(target._schema.arguments))
    written = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    shares = any(result.alias_info is not None for result in target._schema.returns)
    aliased = tuple((i, a.name) for i, a in arguments if a.alias_info is not None) if shares else ()
    if target is torch.ops.aten._unsafe_view.default:  # its schema hides that it shares memory
        aliased = ((0, "self"),)
    random = torch.Tag.nondeterministic_seeded in target.tags
    # An operator without results is there for its effect (assertions, prints).
    ordered = bool(written) or random or not target._schema.returns
    dropout_only = random and not written and any(a.name == "dropout_p" for _, a in arguments)
    return _Effects(written, aliased, ordered, views=bool(aliased) and not written, dropout_only=dropout_only)


def _argument(node: Node, name: str, default: object) -> object:
    """The value of one of the operator's arguments, wherever it is given."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, torch._ops.OpOverload)
    position = next(i for i, a in enumerate(node.target._schema.arguments) if a.name == name)
    return node.args[position] if position < len(node.args) else default


def _nodes(value: object) -> Iterable[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes(item)


def _argument_nodes(node: Node, arguments: tuple[tuple[int, str], ...]) -> list[Node]:
    found: list[Node] = []
    for position, name in arguments:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        found.extend(_nodes(value))
    return found


def _shared_with(node: Node) -> Sequence[Node]:
    """The inputs whose memory the node's value may share."""
    if isinstance(node.target, torch._ops.OpOverload):
        return _argument_nodes(node, _effects(node.target).aliased)
    if is_item(node) or isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.all_input_nodes
    return ()


def dependencies(graph: torch.fx.Graph) -> Dependencies:
    """The dependencies of the graph's operators. Linear in nodes and wires: a write clears the readers it waited
    for."""
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
        if writes(node):
            for target in _argument_nodes(node, _effects(node.target).written):
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
