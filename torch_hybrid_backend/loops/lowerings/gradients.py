"""Gradients of resampling, adaptive pooling and padding, by scatters: each element of the result's gradient is added to the elements that it
was computed from. Engines without scatters leave them to eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, contiguous_strides
from torch_hybrid_backend.loops.ir import Expr, Value, compute_dtype, scalar_index
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.lowerings.indexing import padded_places, replicated
from torch_hybrid_backend.loops.lowerings.pooling import (
    Tap,
    adaptive_kernel,
    cubic_taps,
    end_index,
    linear_taps,
    nearest_places,
)
from torch_hybrid_backend.loops.lowerings.scattering import filled, scattered
from torch_hybrid_backend.loops.ops import call, cast, const, div, from_index, is_float, mul, where
from torch_hybrid_backend.sizes.size import known_int, product
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten


def _nearest_gradient(shift: float, *targets: OpOverload) -> None:
    @lowers(*targets)
    def lower(
        ctx: Context, grad: Value, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
    ) -> Value:
        places = nearest_places(ctx.shape, grad.shape, scales, shift)
        return scattered(ctx, filled(ctx, 0), grad.shape, places, grad.at, "sum")


_nearest_gradient(
    0.0,
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
)
_nearest_gradient(
    0.5,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
)


def _interpolation_gradient(
    taps: Callable[[Index, int, int, float | None, bool, str], list[Tap]], *targets: OpOverload
) -> None:
    @lowers(*targets)
    def lower(
        ctx: Context,
        grad: Value,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        dtype = compute_dtype(grad.dtype)
        if not is_float(dtype):
            raise Refuse(Reason.DTYPE, f"interpolation of {grad.dtype} is left to eager")
        factors = [*scales, *[None] * (len(grad.shape) - 2 - len(scales))]
        sizes, outs = tuple(map(known_int, ctx.shape[2:])), tuple(map(known_int, grad.shape[2:]))
        rank = len(sizes)

        @functools.cache
        def found(outer: tuple[Index, ...]) -> list[list[Tap]]:
            return [taps(*item, align_corners, dtype) for item in zip(outer, sizes, outs, factors, strict=True)]

        counts = tuple(map(len, found((Index((), 0),) * rank)))

        def tap(i: tuple[Index, ...]) -> list[Tap]:
            """Taps, in each dimension the one that the point's last indices number."""
            return [_chosen(own, k, n) for own, k, n in zip(found(i[2 : 2 + rank]), i[2 + rank :], sizes, strict=True)]

        return scattered(
            ctx,
            filled(ctx, 0),
            (*grad.shape, *counts),
            lambda i: (*i[:2], *(position for position, _ in tap(i))),
            lambda i: functools.reduce(mul, (weight for _, weight in tap(i)), grad.at(i[: 2 + rank])),
            "sum",
        )


def _chosen(taps: list[Tap], number: Index, size: int) -> Tap:
    """The tap of that number: both of its parts as one scalar each."""
    position, weight = taps[-1]
    for k, (other, its) in reversed(list(enumerate(taps[:-1]))):
        here = call("eq", from_index(number), from_index(k))
        place = where(here, from_index(other), from_index(position))
        position, weight = scalar_index(place, 0, size - 1), where(here, its, weight)
    return position, weight


_interpolation_gradient(
    linear_taps,
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)
_interpolation_gradient(cubic_taps, aten.upsample_bicubic2d_backward.default)


@lowers(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(ctx: Context, grad: Value, x: Value) -> Value:
    """Each pixel of a window receives the window's gradient divided by the number of its pixels."""
    assert ctx.node is not None
    rank = 3 if "3d" in str(ctx.node.target) else 2
    lead = len(x.shape) - rank
    spatial, outs = tuple(map(known_int, x.shape[lead:])), tuple(map(known_int, grad.shape[lead:]))
    kernel, dtype = adaptive_kernel(spatial, outs), compute_dtype(grad.dtype)

    def window(i: tuple[Index, ...]) -> list[tuple[Index, Index]]:
        """Beginning and end of the window in each dimension."""
        return [(o * n // m, end_index(o, n, m)) for o, n, m in zip(i[lead : lead + rank], spatial, outs, strict=True)]

    def place(i: tuple[Index, ...]) -> tuple[Index, ...]:
        pixels = []
        for (start, _), k, n in zip(window(i), i[lead + rank :], spatial, strict=True):
            # A window that is smaller than the largest one: what is beyond it adds 0 to some pixel.
            pixel = start + k
            pixels.append(
                pixel if pixel.high < n else scalar_index(call("min", from_index(pixel), from_index(n - 1)), 0, n - 1)
            )
        return (*i[:lead], *pixels)

    def body(i: tuple[Index, ...]) -> Expr:
        value, zero = grad.at(i[: lead + rank]), const(0, dtype)
        size: Expr = const(1, "int64")
        for start, end in window(i):
            size = mul(size, from_index(end - start))
        share = div(value, cast(size, dtype))
        for (start, end), k in zip(window(i), i[lead + rank :], strict=True):
            share = where(call("lt", from_index(start + k), from_index(end)), share, zero)
        return share

    return scattered(ctx, filled(ctx, 0), (*grad.shape, *kernel), place, body, "sum")


@lowers(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool_backward(ctx: Context, grad: Value, x: Value, positions: Value) -> Value:
    """Each window's gradient goes to its maximum, whose place in the flattened spatial dimensions `positions` has."""
    assert ctx.node is not None
    rank = 3 if "3d" in str(ctx.node.target) else 2
    lead = len(x.shape) - rank
    spatial = x.shape[lead:]

    def place(i: tuple[Index, ...]) -> tuple[Index, ...]:
        flat = scalar_index(positions.at(i), 0, product(spatial) - 1)
        strides = contiguous_strides(spatial)
        return (*i[:lead], *(flat // s % n for s, n in zip(strides, spatial, strict=True)))

    return scattered(ctx, filled(ctx, 0), grad.shape, place, grad.at, "sum")


@lowers(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(ctx: Context, grad: Value, x: Value, padding: Sequence[int]) -> Value:
    return scattered(ctx, filled(ctx, 0), grad.shape, padded_places(x.shape, padding, replicated), grad.at, "sum")
