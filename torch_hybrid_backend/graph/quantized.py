"""Recognition of quantized values in a graph: the only place that knows the forms in which graphs write them.

    dequantize_per_channel(q, scales, zero_points, ...)    operators of torch.ao; `quantize_*` make the integers
    (cast(q) - zero_point) * scale                         the same written out, q of 8 bits
    index_select(codebook, 0, q)                           weights looked up in a table of few values

What quantizing computes is `graph.quantization`'s; kernels recognize operands anew by what they compute, in `loops.quantized`.

Sources: Jacob et al., CVPR 2018 (scales and zero points); Han et al., "Deep Compression", ICLR 2016 (codebooks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.fx import Node

from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

# Namespace of torch.ao's operators that quantize and dequantize; they exist once `torch.ao.quantization.fx._decomposed` is imported.
QUANTIZED = "quantized_decomposed"
CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
# Products whose weight may be quantized -> which argument that is, (K, N), of `linear` (N, K). Rows, (M, K), are the argument before it.
PRODUCTS: Mapping[object, int] = {aten.mm.default: 1, aten.addmm.default: 2, aten.linear.default: 1}
# All layers with a weight -> which argument that is.
_WEIGHTS: Mapping[object, int] = {**PRODUCTS, aten.bmm.default: 1, aten.convolution.default: 1}
_BYTES = frozenset({torch.int8, torch.uint8})
_HALVES = frozenset({torch.bfloat16, torch.float16})
_COPIES = CASTS | {aten.clone.default}
_SHIFTS = frozenset({aten.sub.Tensor, aten.sub.Scalar})
_SCALINGS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
# Operators by which graphs that write dequantization out compute with integers.
_ARITHMETIC = CASTS | _SHIFTS | _SCALINGS | {aten._int_mm.default}
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

# True if kernels read the weights that a node looks up in a codebook packed, as `core.engine.Engine.keeps_packed` has it.
KeepsPacked = Callable[[Node], bool]


def keeps_nothing(weights: Node) -> bool:
    """`KeepsPacked` of kernels that read no codebooks."""
    return False


def operator_name(node: Node) -> str | None:
    """The name of an operator of torch.ao's on quantized tensors, with its overload: "quantize_per_tensor.tensor"; None of other nodes."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != QUANTIZED:
        return None
    name = target._schema.name.partition("::")[2]
    return name if target._overloadname == "default" else f"{name}.{target._overloadname}"


def is_quantize_operator(node: Node) -> bool:
    """True if the node is an operator of torch.ao's that makes integers."""
    return (operator_name(node) or "").startswith("quantize")


def is_dequantize_operator(node: Node) -> bool:
    """True if the node is an operator of torch.ao's that makes floats of integers."""
    return (operator_name(node) or "").startswith("dequantize")


def is_dequantized(node: Node, keeps_packed: KeepsPacked = keeps_nothing) -> bool:
    """True if the node makes wide numbers of narrow ones that stand for them.

    That is an operator that dequantizes; integers of 8 bits cast to a wider dtype, as graphs do that write the arithmetic out; or weights from
    a codebook, if `keeps_packed` says so of them. Wider integers that nobody computes with are indices.

    Such values, and all that is made of them, are computed where they are read: made ahead they would take four times the memory, and hide
    from engines that a product is one of integers.
    """
    if operator_name(node) is not None:
        return is_dequantize_operator(node)
    if is_codebook_weight(node):
        return keeps_packed(node)
    if not _widens_bytes(node):
        return False
    if node.meta["val"].dtype.is_floating_point or any(user.target in _ARITHMETIC for user in node.users):
        return True

    def is_kept(reader: Node, indices: Node) -> bool:
        return is_codebook_weight(reader) and reader.args[2] is indices and keeps_packed(reader)

    return all_readers(node, is_kept)


def computes_with_dequantized(node: Node) -> bool:
    """True if an operator computes with quantized values.

    It reads the result of an operator that dequantizes, or is a layer whose weight is written out as integers of 8 bits that are cast, shifted
    and scaled. Weights from a codebook are floats: a product with them is one of floats.
    """
    if any(is_dequantize_operator(_seen_through_views(value)) for value in node.all_input_nodes):
        return True
    position = _WEIGHTS.get(node.target)
    return position is not None and _is_written_out(node.args[position])


def is_widened_scale(node: Node) -> bool:
    """True if the node makes float32 of scales in a half type, which operators that dequantize read and nobody else.

    Such scales are widened where they are read, as the integers that they scale are: made ahead they would take twice the memory.
    """
    source = node.args[0] if node.args else None
    if node.target not in CASTS or not isinstance(source, Node) or not isinstance(source.meta["val"], torch.Tensor):
        return False
    if source.meta["val"].dtype not in _HALVES or node.meta["val"].dtype != torch.float32:
        return False
    return bool(node.users) and all(is_dequantize_operator(user) and user.args[1:2] == (node,) for user in node.users)


def is_codebook_weight(node: Node) -> bool:
    """True if the node makes the weights of products, and nothing else, of a table and of bytes that say which value each weight has."""
    if node.target is not aten.index_select.default or not node.users:
        return False
    table, indices = node.args[0], node.args[2]
    if not isinstance(table, Node) or table.meta["val"].dim() != 1 or not _is_of_bytes(indices):
        return False
    return all_readers(node, _is_weight_of)


def depths_of(weights: Node) -> list[int]:
    """The number of terms, K, of the sums of each product that reads weights from a codebook."""
    found: list[int] = []

    def add(product: Node, weight: Node) -> bool:
        found.append(weight.meta["val"].shape[1 if product.target is aten.linear.default else 0])
        return True

    all_readers(weights, add)
    return found


def _is_weight_of(product: Node, value: Node) -> bool:
    """True if a matrix is the weight of a product, and not its rows or its bias too."""
    position = PRODUCTS.get(product.target)
    if position is None or len(value.meta["val"].shape) != 2:
        return False
    return product.args[position] is value and value not in product.args[:position]


def is_quantizing(target: object) -> bool:
    """True if an operator, a node's target, is one of torch.ao's on quantized tensors."""
    return isinstance(target, OpOverload) and target.namespace == QUANTIZED


def is_quantized(value: object) -> bool:
    """True if a value of a graph is integers that numbers were quantized to.

    It is the result of an operator that quantizes, or of rounding and a cast where graphs write that out; seen through operators that choose
    among, move or copy elements.
    """
    while isinstance(value, Node) and value.op == "call_function":
        if is_quantizing(value.target):
            return not is_dequantize_operator(value)
        if (
            value.target in CASTS
            and value.all_input_nodes
            and value.all_input_nodes[0].meta["val"].dtype.is_floating_point
        ):
            return _is_rounded(value.all_input_nodes[0])
        source = value.all_input_nodes[0] if value.all_input_nodes else None
        if is_item(value):  # the first result of pooling is elements, the second is positions
            chosen = value.args[1] == 0 or (source is not None and is_quantizing(source.target))
        else:
            chosen = is_view(value) or value.target in _CHOOSING
        if not chosen:
            return False
        value = source
    return False


def _widens_bytes(node: Node) -> bool:
    """True if the node casts integers of 8 bits to a wider dtype."""
    source = node.args[0] if node.args else None
    if node.target not in CASTS or not isinstance(source, Node):
        return False
    value, narrow = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(narrow, torch.Tensor):
        return False
    return narrow.dtype in _BYTES and value.dtype not in (*_BYTES, torch.bool)


def _is_written_out(value: object) -> bool:
    """True if a value is integers of 8 bits that are cast, perhaps shifted and scaled by fewer numbers than there are integers, and moved."""
    pending = [value]
    while pending:
        node = pending.pop()
        if not isinstance(node, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if _widens_bytes(node):
            return True
        if is_view(node) or node.target in _COPIES or (node.target in _SHIFTS and _is_smaller(node.args[1], node)):
            pending.append(node.args[0])
        elif node.target in _SCALINGS:
            left, right = node.args[:2]
            pending += [one for one, other in ((left, right), (right, left)) if _is_smaller(other, node)]
    return False


def _is_smaller(value: object, than: Node) -> bool:
    """True if a value is a number, or a tensor of fewer elements: a mask of a weight is not, a scale is."""
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return True
    sizes = *value.meta["val"].shape, *than.meta["val"].shape
    return all(isinstance(size, int) for size in sizes) and value.meta["val"].numel() < than.meta["val"].numel()


def _seen_through_views(node: Node) -> Node:
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_of_bytes(indices: object) -> bool:
    """True if integers are kept in 8 bits, seen through casts and views."""
    while isinstance(indices, Node) and isinstance(indices.meta.get("val"), torch.Tensor):
        if indices.meta["val"].dtype in _BYTES:
            return True
        if indices.target not in CASTS and not is_view(indices):
            return False
        indices = indices.args[0]
    return False


def all_readers(node: Node, accepts: Callable[[Node, Node], bool]) -> bool:
    """True if `accepts(reader, value)` holds for all that read a value, be it by way of a view."""
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


def _is_rounded(node: Node) -> bool:
    """True if a value is whole numbers: rounded, then perhaps shifted by a zero point and clamped."""
    while node.target in _KEEPING_WHOLE:
        node = node.all_input_nodes[0]
    return node.target is aten.round.default
