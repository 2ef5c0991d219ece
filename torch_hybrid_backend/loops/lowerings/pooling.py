"""Pooling and resampling over the last dimensions, with or without a batch dimension in front.

Windows are extra dimensions of the reduction's domain, behind the result's: (*lead, *out_spatial, *kernel).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index, contiguous_strides
from torch_hybrid_backend.loops.ir import Buffer, Expr, Map, ReduceOp, Value, compute_dtype, scalar_index
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers, reindex
from torch_hybrid_backend.loops.lowerings.arithmetic import lit
from torch_hybrid_backend.loops.lowerings.convolution import per_dimension
from torch_hybrid_backend.loops.lowerings.windows import (
    PerDimension,
    inside,
    pooled_dimensions,
    strides_of,
    window_size,
)
from torch_hybrid_backend.loops.ops import (
    add,
    call,
    cast,
    const,
    div,
    from_index,
    guard,
    is_float,
    logical_and,
    mul,
    sub,
    where,
)
from torch_hybrid_backend.sizes.size import Dim, ceil_div, divide, function, known_at_most, known_int, product

aten = torch.ops.aten


def lowest(dtype: str) -> float:
    """The neutral element of max."""
    if is_float(compute_dtype(dtype)):
        return -math.inf
    return torch.iinfo(getattr(torch, dtype)).min


# Maximum


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool(
    ctx: Context,
    x: Value,
    kernel_size: PerDimension,
    stride: PerDimension = (),
    padding: PerDimension = 0,
    dilation: PerDimension = 1,
    ceil_mode: bool = False,
) -> tuple[Value, Value | None]:
    """(maxima, their positions in the flattened spatial dimensions). NaN wins over everything; the first of equals counts."""
    rank = pooled_dimensions(ctx)
    kernel = per_dimension(kernel_size, rank)
    strides = strides_of(stride, kernel)
    paddings, dilations = per_dimension(padding, rank), per_dimension(dilation, rank)
    lead, spatial = len(x.shape) - rank, x.shape[len(x.shape) - rank :]

    def source(index: Sequence[Index], offset: Sequence[Index]) -> tuple[Index, ...]:
        return tuple(
            o * s - p + k * d for o, k, s, p, d in zip(index[lead:], offset, strides, paddings, dilations, strict=True)
        )

    def body(index: tuple[Index, ...]) -> Expr:
        place = source(index[: lead + rank], index[lead + rank :])
        return guard(
            inside(place, spatial), x.at((*index[:lead], *place)), const(lowest(x.dtype), compute_dtype(x.dtype))
        )

    domain, axes = (*ctx.shape, *kernel), tuple(range(lead + rank, lead + 2 * rank))
    values = ctx.realize(ReduceOp(Buffer(ctx.shape, x.dtype), domain, axes, "max", body))
    if not ctx.wants(1):
        return values, None
    window = ctx.realize(ReduceOp(Buffer(ctx.shape, "int64"), domain, axes, "argmax", body))

    def position(index: tuple[Index, ...]) -> Expr:
        in_window = scalar_index(window.at(index), 0, math.prod(kernel) - 1)
        offset = [in_window // s % k for s, k in zip(contiguous_strides(kernel), kernel, strict=True)]
        total: Expr = const(0, "int64")
        for i, n, s in zip(source(index, offset), spatial, contiguous_strides(spatial), strict=True):
            # A window of nothing but -inf may name a place in the padding: clamped, it is the first inside, as in eager.
            clamped = call("min", call("max", from_index(i), from_index(0)), from_index(n - 1))
            total = add(total, mul(clamped, from_index(s)))
        return total

    return values, Map(ctx.shape, "int64", position)


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(ctx: Context, x: Value, output_size: Sequence[int]) -> tuple[Value, Value | None]:
    """(maxima, their positions in the flattened spatial dimensions), as `max_pool`."""
    rank = len(output_size)
    if not ctx.wants(1) and rank == 2:
        return _adaptive(ctx, x, rank, "max"), None
    if ctx.abilities.scatters == "none":
        raise Refuse(
            Reason.ARGUMENT, "the positions of adaptive maxima, and those of three dimensions, are computed by eager"
        )
    values = _adaptive(ctx, x, rank, "max")
    window = _adaptive(ctx, x, rank, "argmax")
    lead = len(x.shape) - rank
    spatial, outs = tuple(map(known_int, x.shape[lead:])), tuple(map(known_int, ctx.shape[lead:]))
    kernel = tuple(map(known_int, adaptive_kernel(spatial, outs)))

    def position(index: tuple[Index, ...]) -> Expr:
        in_window = scalar_index(window.at(index), 0, math.prod(kernel) - 1)
        total = as_index(0)
        for o, n, m, k, step, inner in zip(
            index[lead:],
            spatial,
            outs,
            kernel,
            contiguous_strides(spatial),
            contiguous_strides(kernel),
            strict=True,
        ):
            total = total + (o * n // m + in_window // inner % k) * step
        return from_index(total)

    return values, Map(ctx.shape, "int64", position)


# Average


@lowers(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    ctx: Context,
    x: Value,
    kernel_size: PerDimension,
    stride: PerDimension = (),
    padding: PerDimension = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    if not is_float(compute_dtype(x.dtype)):
        raise Refuse(Reason.DTYPE, f"average pooling of {x.dtype} is left to eager")
    rank = pooled_dimensions(ctx)
    kernel = per_dimension(kernel_size, rank)
    strides = strides_of(stride, kernel)
    paddings = per_dimension(padding, rank)
    lead = len(x.shape) - rank
    spatial, outs = x.shape[lead:], ctx.shape[lead:]
    dtype = compute_dtype(x.dtype)

    # A single window is no larger than the image: some models average all of it by naming an enormous kernel.
    single = [out == 1 for out in outs]
    window = tuple(
        function("min", k - p, n) if one else k for one, k, p, n in zip(single, kernel, paddings, spatial, strict=True)
    )

    def body(index: tuple[Index, ...]) -> Expr:
        outer, offset = index[lead : lead + rank], index[lead + rank :]
        place = tuple(
            k if one else o * s - p + k
            for one, o, k, s, p in zip(single, outer, offset, strides, paddings, strict=True)
        )
        return guard(inside(place, spatial), x.at((*index[:lead], *place)), const(0, dtype))

    domain, axes = (*ctx.shape, *window), tuple(range(lead + rank, lead + 2 * rank))
    total = ctx.realize(ReduceOp(Buffer(ctx.shape, dtype), domain, axes, "sum", body))

    def divisor(index: tuple[Index, ...]) -> Expr:
        if divisor_override is not None:
            return const(divisor_override, dtype)
        windows = zip(index[lead:], kernel, strides, paddings, spatial, strict=True)
        return cast(functools.reduce(mul, [window_size(*w, count_include_pad) for w in windows]), dtype)

    exact = all(
        (known_at_most((out - 1) * s + k, n + 2 * p) or out == (n + 2 * p - k) // s + 1)
        and (count_include_pad or p == 0)
        for out, k, s, p, n in zip(outs, kernel, strides, paddings, spatial, strict=True)
    )
    if exact:
        count = divisor_override or math.prod(kernel)
        return ctx.pointwise(lambda a: div(a, lit(a, count)), total)
    divisors = Map(ctx.shape, dtype, divisor)
    return ctx.pointwise(div, total, divisors)


@lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(ctx: Context, x: Value, output_size: Sequence[int]) -> Value:
    return _adaptive(ctx, x, len(output_size), "sum")


@lowers(aten.adaptive_avg_pool1d.default)
def adaptive_avg_pool1d(ctx: Context, x: Value, output_size: Sequence[int]) -> Value:
    return _adaptive(ctx, x, 1, "sum")


def _adaptive(ctx: Context, x: Value, rank: int, combiner: str) -> Value:
    """Reduce windows from floor(o * n / m) to ceil((o + 1) * n / m), all of one size if m divides n."""
    lead = len(x.shape) - rank
    spatial, outs = x.shape[lead:], ctx.shape[lead:]
    kernel = adaptive_kernel(spatial, outs)
    dtype = compute_dtype(x.dtype)
    neutral = const(0 if combiner == "sum" else lowest(x.dtype), dtype)

    def body(index: tuple[Index, ...]) -> Expr:
        covered: Expr = const(True, "bool")
        place = []
        for o, k, n, m in zip(index[lead : lead + rank], index[lead + rank :], spatial, outs, strict=True):
            i = o * n // m + k
            if n % m != 0:
                covered = logical_and(covered, call("lt", from_index(i), from_index(end_index(o, n, m))))
            place.append(i)
        return guard(covered, x.at((*index[:lead], *place)), neutral)

    domain, axes = (*ctx.shape, *kernel), tuple(range(lead + rank, lead + 2 * rank))
    out_dtype = {"sum": dtype, "max": x.dtype, "argmax": "int64"}[combiner]
    total = ctx.realize(ReduceOp(Buffer(ctx.shape, out_dtype), domain, axes, combiner, body))
    if combiner != "sum":
        return total
    if all(n % m == 0 for n, m in zip(spatial, outs, strict=True)):
        return ctx.pointwise(lambda a: div(a, lit(a, product(kernel))), total)

    def count(index: tuple[Index, ...]) -> Expr:
        sizes = [
            from_index(end_index(o, n, m) - o * n // m) for o, n, m in zip(index[lead:], spatial, outs, strict=True)
        ]
        return cast(functools.reduce(mul, sizes), dtype)

    return ctx.pointwise(div, total, Map(ctx.shape, dtype, count))


def adaptive_kernel(spatial: Sequence[Dim], outs: Sequence[Dim]) -> tuple[Dim, ...]:
    """The largest window in each dimension; where a size is only known at run time, at most one larger."""
    return tuple(_largest(n, m) for n, m in zip(spatial, outs, strict=True))


def _largest(n: Dim, m: Dim) -> Dim:
    if isinstance(n, int) and isinstance(m, int):
        return max(-(-(o + 1) * n // m) - o * n // m for o in range(m))
    return n // m if n % m == 0 else ceil_div(n, m) + 1


def end_index(o: Index, n: Dim, m: Dim) -> Index:
    return ((o + 1) * n + m - 1) // m


# Resampling


@lowers(aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default)
def upsample_nearest(ctx: Context, x: Value, output_size: Sequence[int], *scales: float | None) -> Value:
    return _nearest(ctx, x, scales, 0.0)


@lowers(aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec)
def upsample_nearest_vec(
    ctx: Context, x: Value, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> Value:
    return _nearest(ctx, x, scale_factors or (), 0.0)


@lowers(
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
)
def upsample_nearest_exact(ctx: Context, x: Value, output_size: Sequence[int], *scales: float | None) -> Value:
    return _nearest(ctx, x, scales, 0.5)


@lowers(aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact3d.vec)
def upsample_nearest_exact_vec(
    ctx: Context, x: Value, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> Value:
    return _nearest(ctx, x, scale_factors or (), 0.5)


def _scale(n: Dim, m: Dim, scale: float | None, dtype: str) -> Expr:
    """Input pixels per output pixel."""
    if scale is not None and scale > 0:
        return const(1 / scale, dtype)
    if isinstance(n, int) and isinstance(m, int):
        return const(n / m, dtype)
    return div(const(n, dtype), const(m, dtype))


def _nearest(ctx: Context, x: Value, scales: Sequence[float | None], shift: float) -> Value:
    return reindex(x, ctx.shape, nearest_places(x.shape, ctx.shape, scales, shift))


def nearest_places(
    source: Sequence[Dim], result: Sequence[Dim], scales: Sequence[float | None], shift: float
) -> Callable[[tuple[Index, ...]], tuple[Index, ...]]:
    """Function from pixels of the result to those of the source. `shift`: 0, or 0.5 for the "exact" operators."""
    factors = [*scales, *[None] * (len(source) - 2 - len(scales))]

    def place(o: Index, n: Dim, m: Dim, factor: float | None) -> Index:
        if n == m and factor in (None, 1.0):
            return o
        if _is_ratio(n, m, factor, shift):
            return o * n // m
        # A scale that is no ratio of the sizes: as eager, in float32.
        scaled = mul(add(from_index(o, "float32"), const(shift, "float32")), _scale(n, m, factor, "float32"))
        position = call("min", cast(call("floor", scaled), "int64"), from_index(n - 1))
        return scalar_index(position, 0, n - 1)

    return lambda i: (*i[:2], *map(place, i[2:], source[2:], result[2:], factors))


def _is_ratio(n: Dim, m: Dim, factor: float | None, shift: float) -> bool:
    """True if pixel o of m is that at o * n // m, as eager finds it in float32."""
    if isinstance(n, int) and isinstance(m, int):
        ratio = 1 / factor if factor is not None and factor > 0 else n / m
        places = torch.arange(m, dtype=torch.float32, device=str(CPU)) + shift
        table = (places * torch.tensor(ratio, dtype=torch.float32, device=str(CPU))).floor()
        return [min(int(i), n - 1) for i in table] == [i * n // m for i in range(m)]
    times, rest = divide(m, n)
    # A power of two: no product is rounded, of numbers below 2 ** 23.
    return isinstance(times, int) and rest == 0 and times & (times - 1) == 0 and factor in (None, times)


@lowers(aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default)
def upsample_linear(
    ctx: Context, x: Value, output_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Value:
    return _linear(ctx, x, align_corners, scales)


@lowers(aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec)
def upsample_linear_vec(
    ctx: Context,
    x: Value,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Value:
    return _linear(ctx, x, align_corners, scale_factors or ())


# A source position in one dimension, and its weight.
Tap = tuple[Index, Expr]


def _linear(ctx: Context, x: Value, align_corners: bool, scales: Sequence[float | None]) -> Value:
    """Linear interpolation in each of the last dimensions, weights in the compute dtype."""
    return _blended(ctx, x, linear_taps, align_corners, scales)


@lowers(aten.upsample_bicubic2d.default)
def upsample_bicubic(
    ctx: Context, x: Value, output_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Value:
    return _bicubic(ctx, x, align_corners, scales)


@lowers(aten.upsample_bicubic2d.vec)
def upsample_bicubic_vec(
    ctx: Context,
    x: Value,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Value:
    return _bicubic(ctx, x, align_corners, scale_factors or ())


def _bicubic(ctx: Context, x: Value, align_corners: bool, scales: Sequence[float | None]) -> Value:
    if ctx.abilities.max_taps < 16:
        raise Refuse(Reason.ARGUMENT, "an interpolation of 16 neighbours is left to eager")
    return _blended(ctx, x, cubic_taps, align_corners, scales)


def _blended(
    ctx: Context,
    x: Value,
    taps: Callable[[Index, Dim, Dim, float | None, bool, str], list[Tap]],
    align_corners: bool,
    scales: Sequence[float | None],
) -> Value:
    if not is_float(compute_dtype(x.dtype)):
        raise Refuse(Reason.DTYPE, f"interpolation of {x.dtype} is left to eager")
    dtype = compute_dtype(x.dtype)
    factors = [*scales, *[None] * (len(x.shape) - 2 - len(scales))]

    def at(index: tuple[Index, ...]) -> Expr:
        pairs = [
            taps(*item, align_corners, dtype)
            for item in zip(index[2:], x.shape[2:], ctx.shape[2:], factors, strict=True)
        ]

        def blend(position: tuple[Index, ...], rest: list[list[Tap]]) -> Expr:
            if not rest:
                return x.at(position)
            parts = [(blend((*position, i), rest[1:]), w) for i, w in rest[0]]
            return parts[0][0] if len(parts) == 1 else functools.reduce(add, [mul(v, w) for v, w in parts])

        return blend(index[:2], pairs)

    return Map(ctx.shape, x.dtype, at)


def linear_taps(o: Index, n: Dim, m: Dim, factor: float | None, align_corners: bool, dtype: str) -> list[Tap]:
    """Input indices and weights for the linear interpolation of output pixel o of m, from n input pixels."""
    if n == m:
        return [(o, const(1, dtype))]
    if n == 1:
        return [(as_index(0), const(1, dtype))]
    place = _place(o, n, m, factor, align_corners, dtype)
    place = place if align_corners else where(call("lt", place, const(0, dtype)), const(0, dtype), place)
    low = call("min", cast(place, "int64"), from_index(n - 1))
    high = call("min", add(low, from_index(1)), from_index(n - 1))
    weight = call("min", call("max", sub(place, cast(low, dtype)), const(0, dtype)), const(1, dtype))
    return [
        (scalar_index(low, 0, n - 1), sub(const(1, dtype), weight)),
        (scalar_index(high, 0, n - 1), weight),
    ]


def cubic_taps(o: Index, n: Dim, m: Dim, factor: float | None, align_corners: bool, dtype: str) -> list[Tap]:
    """`linear_taps` for cubic convolution with a = -0.75 (Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981)."""
    place = _place(o, n, m, factor, align_corners, dtype)
    start = call("floor", place)
    t = sub(place, start)
    a, one = -0.75, const(1, dtype)

    def near(x: Expr) -> Expr:  # |x| <= 1
        return add(mul(mul(sub(mul(const(a + 2, dtype), x), const(a + 3, dtype)), x), x), one)

    def far(x: Expr) -> Expr:  # 1 < |x| < 2
        inner = sub(mul(const(a, dtype), x), const(5 * a, dtype))
        return sub(mul(add(mul(inner, x), const(8 * a, dtype)), x), const(4 * a, dtype))

    other = sub(one, t)
    weights = [far(add(t, one)), near(t), near(other), far(add(other, one))]
    first = cast(start, "int64")
    taps = []
    for k, weight in enumerate(weights):
        position = call("max", call("min", add(first, from_index(k - 1)), from_index(n - 1)), from_index(0))
        taps.append((scalar_index(position, 0, n - 1), weight))
    return taps


def _place(o: Index, n: Dim, m: Dim, factor: float | None, align_corners: bool, dtype: str) -> Expr:
    """Place of output pixel o between input pixels (area_pixel_compute_source_index); before the first it is negative."""
    if align_corners:
        # A single pixel is the first: its place is 0 times whatever the scale is.
        scale = _scale(n - 1, function("max", m - 1, 1), None, dtype)
        return mul(from_index(o, dtype), scale)
    half = const(0.5, dtype)
    return sub(mul(add(from_index(o, dtype), half), _scale(n, m, factor, dtype)), half)
