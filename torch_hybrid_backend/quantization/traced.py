"""Functions that Dynamo shows no mode, found in its graph.

While Dynamo traces, a mode is told of no function for which torch has no overrides: `torch.relu_` and all others that write in place and are
no methods, `functional.hardsigmoid`, kernels of Triton. Each is a node of the graph that Dynamo makes: the mode was told of none of the nodes
that are new between two functions that it was told of.

All functions here are called by Dynamo at the time of tracing, with constants, and their results are constants of the trace. In eager, where
modes are told of all functions, there is no graph, and they say so.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch.fx import Graph, Node

from torch_hybrid_backend.quantization.functions import (
    NEVER_NEGATIVE,
    Function,
    is_in_place,
    is_shown_by_dynamo,
    may_write,
    name_of,
)
from torch_hybrid_backend.torch_private import loaded_symbolic_convert


@dataclass(slots=True)
class _Seen:
    """Places in a graph that is being made: its last node that was looked at, and the last that may have written something negative."""

    last: Node | None = None
    written: Node | None = None


_SEEN: weakref.WeakKeyDictionary[Graph, _Seen] = weakref.WeakKeyDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def begins(function: Function) -> tuple[str, bool, bool]:
    """A function that a mode is told of is about to run: its name (`name_of`), whether one that no mode was told of may have written
    something negative since the last one, and whether Dynamo traces."""
    if not _is_tracing():
        return name_of(function), False, False
    graph = _graph()
    return name_of(function), graph is None or _look(graph), True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def ended(has_written: bool) -> bool:
    """True if a function that ran may have written something negative."""
    graph = _graph() if _is_tracing() else None
    if graph is not None:
        seen = _SEEN.setdefault(graph, _Seen())
        seen.last = _last(graph)
        if has_written:
            seen.written = seen.last
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def may_know_more() -> bool:
    """True if there may be a value that a function made of which no mode was told, and that cannot be negative: ask `is_never_negative`."""
    graph = _graph() if _is_tracing() else None
    if graph is None:
        return False
    seen = _SEEN.setdefault(graph, _Seen())
    return any(
        _yields_no_negative(node) for node in takewhile(lambda node: node is not seen.written, reversed(graph.nodes))
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_never_negative() -> bool:
    """True if the tensor that was detached last cannot be negative, as a function of which no mode was told has made it, or has written
    to it. (Tensors themselves are no constants: their nodes are found by that of a function of them.)"""
    graph = _graph() if _is_tracing() else None
    if graph is None:
        return False
    detached = _last(graph)
    if detached is None or detached.op != "call_method" or detached.target != "detach":
        return False
    (node,) = detached.all_input_nodes
    later = list(takewhile(lambda other: other is not _SEEN.setdefault(graph, _Seen()).written, reversed(graph.nodes)))
    if node in later and _yields_no_negative(node):
        return True
    return any(
        other.args[:1] == (node,) and _yields_no_negative(other) and _is_written_in_place(other) for other in later
    )


def _is_tracing() -> bool:
    """True if Dynamo traces in this thread; True where that cannot be told."""
    convert = loaded_symbolic_convert()
    if convert is None:
        return False
    current = getattr(getattr(convert, "InstructionTranslator", None), "current_tx", None)
    if current is None:
        return True
    try:
        return current() is not None
    except AttributeError:  # it is an attribute of the thread
        return False


def _graph() -> Graph | None:
    """The graph that Dynamo makes in this thread; None where it cannot be found: then nothing is known."""
    try:
        graph = loaded_symbolic_convert().InstructionTranslator.current_tx().output.graph
    except AttributeError:
        return None
    return graph if isinstance(graph, Graph) else None


def _last(graph: Graph) -> Node | None:
    return next(iter(reversed(graph.nodes)), None)


def _look(graph: Graph) -> bool:
    """True if nodes that are new to us may have written something negative."""
    seen = _SEEN.setdefault(graph, _Seen())
    # Where Dynamo has taken back the node that was the last one, all count as new.
    new = list(takewhile(lambda node: node is not seen.last, reversed(graph.nodes)))
    seen.last = _last(graph)
    written = next((node for node in new if _may_write(node)), None)
    seen.written = written or seen.written
    return written is not None


def _may_write(node: Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    name = _name(node)
    return may_write(name, node.args, node.kwargs) and not (is_in_place(name) and name[:-1] in NEVER_NEGATIVE)


def _name(node: Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return name_of(node.target) if node.op == "call_function" and callable(node.target) else ""


def _yields_no_negative(node: Node) -> bool:
    if node.op != "call_function" or not callable(node.target) or is_shown_by_dynamo(node.target):
        return False
    return name_of(node.target).removesuffix("_") in NEVER_NEGATIVE


def _is_written_in_place(node: Node) -> bool:
    inplace = node.args[1] if len(node.args) > 1 else node.kwargs.get("inplace")
    return is_in_place(_name(node)) or bool(inplace)
