"""Precisions that operators compute in, which need not be the same everywhere in a graph.

linear(cast16(x), cast16(W))      the linear layer computes in bfloat16; its casts, like quantizations, compute nothing
"""

from __future__ import annotations

import torch
from torch.fx import Node

from torch_hybrid_backend.graph.quantized import CASTS, computes_with_dequantized, is_quantize_operator, operator_name
from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.torch_private import tree_leaves


def is_cast(node: Node) -> bool:
    """True if the node changes the precision of floating-point values: a cast between such dtypes, or a quantization."""
    if is_quantize_operator(node):
        return True
    if node.target not in CASTS or not node.all_input_nodes:
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype != after.dtype and before.is_floating_point() and after.is_floating_point()


def computes(node: Node) -> bool:
    """True if the operator makes floating-point values of its own."""
    if node.op != "call_function" or is_item(node) or is_view(node) or is_cast(node):
        return False
    return operator_name(node) is None and bool(_floats(node))


def converted_to(node: Node) -> str | None:
    """The dtype that an operator was converted to: `meta["precision"]`, the mark of a pass ("bfloat16"), or "int8" if it computes
    with quantized values. None if it computes as its dtypes say."""
    if "precision" in node.meta:
        return str(node.meta["precision"])
    return "int8" if computes_with_dequantized(node) else None


def precision_of(node: Node) -> str:
    """The dtype that an operator computes in."""
    return converted_to(node) or str(_floats(node)[0].dtype).removeprefix("torch.")


def _floats(node: Node) -> list[torch.Tensor]:
    values = tree_leaves(node.meta.get("val"))
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
