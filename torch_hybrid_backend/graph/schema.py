"""Effects of a node beside computing a value: the one home of views, effects, writes and random numbers.

Everything is read off the operators' schemas (writes, aliases) and tags (random numbers), so that an operator nobody here has heard of is
classed rightly. Two things no schema tells:

- Collectives (`_c10d_functional.all_reduce`, say) look like functions of their tensors, but every rank must issue the same ones in the
  same order, as often as the program says: they are ordered effects. torch itself marks only the wait and point-to-point as such.
- What starts a collective returns memory that is still being written. `wait_tensor` returns the same memory, complete: here it writes to
  its argument, and whatever reads that memory keeps its place before or after it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from torch_hybrid_backend.torch_private import HigherOrderOperator, OpOverload

_COLLECTIVES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem", "fsdp"}
)
_WAITS = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
# Operators whose results have to be waited for; the others are done when they return.
_ASYNCHRONOUS = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"})
# Operator -> the argument that it returns, though its schema hides it.
_HIDDEN_SHARES = {"aten::_unsafe_view": "self"}
# Operator -> the argument that it fills and returns, though its schema hides it.
_HIDDEN_WRITES = {
    "_c10d_functional::wait_tensor": "tensor",
    "c10d_functional::wait_tensor": "self",
    "_c10d_functional::irecv": "tensor",
    "c10d_functional::irecv": "self",
    "_c10d_functional::batch_p2p_ops": "tensors",
    "c10d_functional::batch_p2p_ops": "tensors",
}
_DROPOUT = ("dropout_p", "dropout")
_NUMBERS = torch.SymInt | torch.SymFloat | torch.SymBool | int | float


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of an operator by its schema, its tags and the tables above. Arguments are (position, name)."""

    written: tuple[tuple[int, str], ...]
    shared: tuple[tuple[int, str], ...]  # those in whose memory a result may lie
    is_random: bool
    is_collective: bool
    is_wait: bool
    is_asynchronous: bool
    # The probability of dropout, for which alone attention and recurrent layers are random; "" of other operators.
    dropout: str
    # An operator without results is there for its effect (assertions, prints).
    returns_nothing: bool


@functools.cache
def _facts(target: OpOverload) -> _Facts:
    schema = target._schema
    arguments = [(i, argument.name, argument.alias_info) for i, argument in enumerate(schema.arguments)]
    hidden = _HIDDEN_WRITES.get(schema.name)
    hidden_shares = (_HIDDEN_SHARES.get(schema.name), hidden)
    aliases = any(result.alias_info is not None for result in schema.returns)
    names = {name for _, name, _ in arguments}
    written = tuple((i, name) for i, name, alias in arguments if (alias and alias.is_write) or name == hidden)
    return _Facts(
        written=written,
        shared=tuple((i, name) for i, name, alias in arguments if (alias and aliases) or name in hidden_shares),
        is_random=is_random(target),
        # Other libraries' collectives are told by the group that they are given.
        is_collective=target.namespace in _COLLECTIVES or "group_name" in names,
        is_wait=schema.name in _WAITS,
        is_asynchronous=target.namespace in _ASYNCHRONOUS and schema.name not in _WAITS,
        dropout=next((name for name in _DROPOUT if name in names), "") if is_random(target) and not written else "",
        returns_nothing=not schema.returns,
    )


def _facts_of(node: Node) -> _Facts | None:
    """The facts of the ATen-style operator that the node calls, or of the one that a higher-order operator calls for it
    (`auto_functionalized`, `with_effects`)."""
    if isinstance(node.target, OpOverload):
        return _facts(node.target)
    if isinstance(node.target, HigherOrderOperator):
        return next((_facts(a) for a in node.args if isinstance(a, OpOverload)), None)
    return None


def is_item(node: Node) -> bool:
    """True if the node picks one output of an operator with several."""
    return node.op == "call_function" and node.target is operator.getitem


def is_random(target: object) -> bool:
    """True if an operator, a node's target, draws from a random generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_mutating(node: Node) -> bool:
    """True if the node writes to one of its arguments. Waiting for a collective does not count: it changes no value that may be
    read before."""
    if not isinstance(node.target, OpOverload):
        return False
    facts = _facts(node.target)
    return bool(facts.written) and not facts.is_wait


def is_view(node: Node) -> bool:
    """True if the node yields an argument's memory, and does nothing."""
    if not isinstance(node.target, OpOverload):
        return False
    facts = _facts(node.target)
    return bool(facts.shared) and not facts.written and not facts.is_collective


def is_collective(node: Node) -> bool:
    """True if the node is a step of a computation with other processes: starts, finishes or waits for a collective or a message."""
    facts = _facts_of(node)
    return facts is not None and facts.is_collective


def is_wait(node: Node) -> bool:
    """True if the node waits for a collective that another node started."""
    facts = _facts_of(node)
    return facts is not None and facts.is_wait


def group_of(node: Node) -> str | None:
    """The name of the process group of a collective; None if the node does not tell it."""
    group = _argument(node, "group_name", None) if isinstance(node.target, OpOverload) else None
    return group if isinstance(group, str) else None


def is_in_flight(node: Node) -> bool:
    """True if the node's value may still be written by a collective, so that nothing but views and the wait may touch it."""
    pending = [node]
    while pending:
        value = pending.pop()
        facts = _facts_of(value)
        if facts is None or not facts.is_collective:
            pending.extend(value.all_input_nodes if is_item(value) else shared_arguments(value))
        elif facts.is_asynchronous:
            return True
    return False


def has_effects(node: Node) -> bool:
    """True if the node does more than compute its value: writes to an argument, draws random numbers, asserts, works with other
    processes. Such nodes run as often as the graph says, in its order.

    Of what is no ATen-style operator only tuple access and arithmetic on sizes have none; higher-order operators may hide anything.
    """
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    target = node.target
    if isinstance(target, OpOverload):
        facts = _facts(target)
        if facts.dropout and _argument(node, facts.dropout, 0.0) == 0:
            return False
        if facts.dropout == "dropout" and not _argument(node, "train", True):
            return False  # of recurrent layers, which have both
        ordered = facts.written or facts.is_random or facts.is_collective or facts.returns_nothing
        return bool(ordered) or node.is_impure()  # impure: programs may declare effects to torch
    if isinstance(target, HigherOrderOperator):
        return True
    return not (is_item(node) or isinstance(node.meta.get("val"), _NUMBERS))


# The operators of control flow whose bodies are functional graphs that eager calls with plain tensors.
CONTROL_FLOW = frozenset({"cond", "while_loop", "while_loop_stack_output", "scan", "map_impl", "invoke_subgraph"})


def is_control_flow(node: Node) -> bool:
    """True if the node runs graphs as often as its operands say."""
    return isinstance(node.target, HigherOrderOperator) and node.target._name in CONTROL_FLOW


def only_draws(node: Node) -> bool:
    """True if drawing random numbers is all that the node does beside computing its value."""
    if not (is_random(node.target) and isinstance(node.target, OpOverload)) or node.op != "call_function":
        return False
    facts = _facts(node.target)
    return not (facts.written or facts.is_collective or facts.returns_nothing)


def draws(node: Node) -> bool:
    """True if drawing random numbers is the node's effect: attention and recurrent layers draw where they have dropout only."""
    return only_draws(node) and has_effects(node)


def draws_numbers(gm: torch.fx.GraphModule) -> bool:
    """True if the graph draws random numbers."""
    return any(map(draws, gm.graph.nodes))


def is_pure(node: Node) -> bool:
    """True if the node may be merged with its like, moved, or dropped when unused: a deterministic function of its arguments."""
    return node.op in ("get_attr", "call_function") and not has_effects(node)


def written_arguments(node: Node) -> list[Node]:
    """The arguments whose contents the node changes or, as `wait_tensor`, completes."""
    return _arguments(node, _facts(node.target).written) if isinstance(node.target, OpOverload) else []


def shared_arguments(node: Node) -> list[Node]:
    """The arguments in whose memory the operator's result may lie."""
    return _arguments(node, _facts(node.target).shared) if isinstance(node.target, OpOverload) else []


def _arguments(node: Node, wanted: tuple[tuple[int, str], ...]) -> list[Node]:
    return [
        found
        for position, name in wanted
        for found in _nodes(node.args[position] if position < len(node.args) else node.kwargs.get(name))
    ]


def _argument(node: Node, name: str, default: object) -> object:
    """The value of one of the operator's arguments, wherever it is given."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, OpOverload)
    position = next(i for i, argument in enumerate(node.target._schema.arguments) if argument.name == name)
    return node.args[position] if position < len(node.args) else default


def _nodes(value: object) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes(item)
