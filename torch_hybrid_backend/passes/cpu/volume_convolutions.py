"""3-D convolutions as 2-D convolutions: one image for each depth of the result, whose channels are the depths that it reads.

    conv3d(x, W)   ->   conv2d(cat(x at depth d, x at depth d + 1, ...), W')

Kernels of (depth, 1, 1) read no neighbours within an image, so they see (depth, height * width) as an image, without a copy. With several
groups channels would be interleaved with depths, so the convolutions of the single depths are added instead. Transposed convolutions whose
windows do not overlap are matrix products, as every pixel computes its window alone. W' depends on parameters alone, so hoisting computes it
outside the call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, replace_by_new

aten = torch.ops.aten
Node = torch.fx.Node


def volume_convolutions(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Rewrite 3-D convolutions with constant weights and static sizes, unless their results would have other strides."""
    if has_mutation(gm) or not ctx.constants:
        return False
    constant = ctx.constant_nodes(gm)
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        if ctx.may_rewrite(node) and _is_candidate(node, constant):
            changed |= _rewrite(gm, node)
    return changed


def _is_candidate(node: Node, constant: set[Node]) -> bool:
    arguments: Any = node.args
    x, weight, bias, strides, padding, dilation, transposed, extra, groups = arguments
    if weight not in constant or (bias is not None and bias not in constant):
        return False
    if transposed and (groups != 1 or any([*padding, *extra]) or {*dilation} != {1}):
        return False
    shapes = [value.meta["val"].shape for value in (x, weight, node)]
    static = all(isinstance(size, int) and size > 0 for shape in shapes for size in shape)
    if not static or any(len(shape) != 5 for shape in shapes) or not node.meta["val"].is_floating_point():
        return False
    return not transposed or list(shapes[1][2:]) == _each(strides)


def _rewrite(gm: torch.fx.GraphModule, node: Node) -> bool:
    before = node.prev
    geometry = [_each(value) for value in node.args[3:6]]
    weight: Any = node.args[1]
    kernel = weight.meta["val"].shape[2:]
    strides, padding, _ = geometry
    flat = tuple(kernel[1:]) == (1, 1) and strides[1:] == [1, 1] and not any(padding[1:])
    if node.args[6]:
        result = _windows(node)
    elif flat:
        result = _along_depth(node, geometry)
    elif node.args[8] == 1 or kernel[0] == 1:
        result = _by_depth(node, geometry)
    else:
        result = _sum_over_depths(node, geometry)
    return replace_by_new(gm, node, result, before)


def _each(value: Any) -> list[int]:
    values = list(value)
    return values * 3 if len(values) == 1 else values


def _copied(node: Node, x: Any) -> Node:
    return insert(node, aten.clone.default, x, memory_format=torch.contiguous_format)


def _along_depth(node: Node, geometry: list[list[int]]) -> Node:
    """The convolution with a kernel of (depth, 1, 1)."""
    arguments: Any = node.args[:3]
    x, weight, bias = arguments
    n, channels, depth, height, width = x.meta["val"].shape
    outputs, inputs, taps, _, _ = weight.meta["val"].shape
    image = insert(node, aten.view.default, _copied(node, x), [n, channels, depth, height * width])
    columns = insert(node, aten.view.default, _copied(node, weight), [outputs, inputs, taps, 1])
    (stride, *_), (padding, *_), (dilation, *_) = geometry
    rest = ([stride, 1], [padding, 0], [dilation, 1], False, [0, 0], node.args[8])
    y = insert(node, aten.convolution.default, image, columns, bias, *rest, origin=node)
    return insert(node, aten.view.default, y, list(node.meta["val"].shape))


def _by_depth(node: Node, geometry: list[list[int]]) -> Node:
    arguments: Any = node.args[:3]
    x, weight, bias = arguments
    (stride, *strides), (padding, *paddings), (dilation, *dilations) = geometry
    n, channels, _, height, width = x.meta["val"].shape
    outputs, inputs, taps, *window = weight.meta["val"].shape
    depth = node.meta["val"].shape[2]
    images = _images(node, x, padding)
    if taps > 1 or stride > 1:
        last = (depth - 1) * stride + 1
        starts = [tap * dilation for tap in range(taps)]
        parts = [insert(node, aten.slice.Tensor, images, 1, start, start + last, stride) for start in starts]
        images = insert(node, aten.cat.default, parts, 2) if taps > 1 else parts[0]
    images = insert(node, aten.view.default, _copied(node, images), [n * depth, taps * channels, height, width])
    kernel = _copied(node, insert(node, aten.permute.default, weight, [0, 2, 1, 3, 4]))
    kernel = insert(node, aten.view.default, kernel, [outputs, taps * inputs, *window])
    rest = (strides, paddings, dilations, False, [0, 0], node.args[8])
    y = insert(node, aten.convolution.default, images, kernel, bias, *rest, origin=node)
    return _volume(node, y)


def _images(node: Node, x: Any, padding: int) -> Any:
    """View of x, padded in depth, as (n, depth, channels, height, width)."""
    if padding:
        x = insert(node, aten.constant_pad_nd.default, x, [0, 0, 0, 0, padding, padding], 0.0)
    return insert(node, aten.permute.default, x, [0, 2, 1, 3, 4])


def _volume(node: Node, images: Node) -> Node:
    """The result, from images (n * depth, channels, height, width)."""
    n, outputs, depth, *size = node.meta["val"].shape
    y = insert(node, aten.view.default, images, [n, depth, outputs, *size])
    return _copied(node, insert(node, aten.permute.default, y, [0, 2, 1, 3, 4]))


def _sum_over_depths(node: Node, geometry: list[list[int]]) -> Node:
    """Add up a convolution for each depth of the kernel."""
    arguments: Any = node.args[:3]
    x, weight, bias = arguments
    (stride, *strides), (padding, *paddings), (dilation, *dilations) = geometry
    n, channels, depths, height, width = x.meta["val"].shape
    depth = node.meta["val"].shape[2]
    padded = depths + 2 * padding
    shape = [n * padded, channels, height, width]
    images = insert(node, aten.view.default, _copied(node, _images(node, x, padding)), shape)
    total: Any = None
    for tap in range(weight.meta["val"].shape[2]):
        first, last = tap * dilation, tap * dilation + (depth - 1) * stride + 1
        if n == 1:
            read = insert(node, aten.slice.Tensor, images, 0, first, last, stride)
        else:
            split = insert(node, aten.view.default, images, [n, padded, *shape[1:]])
            read = insert(node, aten.slice.Tensor, split, 1, first, last, stride)
            read = insert(node, aten.view.default, _copied(node, read), [n * depth, *shape[1:]])
        kernel = insert(node, aten.select.int, weight, 2, tap)
        rest = (strides, paddings, dilations, False, [0, 0], node.args[8])
        y = insert(node, aten.convolution.default, read, kernel, None if tap else bias, *rest, origin=node)
        total = y if total is None else insert(node, aten.add.Tensor, total, y)
    return _volume(node, total)


def _windows(node: Node) -> Node:
    """A transposed convolution whose windows do not overlap: a 1x1 convolution to (outputs, window) channels, which are then moved in place."""
    arguments: Any = node.args[:3]
    x, weight, bias = arguments
    n, channels, depth, height, width = x.meta["val"].shape
    _, outputs, *window = weight.meta["val"].shape
    image = insert(node, aten.view.default, _copied(node, x), [n, channels, depth, height * width])
    kernel = _copied(node, insert(node, aten.permute.default, weight, [1, 2, 3, 4, 0]))
    kernel = insert(node, aten.view.default, kernel, [outputs * math.prod(window), channels, 1, 1])
    y = insert(
        node, aten.convolution.default, image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, origin=node
    )
    y = insert(node, aten.view.default, y, [n, outputs, *window, depth, height, width])
    y = _copied(node, insert(node, aten.permute.default, y, [0, 1, 5, 2, 6, 3, 7, 4]))
    y = insert(node, aten.view.default, y, list(node.meta["val"].shape))
    if bias is None:
        return y
    return insert(node, aten.add.Tensor, y, insert(node, aten.view.default, bias, [1, outputs, 1, 1, 1]))
