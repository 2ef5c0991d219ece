"""Convolutions: a ConvOp without bias, the bias added on top so that it joins the epilogue.

Their gradients (`aten.convolution_backward`) have no lowering: that operator computes those of image and weight together, for which PyTorch's
libraries are tuned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index, contiguous_strides, linear
from torch_hybrid_backend.loops.ir import Buffer, ConvOp, Map, MatMulOp, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers, reindex
from torch_hybrid_backend.loops.lowerings.views import channelwise, permuted, reshaped
from torch_hybrid_backend.loops.ops import add, is_float
from torch_hybrid_backend.sizes.size import Size, product

aten = torch.ops.aten


def per_dimension(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Numbers, one for each spatial dimension; a single one stands for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


@lowers(aten.convolution.default)
def convolution(
    ctx: Context,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    """A convolution. 1-D, 2-D, and transposed with windows that tile the result (kernel == stride); of other kinds where the kernels can."""
    rank = len(weight.shape) - 2
    if rank not in (1, 2) and not ctx.abilities.any_convolution:
        raise Refuse(Reason.ARGUMENT, f"only 1-D and 2-D convolutions are taken, this one is {rank}-D")
    if not is_float(compute_dtype(ctx.out.dtype)):
        raise Refuse(Reason.DTYPE, f"convolutions of {ctx.out.dtype} are left to eager")
    if len(x.shape) != rank + 2:
        raise Refuse(Reason.ARGUMENT, "a convolution without a batch dimension is left to eager")
    if any(isinstance(size, Size) for size in (x.shape[1], *weight.shape, ctx.shape[1])):
        raise Refuse(
            Reason.SYMBOLIC_SHAPE, "channels and kernel of a convolution may not be sizes known only at run time"
        )
    if not ctx.abilities.open_images and any(isinstance(size, Size) for size in (*x.shape[2:], *ctx.shape[2:])):
        raise Refuse(Reason.SYMBOLIC_SHAPE, "only the batch of a convolution may be a size known at run time")
    strides, dilations = per_dimension(stride, rank), per_dimension(dilation, rank)
    paddings = per_dimension(padding, rank)
    # With a bias to come, the sum is kept in the compute dtype: one rounding, as in eager.
    dtype = ctx.out.dtype if bias is None else compute_dtype(ctx.out.dtype)
    out = Buffer(ctx.shape, dtype)
    if not transposed:
        x, paddings = _without_padding(x, paddings)
        result: Value = ctx.realize(ConvOp(out, x, weight, strides, paddings, dilations, groups))
    elif (
        weight.shape[2:] == strides
        and not any((*paddings, *per_dimension(output_padding, rank)))
        and all(d == 1 for d in dilations)
        and groups == 1
    ):
        result = _tiling_transposed(ctx, x, weight, dtype)
    elif ctx.abilities.any_convolution:
        result = ctx.realize(ConvOp(out, x, weight, strides, paddings, dilations, groups, transposed=True))
    else:
        raise Refuse(
            Reason.ARGUMENT,
            "transposed convolutions are taken only with kernel == stride, no padding, no dilation and one group",
        )
    return result if bias is None else ctx.pointwise(add, result, channelwise(bias, ctx.shape))


def _without_padding(x: Value, padding: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
    """An explicit zero padding of the input becomes the convolution's own; zeros after follow from the output's size."""
    if isinstance(x, Map) and x.realized is None and x.zero_padded is not None:
        inner, before = x.zero_padded
        known = all(isinstance(size, int) for size in before)
        if known and before[:2] == (0, 0) and inner.shape[:2] == x.shape[:2]:
            return inner, tuple(p + b for p, b in zip(padding, before[2:], strict=True))
    return x, padding


def _tiling_transposed(ctx: Context, x: Value, weight: Value, dtype: str) -> Value:
    """x (N, C, *S), weight (C, O, *K) -> (N, O, *(S * K)): every input pixel becomes one window of the result.

    A matmul of pixels (N * S, C) by (C, O * K), then the pixel shuffle as a bijective view.
    """
    rank = len(weight.shape) - 2
    channels, outputs, *kernel = weight.shape
    pixel_shape = (x.shape[0], *x.shape[2:])
    column_shape = (outputs, *kernel)
    pixels, columns = product(pixel_shape), product(column_shape)
    last = permuted(x, (0, *range(2, rank + 2), 1))
    a = reshaped(last, (1, pixels, channels))
    b = reshaped(weight, (1, channels, columns))
    result = ctx.realize(MatMulOp(Buffer((1, pixels, columns), dtype), a, b))
    pixel_strides, column_strides = contiguous_strides(pixel_shape), contiguous_strides(column_shape)

    def forward(index: tuple[Index, ...]) -> tuple[Index, ...]:
        n, o, *place = index
        pixel = linear((n, *(p // k for p, k in zip(place, kernel, strict=True))), pixel_strides)
        column = linear((o, *(p % k for p, k in zip(place, kernel, strict=True))), column_strides)
        return as_index(0), pixel, column

    def inverse(index: tuple[Index, ...]) -> tuple[Index, ...]:
        _, pixel, column = index
        n, *corner = (pixel // s % size for s, size in zip(pixel_strides, pixel_shape, strict=True))
        o, *offset = (column // s % size for s, size in zip(column_strides, column_shape, strict=True))
        return n, o, *(c * k + d for c, k, d in zip(corner, kernel, offset, strict=True))

    return reindex(result, ctx.shape, forward, inverse)
