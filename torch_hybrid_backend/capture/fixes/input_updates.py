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

from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.graph.values import storage_root
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

# An operator that returns its first argument with some elements replaced -> the same in place.
_IN_PLACE = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.scatter.src: aten.scatter_.src,
}
# (tensors, writes): `target.index_copy_(dim, index, source)` for each (target, dim, index, source), all but `dim` positions in `tensors`.
WriteRows = Callable[[list[Any], Sequence[tuple[int, int, int, int]]], None]
# A whole input written by one kernel costs less than so large a part of it written by an operator of its own.
_LARGEST_PART = 1 / 4


@dataclass(frozen=True, slots=True)
class Given:
    """An argument of a write: an output of the graph, or one of its inputs."""

    position: int
    is_input: bool


@dataclass(frozen=True, slots=True)
class Write:
    """`operator(inputs[target], *args)`. `rows`: the dimension, index and source of one that writes whole slices."""

    target: int
    operator: OpOverload
    args: tuple[Any, ...]
    rows: tuple[int, Given, Given] | None = None


@dataclass(frozen=True, slots=True)
class InPlace:
    """Makes a graph's original outputs from those that it has now: `results` are the writes, and numbers of outputs that are as they were."""

    results: tuple[Write | int, ...]
    inputs: tuple[int, ...]

    def restorer(self, write_rows: WriteRows | None = None) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
        """Function of a call's outputs and of the inputs that `self.inputs` names, in that order.

        `write_rows` writes all slices at once; None: operators do.
        """
        first = len(self.inputs)
        writes = [result for result in self.results if isinstance(result, Write)]

        def place(given: Given) -> int:
            return self.inputs.index(given.position) if given.is_input else first + given.position

        rows = [
            (self.inputs.index(write.target), write.rows[0], place(write.rows[1]), place(write.rows[2]))
            for write in writes
            if write.rows is not None and write_rows is not None
        ]
        others = [write for write in writes if write.rows is None or write_rows is None]
        sources = [
            self.inputs.index(result.target) if isinstance(result, Write) else first + result for result in self.results
        ]

        def restore(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
            values = [*inputs, *outputs]
            if rows and write_rows is not None:
                write_rows(values, rows)
            for write in others:
                arguments = map_aggregate(
                    write.args, lambda each: values[place(each)] if isinstance(each, Given) else each
                )
                write.operator(inputs[self.inputs.index(write.target)], *arguments)
            return [values[source] for source in sources]

        return restore


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

        rows = written_rows(update)
        return Write(
            target,
            _IN_PLACE[update.target],  # type: ignore[index]
            map_aggregate(update.args[1:], argument),
            (rows[0], given(rows[1]), given(rows[2]))
            if rows is not None and _are_plain(update.args[0], *rows[1:])
            else None,
        )

    results = tuple(
        write(value, targets[number]) if number in targets else next(numbers) for number, value in enumerate(originals)
    )
    output.args = (type(output.args[0])(kept),)
    graph_module.recompile()
    read = {part.position for r in results if isinstance(r, Write) for part in _givens(r.args) if part.is_input}
    return InPlace(results, tuple(sorted(read | set(targets.values()))))


def written_rows(update: Node) -> tuple[int, Any, Any] | None:
    """The dimension, the positions and the slices of an update that writes whole slices along one dimension; None for another one."""
    arguments: Any = update.args
    if update.target is aten.index_copy.default:
        _, dim, index, source = arguments
    elif update.target is aten.index_put.default and len(arguments) == 3:
        _, indices, source = arguments
        dims = [dim for dim, index in enumerate(indices) if index is not None]
        if len(dims) != 1:
            return None
        dim, index = dims[0], indices[dims[0]]
    else:
        return None
    value, positions, slices = (node.meta["val"] for node in (update, index, source))
    dim %= max(value.dim(), 1)
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


def _are_plain(target: Any, *others: Node) -> bool:
    """True if memory holds what the tensors are, without lazy bits, and each element of the target is at a place of its own."""
    values: list[torch.Tensor] = [node.meta["val"] for node in (target, *others)]
    strides = sorted(
        (stride, size) for stride, size in zip(values[0].stride(), values[0].shape, strict=True) if size > 1
    )
    end = 1
    for stride, size in strides:
        if stride < end:
            return False
        end = stride * (size - 1) + end
    return not any(LazyBits.of(value) for value in values)


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
