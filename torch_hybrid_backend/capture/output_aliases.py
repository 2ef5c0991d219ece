"""Outputs that share memory: the graph computes that memory once, and every call makes the views anew.

Enters: a functional graph whose outputs may be views of one another or of a common intermediate value (`y = x * 2; return y[1:], y.t()`; saved
activations of a forward graph are so too). Leaves: the same graph with one output for each such piece of memory, the value that allocated it,
and a function that makes the original outputs of its outputs. So a write to one of the results is seen through the others, as in eager, and
engines need not know of aliases.

Illegal: outputs that share memory with a placeholder or a lifted constant; AOTAutograd handles the former, and they are left alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

Restore = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class _View:
    """An output made from output number `source` of the graph: itself where `size` is None. `offset` counts from the source's first element."""

    source: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


def separate_aliases(graph_module: torch.fx.GraphModule) -> Restore | None:
    """Edits the graph's outputs in place; returns what makes the original ones, or None where nothing shares memory.

    Views of symbolic sizes, and those of another dtype than the memory they lie in, stay outputs of their own.
    """
    (output,) = graph_module.graph.find_nodes(op="output")
    results: tuple[Any, ...] = tuple(output.args[0])
    owners = _owners(graph_module)
    shared = _shared_owners(results, owners)
    if not shared:
        return None
    kept: list[Any] = []
    position: dict[Node, int] = {}
    views: list[_View] = []
    for result in results:
        owner = owners.get(result) if isinstance(result, Node) else None
        source = owner if owner in shared else result
        if not isinstance(source, Node) or source not in position:
            kept.append(source)
            views.append(_view(result, source, len(kept) - 1))
            if isinstance(source, Node):
                position[source] = len(kept) - 1
        else:
            views.append(_view(result, source, position[source]))
    output.args = (type(output.args[0])(kept),)
    graph_module.recompile()
    return lambda outputs: _restored(views, outputs)


def _owners(graph_module: torch.fx.GraphModule) -> dict[Node, Node]:
    """For each node that can be made of it by `as_strided`, the node that allocated its memory."""
    first: dict[int, Node] = {}
    owners: dict[Node, Node] = {}
    unknown: set[int] = set()
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        memory = value.untyped_storage()._cdata
        if node.target is operator.getitem and isinstance(node.args[0].target, torch._ops.HigherOrderOperator):
            # Two calls of one sub-graph (`invoke_subgraph`) carry the very same fake tensors: these say nothing of sharing.
            unknown.add(memory)
        if memory in unknown:
            continue
        owner = first.setdefault(memory, node)
        whole = owner.meta["val"]
        if owner.op == "call_function" and value.dtype == whole.dtype and _is_static(value) and _is_static(whole):
            owners[node] = owner
    return owners


def _is_static(value: torch.Tensor) -> bool:
    return all(isinstance(number, int) for number in (*value.shape, *value.stride(), value.storage_offset()))


def _shared_owners(results: Sequence[Any], owners: dict[Node, Node]) -> set[Node]:
    """Owners of the memory that several outputs lie in."""
    seen: set[Node] = set()
    shared: set[Node] = set()
    for result in results:
        owner = owners.get(result) if isinstance(result, Node) else None
        if owner is not None:
            (shared if owner in seen else seen).add(owner)
    return shared


def _view(result: Any, source: Any, position: int) -> _View:
    if result is source:
        return _View(position)
    value, whole = result.meta["val"], source.meta["val"]
    return _View(position, tuple(value.shape), value.stride(), value.storage_offset() - whole.storage_offset())


def _restored(views: Sequence[_View], outputs: Sequence[Any]) -> list[Any]:
    return [
        outputs[view.source]
        if view.size is None
        else outputs[view.source].as_strided(
            view.size, view.stride, outputs[view.source].storage_offset() + view.offset
        )
        for view in views
    ]
