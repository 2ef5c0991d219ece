"""Operators for which converters fail or are wrong, although their validators accept them. They are refused before a build.

Building engines of PyTorch's operator table (`tests/engines/tensorrt/operators.py`) with torch_tensorrt 2.13 showed these faults.
"""

from __future__ import annotations

import torch
from torch.fx import Node

aten = torch.ops.aten

# For a scalar tensor, TensorRT does not know the shape of these converters' results. Pointwise operators take scalar tensors.
_NEED_A_DIMENSION: frozenset[object] = frozenset(
    {
        aten._log_softmax.default,
        aten._softmax.default,
        aten.all.default,
        aten.all.dim,
        aten.all.dims,
        aten.amax.default,
        aten.amin.default,
        aten.any.default,
        aten.any.dim,
        aten.any.dims,
        aten.argmax.default,
        aten.argmin.default,
        aten.as_strided.default,
        aten.atan2.default,
        aten.cumsum.default,
        aten.gather.default,
        aten.index_select.default,
        aten.max.default,
        aten.max.dim,
        aten.mean.default,
        aten.mean.dim,
        aten.min.default,
        aten.min.dim,
        aten.prod.default,
        aten.prod.dim_int,
        aten.sort.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.topk.default,
    }
)


def fault_of(node: Node) -> str:
    """The known fault of a node of a lowered graph, as a sentence; "" where none is known."""
    if node.target in _NEED_A_DIMENSION and _rank(node.args[0]) == 0:
        return f"the converter of {node.target} takes no tensor without dimensions"
    if node.target is aten.convolution.default:
        padding, transposed, output_padding = (node.args[position] for position in (4, 6, 7))
        # The padding at the end would be negative. TensorRT takes it for 0, and the result would be too short.
        if transposed and any(more > cut for cut, more in zip(padding, output_padding, strict=True)):  # type: ignore[arg-type]
            return "the converter of transposed convolutions takes no output_padding above padding"
    return ""


def _rank(argument: object) -> int | None:
    value = argument.meta.get("val") if isinstance(argument, Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else None
