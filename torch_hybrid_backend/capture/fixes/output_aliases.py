"""Outputs that share memory: the graph computes that memory once, and every call makes the views anew.

Enters: a functional graph whose outputs may be views of one another or of a common intermediate value (`y = x * 2; return y[1:], y.t()`; saved
activations of a forward graph are so too). Leaves: the same graph with one output for each such piece of memory, the value that allocated it,
and what makes the original outputs of its outputs. So a write to one of the results is seen through the others, as in eager, and
engines need not know of aliases.

Outputs that share memory with an input are made from the input: no engine copies what a view is of. AOTAutograd makes most of them once more,
with the offset that the graph's output has where sizes are symbols; where gradients flow, it leaves pieces of an input (`x.split(2)`) to the
forward graph. What is saved for backward is not made so: the input may be written to before. Nor are new values of inputs, nor gradients:
tangents may lie otherwise than they were traced.

Illegal: outputs that share memory with a lifted constant.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.fx.node import map_aggregate

from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.torch_private import HigherOrderOperator

# (the tensor viewed, the graph's outputs) -> the view
_Make = Callable[[torch.Tensor, Sequence[Any]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Output:
    """An argument of a view: the graph's output of that number, a size that is only known at run time."""

    position: int


@dataclass(frozen=True, slots=True)
class StridedView:
    """A view by numbers known now: `offset` elements behind the first one of the tensor viewed."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bits: LazyBits

    def __call__(self, tensor: torch.Tensor, _outputs: Sequence[Any]) -> torch.Tensor:
        return self.bits.view_of(tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset))


@dataclass(frozen=True, slots=True)
class AliasedResult:
    """An original output: the graph's output number `source`, or its input where `of_input`; seen through `make` where that is given."""

    source: int
    of_input: bool = False
    make: _Make | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Makes a graph's original outputs from those that it has now and from its inputs number `inputs`."""

    results: tuple[AliasedResult, ...]
    inputs: tuple[int, ...]

    def __call__(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """`inputs` are those that `self.inputs` names, in that order."""
        given = dict(zip(self.inputs, inputs, strict=True))
        sources = ((given if result.of_input else outputs)[result.source] for result in self.results)
        return [
            source if result.make is None else result.make(source, outputs)
            for result, source in zip(self.results, sources, strict=True)
        ]


def separate_aliases(graph_module: torch.fx.GraphModule, returned: range = range(0)) -> Restore | None:
    """Edits the graph's outputs in place; returns what makes the original ones, or None where nothing shares memory.

    `returned`: the outputs that the caller gets, and that may lie in inputs.
    """
    (output,) = graph_module.graph.find_nodes(op="output")
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    originals: tuple[Any, ...] = tuple(output.args[0])
    owners = _owners(graph_module)
    bases = [_base(result, owners, position in returned) for position, result in enumerate(originals)]
    shared = {b for b, uses in Counter(bases).items() if b is not None and (b.op == "placeholder" or uses > 1)}
    if not shared:
        return None
    kept: list[Any] = []
    position: dict[Node, int] = {}

    def keep(value: Any) -> int:
        if not isinstance(value, Node):
            kept.append(value)
            return len(kept) - 1
        if value not in position:
            position[value] = len(kept)
            kept.append(value)
        return position[value]

    results: list[AliasedResult] = []
    for original, base in zip(originals, bases, strict=True):
        if base not in shared or base is None:
            results.append(AliasedResult(keep(original)))
        elif base.op == "placeholder":
            results.append(AliasedResult(placeholders.index(base), True, _view(original, base, keep)))
        else:
            results.append(AliasedResult(keep(base), False, None if original is base else _view(original, base, keep)))
    output.args = (type(output.args[0])(kept),)
    graph_module.recompile()
    return Restore(tuple(results), tuple(sorted({result.source for result in results if result.of_input})))


def _base(result: object, owners: dict[Node, Node], is_returned: bool) -> Node | None:
    """The node whose memory an output is to be made from; None where it is an output of its own."""
    if not isinstance(result, Node) or result.op == "placeholder":
        return None
    owner = owners.get(result)
    return None if owner is None or (owner.op == "placeholder" and not is_returned) else owner


def _owners(graph_module: torch.fx.GraphModule) -> dict[Node, Node]:
    """For each node that can be made of it, the node that allocated its memory, or the placeholder that it lies in."""
    first: dict[int, Node] = {}
    owners: dict[Node, Node] = {}
    unknown: set[int] = set()
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        memory = value.untyped_storage()._cdata
        if node.target is operator.getitem and isinstance(node.args[0].target, HigherOrderOperator):
            # Two calls of one sub-graph (`invoke_subgraph`) carry the very same fake tensors: these say nothing of sharing.
            unknown.add(memory)
        if memory in unknown:
            continue
        owner = first.setdefault(memory, node)
        if owner.op in ("call_function", "placeholder") and (
            _is_strided(node, owner) or _steps(node, owner) is not None
        ):
            owners[node] = owner
    return owners


def _is_strided(node: Node, owner: Node) -> bool:
    """True if `as_strided` with numbers known now makes the node of its owner."""
    value, whole = node.meta["val"], owner.meta["val"]
    numbers = (n for tensor in (value, whole) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))
    return value.dtype == whole.dtype and all(isinstance(number, int) for number in numbers)


def _steps(node: Node, owner: Node) -> list[Node] | None:
    """The operators that lead from the owner to the node, each a view of the one before; None where they are not such."""
    steps: list[Node] = []
    while node is not owner:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            return None
        if any(not isinstance(n.meta.get("val"), int | torch.SymInt) for n in _nodes((node.args[1:], node.kwargs))):
            return None
        steps.append(node)
        node = node.args[0]
    return steps[::-1]


def _nodes(arguments: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg(arguments, found.append)
    return found


def _view(result: Node, source: Node, keep: Callable[[Any], int]) -> _Make:
    """Function that makes an output of its owner: `as_strided` with the bits that the output has, or the graph's views if sizes are symbols."""
    if _is_strided(result, source):
        value, whole = result.meta["val"], source.meta["val"]
        offset = value.storage_offset() - whole.storage_offset()
        return StridedView(tuple(value.shape), value.stride(), offset, LazyBits.of(value))
    steps = _steps(result, source)
    assert steps is not None  # or it would have no owner
    # Kept apart from the nodes: those that no output needs any more are erased, and lose their arguments.
    outputs_of = {node: _Output(keep(node)) for step in steps for node in _nodes((step.args[1:], step.kwargs))}

    def known_later(argument: Any) -> Any:
        return outputs_of[argument] if isinstance(argument, Node) else argument

    calls: list[tuple[Callable[..., Any], Any, Any]] = []
    for step in steps:
        assert callable(step.target)
        calls.append((step.target, map_aggregate(step.args[1:], known_later), map_aggregate(step.kwargs, known_later)))

    def make(tensor: torch.Tensor, outputs: Sequence[Any]) -> torch.Tensor:
        def known(argument: Any) -> Any:
            return outputs[argument.position] if isinstance(argument, _Output) else argument

        value: Any = tensor
        for target, args, kwargs in calls:
            value = target(value, *map_aggregate(args, known), **map_aggregate(kwargs, known))
        return value  # type: ignore[no-any-return]

    return make
