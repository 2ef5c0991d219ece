"""Convolutions of volumes as convolutions of images: one image for each depth of the result, the depths it reads as channels.

    conv3d(x, W)   ->   conv2d(cat(x at depth d, x at depth d + 1, ...), W')

Kernels of one pixel read no neighbours within an image: (depth, height * width) is an image to them, without a copy. W' depends on
parameters alone: hoisting makes it outside the call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.purity import constant_nodes, has_mutation
from torch_hybrid_backend.passes.rewrite import insert, replace_by_new

aten = torch.ops.aten
Node = torch.fx.Node


def volume_convolutions(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Rewrite 3-D convolutions of one group by constant weights, of static sizes. Left alone: results that would have other strides."""
    if has_mutation(gm) or not ctx.constants:
        return False
    constant = constant_nodes(gm, ctx.constants)
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        if _is_candidate(node, constant):
            changed |= _rewrite(gm, node)
    return changed


def _is_candidate(node: Node, constant: set[Node]) -> bool:
    arguments: Any = node.args
    x, weight, bias, _, _, _, transposed, _, groups = arguments
    if transposed or groups != 1 or weight not in constant or (bias is not None and bias not in constant):
        return False
    shapes = [value.meta["val"].shape for value in (x, weight, node)]
    static = all(isinstance(size, int) and size > 0 for shape in shapes for size in shape)
    return static and all(len(shape) == 5 for shape in shapes) and node.meta["val"].is_floating_point()


def _rewrite(gm: torch.fx.GraphModule, node: Node) -> bool:
    before = node.prev
    geometry = [_each(value) for value in node.args[3:6]]
    weight: Any = node.args[1]
    kernel = weight.meta["val"].shape[2:]
    strides, padding, _ = geometry
    flat = tuple(kernel[1:]) == (1, 1) and strides[1:] == [1, 1] and not any(padding[1:])
    result = _along_depth(node, geometry) if flat else _by_depth(node, geometry)
    return replace_by_new(gm, node, result, before)


def _each(value: Any) -> list[int]:
    values = list(value)
    return values * 3 if len(values) == 1 else values


def _copied(node: Node, x: Any) -> Node:
    return insert(node, aten.clone.default, x, memory_format=torch.contiguous_format)


def _along_depth(node: Node, geometry: list[list[int]]) -> Node:
    """Kernels of (depth, 1, 1)."""
    arguments: Any = node.args[:3]
    x, weight, bias = arguments
    n, channels, depth, height, width = x.meta["val"].shape
    outputs, _, taps, _, _ = weight.meta["val"].shape
    image = insert(node, aten.view.default, _copied(node, x), [n, channels, depth, height * width])
    columns = insert(node, aten.view.default, _copied(node, weight), [outputs, channels, taps, 1])
    (stride, *_), (padding, *_), (dilation, *_) = geometry
    rest = ([stride, 1], [padding, 0], [dilation, 1], False, [0, 0], 1)
    y = insert(node, aten.convolution.default, image, columns, bias, *rest, origin=node)
    return insert(node, aten.view.default, y, list(node.meta["val"].shape))


def _by_depth(node: Node, geometry: list[list[int]]) -> Node:
    arguments: Any = node.args[:3]
    x, weight, bias = arguments
    (stride, *strides), (padding, *paddings), (dilation, *dilations) = geometry
    n, channels, _, height, width = x.meta["val"].shape
    outputs, _, taps, *window = weight.meta["val"].shape
    depth, *size = node.meta["val"].shape[2:]
    if padding:
        x = insert(node, aten.constant_pad_nd.default, x, [0, 0, 0, 0, padding, padding], 0.0)
    images: Any = insert(node, aten.permute.default, x, [0, 2, 1, 3, 4])
    if taps > 1 or stride > 1:
        last = (depth - 1) * stride + 1
        starts = [tap * dilation for tap in range(taps)]
        parts = [insert(node, aten.slice.Tensor, images, 1, start, start + last, stride) for start in starts]
        images = insert(node, aten.cat.default, parts, 2) if taps > 1 else parts[0]
    images = insert(node, aten.view.default, _copied(node, images), [n * depth, taps * channels, height, width])
    kernel = _copied(node, insert(node, aten.permute.default, weight, [0, 2, 1, 3, 4]))
    kernel = insert(node, aten.view.default, kernel, [outputs, taps * channels, *window])
    rest = (strides, paddings, dilations, False, [0, 0], 1)
    y = insert(node, aten.convolution.default, images, kernel, bias, *rest, origin=node)
    y = insert(node, aten.view.default, y, [n, depth, outputs, *size])
    return _copied(node, insert(node, aten.permute.default, y, [0, 2, 1, 3, 4]))
