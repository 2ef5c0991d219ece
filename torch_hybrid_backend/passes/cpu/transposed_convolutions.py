"""Transposed convolutions as convolutions of the small image, whose channels are then spread over pixels.

    conv_transpose(x, W, stride=s)   ->   pixel_shuffle(conv(x, W'), s)

A pixel of the result depends only on every s-th element of the kernel, starting with an element given by the pixel's place modulo s. So one
convolution computes the s * s places as channels, without the zeros of an input stretched by s. W' depends on parameters alone, so hoisting
computes it outside the call.
Source: Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.graph.quantized import operator_name
from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import follows_from_inputs, insert, replace_by_new, size_argument

aten = torch.ops.aten
Node = torch.fx.Node

# From this many channels on, Winograd's algorithm computes a 3x3 kernel with less work than four products per pixel.
_WINOGRAD_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class _Axis:
    """A spatial dimension: sizes of input and result, kernel, stride, and the padding that is cut off `before` the result's first element."""

    size: int | torch.SymInt
    result: int | torch.SymInt
    kernel: int
    stride: int
    before: int

    def without_padding(self) -> _Axis:
        """The axis with padding 0: the result keeps the elements that padding would cut off."""
        return _Axis(self.size, self.before + self.result, self.kernel, self.stride, 0)

    @property
    def first(self) -> int:
        """The number of input pixels to the right of its own place that an output reads."""
        return -(-self.before // self.stride)

    @property
    def last(self) -> int:
        """The number of input pixels to the left of its own place that an output reads; also the convolution's padding."""
        return (self.kernel - 1 - self.before) // self.stride

    @property
    def taps(self) -> int:
        return self.first + self.last + 1

    @property
    def places(self) -> Any:
        """The number of results of the convolution. Each stands for `stride` elements."""
        return (self.result + self.stride - 1) // self.stride

    @property
    def is_open(self) -> bool:
        """True if sizes are only known at run time."""
        return not (isinstance(self.size, int) and isinstance(self.result, int))

    @property
    def margins(self) -> tuple[int, int]:
        """Zeros before and after the kernel that make it `taps * stride` long."""
        before = self.first * self.stride - self.before
        return before, self.taps * self.stride - self.kernel - before

    @property
    def after(self) -> int:
        """The number of zeros that the convolution reads after the input, as `last` before it. Negative if the input's end is not read, or if
        the number is only known at run time."""
        return _number(self.places + self.taps - 1 - self.size - self.last)

    @property
    def behind(self) -> int:
        """The number of elements behind the result's last that the convolution computes; -1 if it is only known at run time."""
        return _number(self.places * self.stride - self.result)


def _number(value: int | torch.SymInt) -> int:
    """A number that may be written in sizes which cancel out; -1 if they do not."""
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression) if expression.is_Integer else -1


def transposed_convolutions(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Rewrite 1-D and 2-D transposed convolutions of one group, without dilation, with constant weights.

    Weights may also be 8-bit weights dequantized with per-channel scales; they stay quantized. Convolutions whose results would have other
    strides are left alone. So are those of images of sizes only known at run time, unless the kernel is as long as the stride and twice the
    padding: fake tensors may put numbers in place of such sizes where an image is padded on one side.
    """
    if has_mutation(gm) or not ctx.constants:
        return False
    constant = ctx.constant_nodes(gm)
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        axes = _axes(node, constant) if ctx.may_rewrite(node) else None
        if axes is not None:
            changed |= _rewrite(gm, node, axes)
    return changed


def _axes(node: Node, constant: set[Node]) -> list[_Axis] | None:
    arguments: Any = node.args
    x, weight, bias, stride, padding, dilation, transposed, _output_padding, groups = arguments
    if not transposed or groups != 1 or (bias is not None and bias not in constant):
        return None
    if weight not in constant and not _is_quantized(weight, constant):
        return None
    shape, kernel = x.meta["val"].shape[2:], weight.meta["val"].shape[2:]
    result = node.meta["val"].shape[2:]
    rank = len(kernel)
    if rank not in (1, 2) or len(shape) != rank or not node.meta["val"].is_floating_point():
        return None
    sizes = [*x.meta["val"].shape, *result, *weight.meta["val"].shape]
    if any(isinstance(size, int) and size == 0 for size in sizes) or not isinstance(x.meta["val"].shape[1], int):
        return None
    s, p, d = (_each(value, rank) for value in (stride, padding, dilation))
    if any(each != 1 for each in d):
        return None
    padded = [_Axis(*each) for each in zip(shape, result, kernel, s, p, strict=True)]
    if any(axis.last < 0 for axis in padded):
        return None
    is_open = any(axis.is_open for axis in padded)
    if is_open and (
        any(axis.behind != 0 or axis.after != axis.last for axis in padded)
        or not follows_from_inputs(node.graph, node.meta["val"].shape)
    ):
        return None
    cut = [axis.without_padding() for axis in padded]
    outputs = weight.meta["val"].shape[1] * math.prod(s)
    quick = [axis.taps for axis in padded] == [3, 3] and min(outputs, x.meta["val"].shape[1]) >= _WINOGRAD_CHANNELS
    axes = [a if quick or a.is_open or a.taps <= b.taps else b for a, b in zip(padded, cut, strict=True)]
    return axes if all(axis.after >= 0 for axis in axes) else None


def _is_quantized(weight: Node, constant: set[Node]) -> bool:
    """True if the weight is an 8-bit weight, dequantized symmetrically per output channel."""
    if operator_name(weight) != "dequantize_per_channel":
        return False
    integers, scales, zeros, axis, *_ = weight.args
    is_symmetric = isinstance(zeros, Node) and zeros.target is aten.full.default and zeros.args[1] == 0
    return bool(axis == 1 and is_symmetric and integers in constant and scales in constant)


def _each(value: Any, rank: int) -> list[int]:
    values = list(value)
    return values * rank if len(values) == 1 else values


def _rewrite(gm: torch.fx.GraphModule, node: Node, axes: list[_Axis]) -> bool:
    x, weight, bias = node.args[:3]
    before = node.prev
    result = _spread(node, _convolved(node, x, weight, bias, axes), axes)
    for dim, (axis, size) in enumerate(zip(axes, node.meta["val"].shape[2:], strict=True), 2):
        if not axis.is_open and axis.places * axis.stride != size:
            cut = axis.result - size  # elements that the padding cuts off before the first
            result = insert(node, aten.slice.Tensor, result, dim, cut, axis.result)
    if result.target is aten.slice.Tensor:
        result = insert(node, aten.clone.default, result, memory_format=torch.contiguous_format)
    return replace_by_new(gm, node, result, before)


def _convolved(node: Node, x: Any, weight: Any, bias: Any, axes: list[_Axis]) -> Node:
    """(N, strides * O, *places): the convolution of the small image. Channels of one place are adjacent, as they are copied as vectors."""
    rank, count = len(axes), math.prod(axis.stride for axis in axes)
    if operator_name(weight) == "dequantize_per_channel":
        integers, scales, zeros, _, *bounds = weight.args
        zeros = insert(node, aten.full.default, [count * zeros.meta["val"].shape[0]], 0, **zeros.kwargs)
        narrow, scales = _reordered(node, integers, axes), _repeated(node, scales, count)
        weight = insert(node, weight.target, narrow, scales, zeros, 0, *bounds, **weight.kwargs)
    else:
        weight = _reordered(node, weight, axes)
    bias = None if bias is None else _repeated(node, bias, count)
    after = [axis.after - axis.last for axis in axes]
    padding = [axis.last for axis in axes]
    if any(after):
        padding = [min(axis.last, axis.after) for axis in axes]
        zeros = [
            size
            for axis, p in zip(reversed(axes), reversed(padding), strict=True)
            for size in (axis.last - p, axis.after - p)
        ]
        x = insert(node, aten.constant_pad_nd.default, x, zeros, 0.0)
    ones = [1] * rank
    return insert(
        node, aten.convolution.default, x, weight, bias, ones, padding, ones, False, [0] * rank, 1, origin=node
    )


def _reordered(node: Node, weight: Any, axes: list[_Axis]) -> Node:
    """(C, O, *kernel) -> (strides * O, C, *taps)."""
    rank, (channels, outputs) = len(axes), weight.meta["val"].shape[:2]
    margins = [size for axis in reversed(axes) for size in axis.margins]
    if any(margins):
        weight = insert(node, aten.constant_pad_nd.default, weight, margins, 0)
    cut = [size for axis in axes for size in (axis.taps, axis.stride)]
    weight = insert(node, aten.view.default, weight, [channels, outputs, *cut])
    places, taps = list(range(3, 2 * rank + 2, 2)), list(range(2, 2 * rank + 2, 2))
    weight = insert(node, aten.flip.default, weight, taps)
    weight = insert(node, aten.permute.default, weight, [*places, 1, 0, *taps])
    shape = [outputs * math.prod(axis.stride for axis in axes), channels, *(axis.taps for axis in axes)]
    weight = insert(node, aten.clone.default, weight, memory_format=torch.contiguous_format)
    return insert(node, aten.view.default, weight, shape)


def _repeated(node: Node, channels: Any, count: int) -> Node:
    """(O) -> (count * O)."""
    rows = insert(node, aten.expand.default, insert(node, aten.view.default, channels, [1, -1]), [count, -1])
    rows = insert(node, aten.clone.default, rows, memory_format=torch.contiguous_format)
    return insert(node, aten.view.default, rows, [-1])


def _spread(node: Node, y: Node, axes: list[_Axis]) -> Node:
    """(N, strides * O, *places) -> (N, O, *(places * stride))."""
    rank = len(axes)
    strides = [axis.stride for axis in axes]
    outputs = y.meta["val"].shape[1] // math.prod(strides)
    if all(stride == 1 for stride in strides):
        return y
    batch, *places = (size_argument(node, y.meta["val"].shape[dim]) for dim in (0, *range(2, 2 + rank)))
    y = insert(node, aten.view.default, y, [batch, *strides, outputs, *places])
    order = [each for axis in range(rank) for each in (2 + rank + axis, 1 + axis)]
    y = insert(node, aten.permute.default, y, [0, 1 + rank, *order])
    y = insert(node, aten.clone.default, y, memory_format=torch.contiguous_format)
    results = [
        insert(node, operator.mul, p, s) if isinstance(p, Node) else p * s for p, s in zip(places, strides, strict=True)
    ]
    return insert(node, aten.view.default, y, [batch, outputs, *results])
