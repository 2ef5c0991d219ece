"""Our part of lowering: operators that torch_tensorrt has no converters for, or has some that are wrong, as others that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten


def _cast(x: Any, dtype: Any) -> Any:
    return aten._to_copy.default(x, dtype=dtype)


def _product(x: Any, y: Any) -> Any:
    """TensorRT multiplies no truth values."""
    both = all(isinstance(each, torch.Tensor) and each.dtype is torch.bool for each in (x, y))
    return aten.logical_and.default(x, y) if both else NotImplemented


def _convolution(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any) -> Any:
    """Their converter loses the input of a transposed one of one dimension where the weight is an input of the engine: it has two here."""
    transposed, output_padding, groups = rest
    if not transposed or weight.dim() != 3:
        return NotImplemented
    sizes = [*stride, 1], [*padding, 0], [*dilation, 1], True, [*output_padding, 0], groups
    made = aten.convolution.default(x.unsqueeze(-1), weight.unsqueeze(-1), bias, *sizes)
    return made.squeeze(-1)


def _running_sum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """Of whole numbers and truth values, by adding what lies 1, 2, 4, ... before: exact, by operators that are exact. TensorRT-RTX has no
    running sum, and TensorRT's is not known to be of 64 bits. Of floats the order of additions would be another than eager's."""
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex) and dtype in (None, torch.int64)
    if not whole or x.dim() == 0 or not isinstance(x.shape[dim], int):
        return NotImplemented
    total = x if x.dtype is torch.int64 else _cast(x, torch.int64)
    size, shift = x.shape[dim], 1
    while shift < size:
        sums = aten.slice.Tensor(total, dim, shift, size) + aten.slice.Tensor(total, dim, 0, size - shift)
        total = aten.cat.default([aten.slice.Tensor(total, dim, 0, shift), sums], dim)
        shift *= 2
    return total


# Beside torch_tensorrt's own.
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    # PyTorch's decompositions yield it, and our own casts are.
    torch.ops.prims.convert_element_type.default: _cast,
    aten.mul.Tensor: _product,
    aten.convolution.default: _convolution,
    aten.cumsum.default: _running_sum,
}

# Converters know these by the overload that export keeps: (x, sizes, align_corners, factors). What AOTAutograd yields is the other.
_RESIZED: Mapping[Any, Any] = {
    aten.upsample_bicubic2d.default: aten.upsample_bicubic2d.vec,
    aten.upsample_bilinear2d.default: aten.upsample_bilinear2d.vec,
    aten.upsample_linear1d.default: aten.upsample_linear1d.vec,
    aten.upsample_trilinear3d.default: aten.upsample_trilinear3d.vec,
}


def name_resizes(module: torch.fx.GraphModule) -> None:
    """Call operators that resize by the overload that converters know, in place, where sizes alone say what they compute."""
    for node in module.graph.nodes:
        if node.target in _RESIZED and _follows_sizes(node):
            node.target = _RESIZED[node.target]
            node.args = (*node.args[:3], None)
    module.recompile()


def _follows_sizes(node: Node) -> bool:
    """Whether the factors that a node is given, by which eager then finds where to read, are those of its sizes."""
    x, _, _, *factors = node.args
    if node.kwargs:
        return False
    before = x.meta["val"].shape[2:]  # type: ignore[union-attr]
    after = node.meta["val"].shape[2:]
    given = zip(before, after, factors, strict=False)
    return all(factor is None or statically_known_true(wide == narrow * factor) for narrow, wide, factor in given)
