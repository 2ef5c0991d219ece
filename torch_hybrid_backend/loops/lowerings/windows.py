"""Windows unfolded and folded back: im2col, col2im and the gradients of pooling.

Overlapping windows are not scattered: each pixel of the result gathers from the windows that cover it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, contiguous_strides
from torch_hybrid_backend.loops.ir import Buffer, Const, Expr, Map, ReduceOp, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.lowerings.convolution import per_dimension
from torch_hybrid_backend.loops.ops import (
    add,
    call,
    cast,
    const,
    div,
    from_index,
    guard,
    index_in,
    logical_and,
    mul,
    sub,
)
from torch_hybrid_backend.sizes.size import Dim, known_at_most, known_int, product, size_hint
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

# One number for all dimensions pooled over, or one each.
PerDimension = int | Sequence[int]


def pooled_dimensions(ctx: Context) -> int:
    """Number of dimensions that the node's operator pools over: the digit in its name."""
    assert ctx.node is not None
    assert isinstance(ctx.node.target, OpOverload)
    return next(int(letter) for letter in ctx.node.target._opname if letter.isdigit())


def strides_of(stride: PerDimension, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Steps from one window to the next; by default windows lie side by side."""
    return kernel if not isinstance(stride, int) and len(stride) == 0 else per_dimension(stride, len(kernel))


def window_size(window: Index, k: int, s: int, p: int, n: Dim, count_include_pad: bool) -> Expr:
    """Elements of an average's window in one dimension, without those outside the padding, which ceil_mode allows."""
    start = window * s - p
    end = _least(start + k, n + p)
    if count_include_pad:
        return sub(end, from_index(start))
    return sub(_least_scalar(end, n), _most(start, 0))


def _least(index: Index, bound: Dim) -> Expr:
    if known_at_most(index.high, bound) or known_at_most(bound, index.low):
        return from_index(index if known_at_most(index.high, bound) else bound)
    return call("min", from_index(index), from_index(bound))


def _least_scalar(scalar: Expr, bound: Dim) -> Expr:
    if isinstance(scalar, Const) and isinstance(bound, int):
        return from_index(min(int(scalar.value), bound))
    return call("min", scalar, from_index(bound))


def _most(index: Index, bound: int) -> Expr:
    if known_at_most(bound, index.low) or known_at_most(index.high, bound):
        return from_index(index if known_at_most(bound, index.low) else bound)
    return call("max", from_index(index), from_index(bound))


def inside(place: Sequence[Index], shape: Sequence[Dim]) -> Expr:
    """True if a place lies within a shape, in every dimension."""
    result: Expr = const(True, "bool")
    for i, n in zip(place, shape, strict=True):
        result = logical_and(result, index_in(i, 0, n))
    return result


@lowers(aten.im2col.default)
def im2col(
    ctx: Context,
    x: Value,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """(*lead, C, H, W) -> (*lead, C * kernel, windows): the pixels of every window, zeros outside the image."""
    kernel, dilations = per_dimension(kernel_size, 2), per_dimension(dilation, 2)
    paddings, strides = per_dimension(padding, 2), per_dimension(stride, 2)
    spatial = tuple(map(known_int, x.shape[-2:]))
    columns = _windows(spatial, kernel, dilations, paddings, strides)[1]
    zero = const(0, compute_dtype(x.dtype))

    def at(index: tuple[Index, ...]) -> Expr:
        *lead, row, window = index
        taps = (row // kernel[1] % kernel[0], row % kernel[1])
        starts = (window // columns, window % columns)
        place = tuple(
            o * s - p + k * d for o, s, p, k, d in zip(starts, strides, paddings, taps, dilations, strict=True)
        )
        return guard(inside(place, spatial), x.at((*lead, row // math.prod(kernel), *place)), zero)

    return Map(ctx.shape, x.dtype, at)


@lowers(aten.col2im.default)
def col2im(
    ctx: Context,
    x: Value,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """(*lead, C * kernel, windows) -> (*lead, C, H, W): each pixel is the sum of its copies in all windows."""
    kernel, dilations = per_dimension(kernel_size, 2), per_dimension(dilation, 2)
    paddings, strides = per_dimension(padding, 2), per_dimension(stride, 2)
    counts = _windows(tuple(map(known_int, ctx.shape[-2:])), kernel, dilations, paddings, strides)
    zero = const(0, compute_dtype(x.dtype))

    def body(index: tuple[Index, ...]) -> Expr:
        *lead, channel, h, w, kh, kw = index
        # From the first window's start to this window's.
        offsets = [i + p - k * d for i, p, k, d in zip((h, w), paddings, (kh, kw), dilations, strict=True)]
        place = [offset // s for offset, s in zip(offsets, strides, strict=True)]
        covered = inside(place, counts)
        for offset, s in zip(offsets, strides, strict=True):
            covered = logical_and(covered, call("eq", from_index(offset % s), from_index(0)))
        row = channel * math.prod(kernel) + kh * kernel[1] + kw
        return guard(covered, x.at((*lead, row, place[0] * counts[1] + place[1])), zero)

    rank = len(ctx.shape)
    return ctx.realize(ReduceOp(Buffer(ctx.shape, x.dtype), (*ctx.shape, *kernel), (rank, rank + 1), "sum", body))


def _windows(
    spatial: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> tuple[int, ...]:
    """Number of windows in each dimension."""
    sizes = zip(spatial, kernel, dilation, padding, stride, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in sizes)


@lowers(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_backward(
    ctx: Context,
    grad: Value,
    x: Value,
    kernel_size: PerDimension,
    stride: PerDimension,
    padding: PerDimension,
    dilation: PerDimension,
    ceil_mode: bool,
    positions: Value,
) -> Value:
    """Each pixel receives the gradients of the windows whose maximum it was.

    grad, positions: (*lead, *out_spatial), the latter in the flattened spatial dimensions as the forward operator gives them.
    """
    rank = pooled_dimensions(ctx)
    kernel = per_dimension(kernel_size, rank)
    strides = strides_of(stride, kernel)
    paddings, dilations = per_dimension(padding, rank), per_dimension(dilation, rank)
    lead, spatial, outs = len(x.shape) - rank, x.shape[len(x.shape) - rank :], grad.shape[len(x.shape) - rank :]
    # So many windows in a row cover a pixel at most; the last of them begins at or before it.
    covering = tuple(-(-((k - 1) * d + 1) // s) for k, s, d in zip(kernel, strides, dilations, strict=True))
    if math.prod(covering) > 1 and size_hint(product(x.shape)) > ctx.abilities.max_gathered:
        raise Refuse(
            Reason.ARGUMENT, "the gradient of a large maximum pooling with overlapping windows is left to eager"
        )
    zero = const(0, compute_dtype(grad.dtype))

    def body(index: tuple[Index, ...]) -> Expr:
        pixel, offset = index[lead : lead + rank], index[lead + rank :]
        place = tuple((i + p) // s - o for i, p, s, o in zip(pixel, paddings, strides, offset, strict=True))
        at = (*index[:lead], *place)
        here: Expr = const(0, "int64")
        for i, s in zip(pixel, contiguous_strides(spatial), strict=True):
            here = add(here, mul(from_index(i), from_index(s)))
        chosen = guard(call("eq", positions.at(at), here), grad.at(at), zero)
        return guard(inside(place, outs), chosen, zero)

    axes = tuple(range(lead + rank, lead + 2 * rank))
    return ctx.realize(ReduceOp(Buffer(ctx.shape, grad.dtype), (*ctx.shape, *covering), axes, "sum", body))


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    ctx: Context,
    grad: Value,
    x: Value,
    kernel_size: PerDimension,
    stride: PerDimension,
    padding: PerDimension,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    """Each pixel receives its share of the gradients of the windows that cover it, divided as in the forward operator."""
    rank = pooled_dimensions(ctx)
    kernel = per_dimension(kernel_size, rank)
    strides = strides_of(stride, kernel)
    paddings = per_dimension(padding, rank)
    lead = len(x.shape) - rank
    spatial, outs = tuple(map(known_int, x.shape[lead:])), tuple(map(known_int, grad.shape[lead:]))
    # A single window is no larger than the image and its padding, however enormous the kernel.
    kernel = tuple(min(k, n + 2 * p) for k, n, p in zip(kernel, spatial, paddings, strict=True))
    covering = tuple(-(-k // s) for k, s in zip(kernel, strides, strict=True))
    dtype = compute_dtype(grad.dtype)
    zero = const(0, dtype)

    def body(index: tuple[Index, ...]) -> Expr:
        pixel, offset = index[lead : lead + rank], index[lead + rank :]
        place = tuple((i + p) // s - o for i, p, s, o in zip(pixel, paddings, strides, offset, strict=True))
        covers = inside(place, outs)
        for i, p, s, o, k in zip(pixel, paddings, strides, offset, kernel, strict=True):
            covers = logical_and(covers, index_in((i + p) % s + o * s, 0, k))
        divisor: Expr = const(divisor_override or 1, "int64")
        if divisor_override is None:
            for item in zip(place, kernel, strides, paddings, spatial, strict=True):
                divisor = mul(divisor, window_size(*item, count_include_pad))
        return guard(covers, div(grad.at((*index[:lead], *place)), cast(divisor, dtype)), zero)

    axes = tuple(range(lead + rank, lead + 2 * rank))
    return ctx.realize(ReduceOp(Buffer(ctx.shape, grad.dtype), (*ctx.shape, *covering), axes, "sum", body))
