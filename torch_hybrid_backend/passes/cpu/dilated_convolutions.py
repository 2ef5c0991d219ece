"""Dilated 3x3 convolutions as dense ones of every d-th row and column.

    conv2d(x, W, padding=d, dilation=d)   ->   each phase (row mod d, column mod d) as an image of its own, convolved with padding 1

A dilated window reads pixels of one phase only, so the products are the same. Dense convolutions may use Winograd's algorithm, with a quarter
of the multiply-adds. The two copies cost about 7 (I + O) / (I O) of the direct convolution (I, O: channels), by bytes and multiply-adds.
Source: "space to batch", Yu & Koltun, "Multi-Scale Context Aggregation by Dilated Convolutions", 2016, as TensorFlow computes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, replace_by_new

aten = torch.ops.aten
Node = torch.fx.Node

# The least I O / (I + O) of channels, from which the copies cost less than a seventh of the direct convolution.
_MIN_CHANNELS = 48
# The least rows and columns of a phase: Winograd's larger tile computes 4 at a time.
_MIN_PHASE = 4


def dilated_convolutions(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Rewrite large dilated 3x3 convolutions with constant float32 weights, static sizes, stride 1 and one group, that keep the image size."""
    if has_mutation(gm) or not ctx.constants:
        return False
    constant = ctx.constant_nodes(gm)
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        if ctx.may_rewrite(node) and _is_candidate(node, constant):
            before = node.prev
            changed |= replace_by_new(gm, node, _by_phase(node), before)
    return changed


def _is_candidate(node: Node, constant: set[Node]) -> bool:
    arguments: Any = node.args
    x, weight, _, stride, padding, dilation, transposed, _, groups = arguments
    if transposed or groups != 1 or weight not in constant or {*stride} != {1} or [*padding] != [*dilation]:
        return False
    shapes = [value.meta["val"].shape for value in (x, weight)]
    if any(len(shape) != 4 for shape in shapes) or len({*dilation}) != 1 or dilation[0] == 1:
        return False
    if not all(isinstance(size, int) and size > 0 for shape in shapes for size in shape):
        return False
    (_, inputs, height, width), (outputs, _, *window) = shapes
    if window != [3, 3] or node.meta["val"].dtype != torch.float32:
        return False
    is_wide: bool = inputs * outputs >= _MIN_CHANNELS * (inputs + outputs)
    return is_wide and bool(min(height, width) >= _MIN_PHASE * dilation[0])


def _by_phase(node: Node) -> Node:
    arguments: Any = node.args
    x, weight, bias, _, _, (d, *_), *_ = arguments
    n, channels, height, width = x.meta["val"].shape
    outputs = weight.meta["val"].shape[0]
    rows, columns = -(-height // d), -(-width // d)
    padding = [0, columns * d - width, 0, rows * d - height]
    if any(padding):
        x = insert(node, aten.constant_pad_nd.default, x, padding, 0.0)
    x = insert(node, aten.clone.default, x, memory_format=torch.contiguous_format)
    split = insert(node, aten.view.default, x, [n, channels, rows, d, columns, d])
    phases = insert(node, aten.permute.default, split, [0, 3, 5, 1, 2, 4])
    phases = insert(node, aten.clone.default, phases, memory_format=torch.contiguous_format)
    images = insert(node, aten.view.default, phases, [n * d * d, channels, rows, columns])
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    y = insert(node, aten.convolution.default, images, weight, bias, *rest, origin=node)
    split = insert(node, aten.view.default, y, [n, d, d, outputs, rows, columns])
    whole = insert(node, aten.permute.default, split, [0, 3, 4, 1, 5, 2])
    whole = insert(node, aten.clone.default, whole, memory_format=torch.contiguous_format)
    result = insert(node, aten.view.default, whole, [n, outputs, rows * d, columns * d])
    if rows * d != height:
        result = insert(node, aten.slice.Tensor, result, 2, 0, height)
    if columns * d != width:
        result = insert(node, aten.slice.Tensor, result, 3, 0, width)
    return insert(node, aten.clone.default, result, memory_format=torch.contiguous_format) if any(padding) else result
