"""Fold evaluated batch norm into the convolution or matrix product before it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, same_spec

aten = torch.ops.aten
Node = torch.fx.Node


def fold_batch_norm(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Rewrite `_native_batch_norm_legit_no_training(f(x, W, b), ...)` as `f(x, W * scale, b * scale + shift)`.

    `scale = weight / sqrt(var + eps)` and `shift = bias - mean * scale` are new nodes that depend on parameters alone.
    Hoisting computes them outside the call, and again when a parameter changes. The batch norm is folded if f is a
    convolution, addmm or mm whose only user is the batch norm, and if all parameters involved are constants.
    Otherwise the batch norm becomes `y * scale + shift`, which ATen's CPU kernel computes too. For half types statistics are combined in
    float32.
    """
    if has_mutation(gm):
        return False
    constant = ctx.constant_nodes(gm)
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        # Inference does not read the saved statistics (empty on CPU). If something reads them, the operator stays whole.
        used = [user for user in node.users if user.users]
        if len(used) == 1 and used[0].target is operator.getitem and used[0].args[1] == 0:
            changed |= _rewrite(gm, node, used[0], constant)
    return changed


@dataclass(frozen=True, slots=True)
class _Affine:
    """Batch norm as y * scale + shift: new nodes before the batch norm, of shape (channels,) and the computing dtype."""

    scale: Node
    shift: Node


def _affine(norm: Node) -> _Affine:
    weight, bias, mean, variance = norm.args[1:5]
    eps = norm.args[6]
    compute = _compute_dtype(mean.meta["val"].dtype)  # type: ignore[union-attr]  # statistics are nodes: see _rewrite

    def cast(node: Any) -> Node:
        return node if node.meta["val"].dtype == compute else insert(norm, aten._to_copy.default, node, dtype=compute)

    scale = insert(norm, aten.rsqrt.default, insert(norm, aten.add.Tensor, cast(variance), eps))
    if weight is not None:
        scale = insert(norm, aten.mul.Tensor, cast(weight), scale)
    offset = insert(norm, aten.mul.Tensor, cast(mean), scale)
    shift = (
        insert(norm, aten.neg.default, offset) if bias is None else insert(norm, aten.sub.Tensor, cast(bias), offset)
    )
    return _Affine(scale, shift)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _rewrite(gm: torch.fx.GraphModule, norm: Node, result: Node, constant: set[Node]) -> bool:
    source = norm.args[0]
    statistics = [argument for argument in norm.args[1:5] if isinstance(argument, Node)]
    if not isinstance(source, Node) or not all(isinstance(argument, Node) for argument in norm.args[3:5]):
        return False
    if source.meta["val"].dim() < 2:
        return False
    affine = _affine(norm)
    new: Node | None = None
    if len(source.users) == 1 and all(argument in constant for argument in statistics):
        if source.target is aten.convolution.default:
            new = _fold_convolution(norm, source, affine, constant)
        elif source.target in (aten.addmm.default, aten.mm.default):
            new = _fold_product(norm, source, affine, constant)
    if new is None or not same_spec(new.meta["val"], result.meta["val"]):
        if new is not None:
            gm.graph.erase_node(new)
        new = _multiply_add(norm, source, affine)
        if not same_spec(new.meta["val"], result.meta["val"]):
            gm.graph.erase_node(new)
            return False
    result.replace_all_uses_with(new)
    for user in list(norm.users):
        gm.graph.erase_node(user)
    gm.graph.erase_node(norm)
    if not source.users and source.op == "call_function":
        gm.graph.erase_node(source)
    return True


def _scaled(norm: Node, tensor: Any, factor: Node, shape: list[int]) -> Node:
    """tensor * factor.view(shape), computed in the factor's dtype and rounded once to the tensor's dtype."""
    factor = insert(norm, aten.view.default, factor, shape)
    product = insert(norm, aten.mul.Tensor, tensor, factor)
    dtype = tensor.meta["val"].dtype
    return product if product.meta["val"].dtype == dtype else insert(norm, aten._to_copy.default, product, dtype=dtype)


def _folded_bias(norm: Node, bias: Any, affine: _Affine, dtype: torch.dtype) -> Node:
    folded = affine.shift
    if bias is not None:
        folded = insert(norm, aten.add.Tensor, insert(norm, aten.mul.Tensor, bias, affine.scale), affine.shift)
    return folded if folded.meta["val"].dtype == dtype else insert(norm, aten._to_copy.default, folded, dtype=dtype)


def _fold_convolution(norm: Node, convolution: Node, affine: _Affine, constant: set[Node]) -> Node | None:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = convolution.args
    if weight not in constant or (bias is not None and bias not in constant) or not isinstance(weight, Node):
        return None
    if transposed and groups != 1:
        return None  # the output channels are spread over two dimensions of the weight
    rank = weight.meta["val"].dim()
    shape = [1, -1] + [1] * (rank - 2) if transposed else [-1] + [1] * (rank - 1)
    scaled = _scaled(norm, weight, affine.scale, shape)
    shifted = _folded_bias(norm, bias, affine, weight.meta["val"].dtype)
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    return insert(norm, aten.convolution.default, x, scaled, shifted, *rest, origin=convolution)


def _fold_product(norm: Node, product: Node, affine: _Affine, constant: set[Node]) -> Node | None:
    if product.kwargs:
        return None  # beta or alpha
    bias, x, weight = product.args if product.target is aten.addmm.default else (None, *product.args)
    if weight not in constant or (bias is not None and bias not in constant) or not isinstance(weight, Node):
        return None
    scaled = _scaled(norm, weight, affine.scale, [1, -1])
    shifted = _folded_bias(norm, bias, affine, weight.meta["val"].dtype)
    return insert(norm, aten.addmm.default, shifted, x, scaled, origin=product)


def _multiply_add(norm: Node, x: Node, affine: _Affine) -> Node:
    shape = [1, -1] + [1] * (x.meta["val"].dim() - 2)
    product = insert(norm, aten.mul.Tensor, x, insert(norm, aten.view.default, affine.scale, shape))
    total = insert(norm, aten.add.Tensor, product, insert(norm, aten.view.default, affine.shift, shape))
    dtype = x.meta["val"].dtype
    return total if total.meta["val"].dtype == dtype else insert(norm, aten._to_copy.default, total, dtype=dtype)
