"""Facts of values that a whole graph tells: which are returned, whose memory they live in, which follow from constants alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.graph.schema import (
    is_collective,
    is_control_flow,
    is_item,
    is_mutating,
    is_pure,
    is_view,
    shared_arguments,
)
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

# The operators of torch.ao that quantise and dequantise; they exist once `torch.ao.quantization.fx._decomposed` is imported.
QUANTIZED = "quantized_decomposed"
_OF_PYTORCH = frozenset({"aten", "prims", QUANTIZED})
_CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
_BYTES = frozenset({torch.int8, torch.uint8})
_HALVES = frozenset({torch.bfloat16, torch.float16})
# What graphs that write dequantisation out do with integers.
_ARITHMETIC = _CASTS | {aten.sub.Tensor, aten.sub.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten._int_mm.default}
# Products -> which argument is the weight, (K, N), of `linear` (N, K). Rows, (M, K), are the one before it.
PRODUCTS: Mapping[object, int] = {aten.mm.default: 1, aten.addmm.default: 2, aten.linear.default: 1}
# Fewer weights come from memory in 2 us, at 30 GB/s, in float32: less than a kernel takes to begin.
_LEAST_LOOKED_UP = 1 << 14
# Operators each of whose results is one of the elements of their first tensor.
_CHOOSING = frozenset(
    {
        aten.clone.default,
        aten.cat.default,
        aten.relu.default,
        aten.constant_pad_nd.default,
        aten.max_pool2d_with_indices.default,
    }
)
_KEEPING_WHOLE = frozenset({aten.add.Tensor, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default})


def outputs_of(gm: torch.fx.GraphModule) -> tuple[object, ...]:
    """The graph's outputs in order: nodes and literals."""
    (returned,) = gm.graph.output_node().args
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def output_nodes(gm: torch.fx.GraphModule) -> Iterator[Node]:
    """The nodes among the graph's outputs, in order, repeated where the graph returns one twice."""
    return (value for value in outputs_of(gm) if isinstance(value, Node))


def storage_root(node: Node) -> Node:
    """The node that made the memory which this node's value lives in: itself, unless it is a view or writes in place."""
    while True:
        if is_item(node):
            base = node.all_input_nodes[0]
            shared = [base] if is_view(base) else []
        else:
            shared = shared_arguments(node)
        if not shared:
            return node
        node = shared[0]


def returned_roots(gm: torch.fx.GraphModule) -> dict[Node, int]:
    """Makers of the memory that the graph returns -> how many outputs live in it."""
    counts: dict[Node, int] = {}
    for node in output_nodes(gm):
        root = storage_root(node)
        counts[root] = counts.get(root, 0) + 1
    return counts


def has_mutation(gm: torch.fx.GraphModule) -> bool:
    """True if any node of the graph writes to an argument: values are then not only what their expression says."""
    return any(is_mutating(node) for node in gm.graph.nodes)


def is_dequantized(node: Node) -> bool:
    """True if the node makes wide numbers of narrow ones that stand for them: an operator that dequantises, or integers of 8 bits cast to a
    wider dtype, as graphs do that write the arithmetic out; or values that those integers say the places of (`is_looked_up`). Wider integers
    that nobody computes with are places in another table.

    Such values, and what is made of them, are computed where they are read: made ahead they would take four times the memory, and hide
    from engines that a product is one of integers.
    """
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload):
        return False
    if target.namespace == QUANTIZED:
        return target._schema.name.startswith(f"{QUANTIZED}::dequantize")
    if target is aten.index_select.default:
        return is_looked_up(node)
    if target not in _CASTS or not isinstance(value, torch.Tensor):
        return False
    source = node.args[0] if node.args else None
    narrow = source.meta["val"] if isinstance(source, Node) else None
    if not isinstance(narrow, torch.Tensor) or narrow.dtype not in _BYTES or value.dtype in (*_BYTES, torch.bool):
        return False
    if value.dtype.is_floating_point or any(user.target in _ARITHMETIC for user in node.users):
        return True
    return _all_readers(node, lambda reader, place: is_looked_up(reader) and reader.args[2] is place)


def is_widened_scale(node: Node) -> bool:
    """True if the node makes float32 of scales in a half type, which operators that dequantise read and nobody else.

    Such scales are widened where they are read, as what they scale is: made ahead they would take twice the memory.
    """
    source = node.args[0] if node.args else None
    if node.target not in _CASTS or not isinstance(source, Node) or not isinstance(source.meta["val"], torch.Tensor):
        return False
    if source.meta["val"].dtype not in _HALVES or node.meta["val"].dtype != torch.float32:
        return False
    return bool(node.users) and all(is_dequantized(user) and user.args[1:2] == (node,) for user in node.users)


def is_looked_up(node: Node) -> bool:
    """True if the node makes the weights of products of a table of at most 16 values and of bytes that say which of them each weight is.

    Those of (N, K) or (K, N), on the CPU, that are not small, with K a multiple of 8: others are made ahead. Source of such weights: Han et
    al., "Deep Compression", 2016.
    """
    if node.target is not aten.index_select.default or not node.users:
        return False
    table, weights = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if table.dim() != 1 or table.dtype != torch.float32 or table.device.type != "cpu" or not _is_of_bytes(node.args[2]):
        return False
    if not (isinstance(weights.shape[0], int) and isinstance(table.shape[0], int) and 2 <= table.shape[0] <= 16):
        return False
    return weights.numel() >= _LEAST_LOOKED_UP and _all_readers(node, _is_weight_of)


def _is_weight_of(product: Node, value: Node) -> bool:
    position = PRODUCTS.get(product.target)
    shape = value.meta["val"].shape
    if position is None or len(shape) != 2 or product.args[position] is not value or value in product.args[:position]:
        return False
    return bool(shape[1 if product.target is aten.linear.default else 0] % 8 == 0)


def _is_of_bytes(places: object) -> bool:
    """True if integers are kept in 8 bits, seen through casts and views."""
    while isinstance(places, Node) and isinstance(places.meta.get("val"), torch.Tensor):
        if places.meta["val"].dtype in _BYTES:
            return True
        if places.target not in _CASTS and not is_view(places):
            return False
        places = places.args[0]
    return False


def _all_readers(node: Node, accepts: Callable[[Node, Node], bool]) -> bool:
    """True if `accepts(reader, what it reads)` holds for all that read a value, be it by way of a view."""
    pending = [node]
    while pending:
        value = pending.pop()
        if not value.users:
            return False
        for user in value.users:
            if is_view(user):
                pending.append(user)
            elif user.op != "call_function" or not accepts(user, value):
                return False
    return True


def is_quantizing(target: object) -> bool:
    """True if an operator, a node's target, is one of torch.ao's on quantised tensors."""
    return isinstance(target, OpOverload) and target.namespace == QUANTIZED


def is_quantized(value: object) -> bool:
    """True if a value of a graph is integers that numbers were quantised to: the result of an operator that quantises, or of rounding and a
    cast where graphs write that out; seen through operators that choose among, move or copy elements."""
    while isinstance(value, Node) and value.op == "call_function":
        if is_quantizing(value.target):
            return not is_dequantized(value)
        if (
            value.target in _CASTS
            and value.all_input_nodes
            and value.all_input_nodes[0].meta["val"].dtype.is_floating_point
        ):
            return _is_rounded(value.all_input_nodes[0])
        source = value.all_input_nodes[0] if value.all_input_nodes else None
        if is_item(value):  # the first result of pooling is elements, the second is places
            chosen = value.args[1] == 0 or (source is not None and is_quantizing(source.target))
        else:
            chosen = is_view(value) or value.target in _CHOOSING
        if not chosen:
            return False
        value = source
    return False


def _is_rounded(node: Node) -> bool:
    """True if a value is whole numbers: rounded, then perhaps shifted by a zero point and clamped."""
    while node.target in _KEEPING_WHOLE:
        node = node.all_input_nodes[0]
    return node.target is aten.round.default


def constant_nodes(gm: torch.fx.GraphModule, constants: frozenset[str]) -> set[Node]:
    """Nodes that depend on the placeholders `constants`, and on buffers, alone, and that `passes.hoist` therefore computes ahead."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if (node.op == "placeholder" and node.name in constants) or (
            is_pure(node) and not is_dequantized(node) and all(argument in found for argument in node.all_input_nodes)
        ):
            found.add(node)
    return found


def is_repeatable(gm: torch.fx.GraphModule) -> bool:
    """True if a call of the graph can be repeated unnoticed: all it does is compute, by operators that PyTorch itself answers for.

    What another library's operators do besides computing is not known, whatever their schemas declare.
    """
    return all(_only_computes(node) for node in gm.graph.nodes if node.op not in ("placeholder", "output"))


def _only_computes(node: Node) -> bool:
    is_known = not isinstance(node.target, OpOverload) or node.target.namespace in _OF_PYTORCH
    return is_pure(node) and is_known


def effects(gm: torch.fx.GraphModule) -> Iterator[Node]:
    """The nodes that do, or may do, more than compute, as `is_repeatable` has it; of control flow, those of its bodies."""
    for node in gm.graph.nodes:
        if is_control_flow(node):
            called = (operator.attrgetter(n.target)(gm) for n in node.all_input_nodes if n.op == "get_attr")
            for body in called:
                if isinstance(body, torch.fx.GraphModule):
                    yield from effects(body)
        elif node.op not in ("placeholder", "output") and not _only_computes(node):
            yield node


def holds_collectives(gm: torch.fx.GraphModule) -> bool:
    """True if the graph, or a sub-graph that it calls, works with other processes: no call of it may be repeated on one rank alone."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    return any(is_collective(node) for graph in graphs for node in graph.nodes)
