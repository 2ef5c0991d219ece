"""Inputs of which a graph changes a few elements: they are changed in place, not copied whole.

Enters: a functional graph whose first outputs are the new values of inputs that the user's code mutates; AOTAutograd's wrapper copies each onto
its input. For one new position of a KV cache that is the whole cache written twice in every call. Leaves: the same graph with, in place of
such a value, what is written and where; and what writes it to the input after the graph has run. The input itself then stands for its new
value, and a copy of a tensor onto itself is none.

    keys = index_put(cache, [None, None, at], new); return keys, attention(q, keys)    ->    return at, new, attention(q, keys)

Illegal: writes before all of the graph has run; the graph computes with the inputs as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.fx.node import map_aggregate

from torch_hybrid_backend.graph.values import storage_root
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

# An operator that returns its first argument with some elements replaced -> the same in place.
_IN_PLACE = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.scatter.src: aten.scatter_.src,
}
# A whole input written by one kernel costs less than so large a part of it written by an operator of its own.
_LARGEST_PART = 1 / 4


@dataclass(frozen=True, slots=True)
class Given:
    """An argument of a write: an output of the graph, or one of its inputs."""

    position: int
    is_input: bool


@dataclass(frozen=True, slots=True)
class Write:
    """`operator(inputs[target], *args)`."""

    target: int
    operator: OpOverload
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class InPlace:
    """Makes a graph's original outputs from those that it has now: `results` are the writes, and numbers of outputs that are as they were."""

    results: tuple[Write | int, ...]
    inputs: tuple[int, ...]

    def __call__(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """`inputs` are those that `self.inputs` names, in that order."""
        held = dict(zip(self.inputs, inputs, strict=True))

        def given(argument: Any) -> Any:
            if not isinstance(argument, Given):
                return argument
            return (held if argument.is_input else outputs)[argument.position]

        restored: list[Any] = []
        for result in self.results:
            if isinstance(result, Write):
                restored.append(result.operator(held[result.target], *map_aggregate(result.args, given)))
            else:
                restored.append(outputs[result])
        return restored


def write_in_place(
    graph_module: torch.fx.GraphModule, mutated: Sequence[int], may_write: Callable[[Node], bool] = lambda _: True
) -> InPlace | None:
    """Edits the graph's outputs in place; returns what writes and makes the original ones, or None where there is nothing to write so.

    `mutated`: positions of the inputs whose new values are the graph's first outputs, in that order. `may_write`: asked of each update.
    """
    (output,) = graph_module.graph.find_nodes(op="output")
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    originals: tuple[Any, ...] = tuple(output.args[0])
    written = {node for position, node in enumerate(placeholders) if position in mutated}
    targets = {
        number: position
        for number, (value, position) in enumerate(zip(originals, mutated, strict=False))
        if position < len(placeholders) and _is_update(value, placeholders[position]) and may_write(value)
    }
    if not targets:
        return None
    copies: dict[Node, Node] = {}
    kept = [value for number, value in enumerate(originals) if number not in targets]
    numbers = iter(range(len(kept)))

    def given(node: Node) -> Given:
        if node.op == "placeholder" and node not in written:
            return Given(placeholders.index(node), True)
        if storage_root(node) is not node or node.op != "call_function":
            # Memory of its own: an input may be written to before, and passes may merge what a view is of.
            node = copies.get(node) or copies.setdefault(node, _copied(node, output))
        if node not in kept:
            kept.append(node)
        return Given(kept.index(node), False)

    def write(update: Node, target: int) -> Write:
        def argument(value: Any) -> Any:
            return given(value) if isinstance(value, Node) else value

        return Write(target, _IN_PLACE[update.target], map_aggregate(update.args[1:], argument))  # type: ignore[index]

    results = tuple(
        write(value, targets[number]) if number in targets else next(numbers) for number, value in enumerate(originals)
    )
    output.args = (type(output.args[0])(kept),)
    graph_module.recompile()
    read = {part.position for r in results if isinstance(r, Write) for part in _givens(r.args) if part.is_input}
    return InPlace(results, tuple(sorted(read | set(targets.values()))))


def written_rows(update: Node) -> tuple[int, Any, Any] | None:
    """The dimension, the positions and the slices of an update that writes whole slices along one dimension; None for another one."""
    if update.target is aten.index_copy.default:
        _, dim, index, source = update.args
    elif update.target is aten.index_put.default and len(update.args) == 3:
        _, indices, source = update.args
        dims = [dim for dim, index in enumerate(indices) if index is not None]  # type: ignore[arg-type, union-attr]
        if len(dims) != 1:
            return None
        dim, index = dims[0], indices[dims[0]]  # type: ignore[index]
    else:
        return None
    value, positions, slices = (node.meta["val"] for node in (update, index, source))  # type: ignore[union-attr]
    dim = dim % max(value.dim(), 1)  # type: ignore[operator]
    shape = [*value.shape[:dim], *positions.shape, *value.shape[dim + 1 :]]
    is_plain = positions.dtype == torch.int64 and positions.dim() == 1 and slices.dtype == value.dtype
    missing = [1] * (len(shape) - slices.dim())  # `index_put` expands what it writes
    return (dim, index, source) if is_plain and [*missing, *slices.shape] == shape else None


def _is_update(value: Any, target: Node) -> bool:
    """True if an output is `target` with a small part replaced."""
    if not isinstance(value, Node) or value.target not in _IN_PLACE or value.args[0] is not target or value.kwargs:
        return False
    arguments = [node for node in value.all_input_nodes if node is not target]
    if not all(_is_known(node) for node in (target, *arguments)):
        return False
    most = target.meta["val"].numel() * _LARGEST_PART
    return all(node.meta["val"].numel() <= most for node in arguments)


def _copied(node: Node, before: Node) -> Node:
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    value: torch.Tensor = node.meta["val"]
    copy.meta = {**node.meta, "val": value.clone(memory_format=torch.contiguous_format)}
    return copy


def _is_known(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _givens(args: Any) -> list[Given]:
    found: list[Given] = []

    def collect(argument: Any) -> Any:
        if isinstance(argument, Given):
            found.append(argument)
        return argument

    map_aggregate(args, collect)
    return found
