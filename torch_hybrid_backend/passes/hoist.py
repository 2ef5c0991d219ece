"""Split of a graph into a `fold`, which depends on parameters alone, and a `main`, the rest.

`fold` computes folded weights, transposed views, masks and tables once, and again when a parameter changes. `main` runs in every call. Example:
`addmm(b, x, permute(w))` with constants b, w gives `fold(w) = (permute(w),)` and `main(b, x, permute) = addmm(b, x, permute)`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.hoisted_inputs import CallInput, FoldedValue, HoistedInputs
from torch_hybrid_backend.graph.quantized import KeepsPacked, is_dequantized, is_widened_scale, keeps_nothing
from torch_hybrid_backend.graph.schema import is_pure, is_view
from torch_hybrid_backend.graph.values import (
    has_mutation,
    output_nodes,
    returned_roots,
    storage_root,
)
from torch_hybrid_backend.passes.canonical.fold_constants import is_deterministic

aten = torch.ops.aten
Node = torch.fx.Node

# A folded value may be this many times as large as the constants from which it is computed ...
GROWTH_LIMIT = 4
# ... or this large in any case: a mask, a table of position biases.
SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Hoisted:
    """`main`: the graph that runs in every call. Its placeholders are those of the original graph, in order, without constants that it does not
    read directly, then the folded values. Constant placeholders carry `meta["constant"] = True`. `main` holds no get_attr tensor.

    `fold`: takes the constant placeholders that it needs, and returns a tuple of folded values, some of which may be views of its inputs. None
    if there is nothing to fold. `inputs`: how the two connect.
    """

    main: torch.fx.GraphModule
    fold: torch.fx.GraphModule | None
    inputs: HoistedInputs


def hoist(
    gm: torch.fx.GraphModule, constant_names: frozenset[str], keeps_packed: KeepsPacked = keeps_nothing
) -> Hoisted:
    """Split off the values that depend on `constant_names` (placeholders) and get_attr tensors alone. `gm` is not changed.

    These values stay in `main`:

    - random values and mutations
    - outputs, as each call must return fresh memory
    - values much larger than those from which they are computed
    - dequantized weights, and values computed from these
    - scales in half types converted to float32
    - `expand`, which costs nothing in a loop, and fills, which depend on nothing
    """
    movable = {} if has_mutation(gm) else _movable(gm, constant_names, keeps_packed)
    folded = _frontier(gm, movable)
    placeholders = gm.graph.find_nodes(op="placeholder")
    position = {node: k for k, node in enumerate(placeholders)}

    fold, fold_inputs = _fold_graph(gm, folded, placeholders)
    main, kept = _main_graph(gm, folded, constant_names, placeholders)
    sources: tuple[CallInput | FoldedValue, ...] = (
        *(CallInput(position[node]) for node in kept),
        *(FoldedValue(j) for j in range(len(folded))),
    )
    inputs = HoistedInputs(sources, tuple(position[node] for node in fold_inputs))
    return Hoisted(main, fold, inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a fold. `reads`: numbers of the fold's arguments that `graph` takes. `gives`: numbers of the fold's results that `graph`
    returns as a tuple. Both are in order. `is_view`: all results are views of arguments, or constants of the graph."""

    reads: tuple[int, ...]
    gives: tuple[int, ...]
    graph: torch.fx.GraphModule
    is_view: bool


def partition_fold(fold: torch.fx.GraphModule) -> list[Part]:
    """The fold as parts that share no work: one for views, one for small results, and one for each large result with those that share work."""
    placeholders = fold.graph.find_nodes(op="placeholder")
    work: dict[
        Node, set[Node]
    ] = {}  # what is computed of arguments for a node; one that views alone lead to has no work
    for node in fold.graph.nodes:
        is_work = node.op == "call_function" and node.all_input_nodes and not is_view(node)
        nodes_of_work = {node} if is_work else set[Node]()
        work[node] = nodes_of_work.union(*(work[source] for source in node.all_input_nodes))
    returned = tuple(output_nodes(fold))
    views = [number for number, node in enumerate(returned) if not work[node]]
    together: dict[Node, list[int]] = {}  # by each node that is computed, the numbers of all results that it leads to
    for number, node in enumerate(returned):
        met = {id(together[each]): together[each] for each in work[node] if each in together}
        numbers = sorted({number, *(n for each in met.values() for n in each)})
        for each in work[node].union(*(work[returned[n]] for n in numbers)):
            together[each] = numbers
    distinct = list({id(numbers): numbers for numbers in together.values()}.values())

    def is_small(numbers: list[int]) -> bool:
        return sum(_size_bytes(returned[n].meta.get("val")) or 0 for n in numbers) < SMALL_BYTES

    small = sorted(number for numbers in distinct if is_small(numbers) for number in numbers)
    parts = []
    for numbers in [views, small, *(numbers for numbers in distinct if not is_small(numbers))]:
        graph, arguments = _fold_graph(fold, [returned[number] for number in numbers], placeholders)
        if graph is not None:
            reads = tuple(placeholders.index(node) for node in arguments)
            parts.append(Part(reads, tuple(numbers), graph, numbers is views))
    return parts


def _size_bytes(value: Any) -> int | None:
    """Bytes of the tensor's elements; None where they are not known."""
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return value.numel() * value.itemsize


def _movable(gm: torch.fx.GraphModule, constant_names: frozenset[str], keeps_packed: KeepsPacked) -> dict[Node, int]:
    """Nodes that fold may compute -> bytes of the constants from which they are computed; 0 for fills and ranges."""
    returned = returned_roots(gm)
    movable: dict[Node, int] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            size = _size_bytes(node.meta.get("val"))
            if node.name in constant_names and size is not None:
                movable[node] = size
        elif node.op == "get_attr":
            size = _size_bytes(node.meta.get("val"))
            if size is not None:
                movable[node] = size
        elif (
            is_deterministic(node)
            and not is_dequantized(node, keeps_packed)
            and all(argument in movable for argument in node.all_input_nodes)
        ):
            source_bytes = sum(movable[argument] for argument in node.all_input_nodes)
            if storage_root(node) not in returned and _worthwhile(node, source_bytes):
                movable[node] = source_bytes
    return movable


def _worthwhile(node: Node, source_bytes: int) -> bool:
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return True  # each member is checked at its getitem
    size = _size_bytes(value)
    if size is None:
        return False
    return is_view(node) or size <= max(GROWTH_LIMIT * source_bytes, SMALL_BYTES)


def _frontier(gm: torch.fx.GraphModule, movable: dict[Node, int]) -> list[Node]:
    """The values that fold returns: those that main needs, in graph order.

    Walks backwards from the operators that main computes to their arguments. A movable argument is taken from fold, unless main had
    better compute the argument itself (fills, expands, scales in half types). Then the argument's own arguments are needed in turn.
    """
    in_main = {node for node in gm.graph.nodes if node not in movable}
    folded: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node not in movable or not any(user in in_main for user in node.users):
            continue
        value = node.meta.get("val")
        recompute = node.op == "call_function" and (
            movable[node] == 0
            or node.target is aten.expand.default
            or not isinstance(value, torch.Tensor)
            or is_widened_scale(node)
        )
        if recompute:
            in_main.add(node)
        elif node.op != "placeholder":
            folded.add(node)
    return [node for node in gm.graph.nodes if node in folded]


def _needed(targets: list[Node], stop: set[Node]) -> set[Node]:
    """The targets and all nodes that they depend on; the inputs of `stop` nodes are not followed."""
    needed: set[Node] = set()
    pending = list(targets)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            if node not in stop:
                pending.extend(node.all_input_nodes)
    return needed


def _fold_graph(
    gm: torch.fx.GraphModule, folded: list[Node], placeholders: list[Node]
) -> tuple[torch.fx.GraphModule | None, list[Node]]:
    if not folded:
        return None, []
    needed = _needed(folded, set())
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in folded))
    fold = torch.fx.GraphModule(_attributes(gm, graph), graph, "Fold")
    return fold, [node for node in placeholders if node in needed]


def _main_graph(
    gm: torch.fx.GraphModule, folded: list[Node], constant_names: frozenset[str], placeholders: list[Node]
) -> tuple[torch.fx.GraphModule, list[Node]]:
    effects = [node for node in gm.graph.nodes if node.op in ("call_function", "output") and not is_pure(node)]
    needed = _needed(effects, set(folded))
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    kept = [node for node in placeholders if node in needed or node.name not in constant_names]
    for node in (*kept, *folded):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        if node in folded or node.name in constant_names:
            copies[node].meta["constant"] = True
    for node in gm.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return torch.fx.GraphModule(_attributes(gm, graph), graph, "Main"), kept


def _attributes(gm: torch.fx.GraphModule, graph: torch.fx.Graph) -> torch.nn.Module:
    """The get_attr targets that the graph uses, shared with `gm`."""
    used = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    root = torch.nn.Module()
    for name in used:
        value = operator.attrgetter(name)(gm)
        flat = name.replace(".", "_")
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            root.register_buffer(flat, value, persistent=False)
        else:
            setattr(root, flat, value)
        for node in graph.find_nodes(op="get_attr"):
            if str(node.target) == name:
                node.target = flat
    return root
