"""Precisions that operators compute in, which need not be the same everywhere in a graph.

linear(cast16(x), cast16(W))      the linear layer computes in bfloat16; its casts, like quantisations, compute nothing
"""

from __future__ import annotations

import torch
from torch.fx import Node

from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.torch_private import OpOverload, tree_leaves

_CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default})
_QUANTISERS = "quantized_decomposed"


def is_cast(node: Node) -> bool:
    """True if the node changes the precision of floating-point values: a cast between such dtypes, or a quantisation."""
    target = node.target
    if not isinstance(target, OpOverload) or not node.all_input_nodes:
        return False
    if target.namespace == _QUANTISERS:
        return target._schema.name.startswith(f"{_QUANTISERS}::quantize")
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if target not in _CASTS or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype != after.dtype and before.is_floating_point() and after.is_floating_point()


def computes(node: Node) -> bool:
    """True if the operator makes floating-point values of its own."""
    if node.op != "call_function" or is_item(node) or is_view(node) or is_cast(node):
        return False
    if isinstance(node.target, OpOverload) and node.target.namespace == _QUANTISERS:
        return False
    return bool(_floats(node))


def converted_to(node: Node) -> str | None:
    """The dtype that an operator was converted to: `meta["precision"]`, the mark of a pass ("bfloat16"), or "int8" if it reads dequantised
    values. None if it computes as its dtypes say."""
    if "precision" in node.meta:
        return str(node.meta["precision"])
    return "int8" if any(map(_is_dequantised, node.all_input_nodes)) else None


def precision_of(node: Node) -> str:
    """The dtype that an operator computes in."""
    return converted_to(node) or str(_floats(node)[0].dtype).removeprefix("torch.")


def _is_dequantised(node: Node) -> bool:
    """True if the value is a dequantised one, or a view of it."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    target = node.target
    return isinstance(target, OpOverload) and target._schema.name.startswith(f"{_QUANTISERS}::dequantize")


def _floats(node: Node) -> list[torch.Tensor]:
    values = tree_leaves(node.meta.get("val"))
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
