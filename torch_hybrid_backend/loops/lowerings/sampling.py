"""Images and volumes sampled at positions that a grid gives: `grid_sampler_2d` and `grid_sampler_3d`.

The positions are computed once for all channels, in pixels and with their padding. The interpolation reads its 4 or 8 neighbours there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import INDEX_DTYPE, Expr, Map, Value, scalar_index
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.ops import add, call, cast, const, div, logical_and, mul, sub, where
from torch_hybrid_backend.sizes.size import known_int

aten = torch.ops.aten

_BILINEAR, _NEAREST = 0, 1  # as PyTorch numbers them (GridSamplerInterpolation)
_VOLUME = 3  # dimensions
_ZEROS, _BORDER = 0, 1  # GridSamplerPadding; the third reflects


@lowers(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(ctx: Context, x: Value, grid: Value, interpolation: int, padding: int, align_corners: bool) -> Value:
    """x (N, C, *spatial), grid (N, *places, rank) in -1 .. 1, the last dimension first -> (N, C, *places)."""
    if x.dtype not in ("float32", "float64"):
        raise Refuse(Reason.DTYPE, f"sampling of {x.dtype} is left to eager")
    if interpolation not in (_BILINEAR, _NEAREST):
        raise Refuse(Reason.LIBRARY, "PyTorch's own operator is called: bicubic sampling reads many pixels for each")
    if len(x.shape) == 4 and x.shape[0] != 1:
        why = "PyTorch's own operator is called: it samples images faster on each core, and divides a batch among cores"
        raise Refuse(Reason.LIBRARY, why)
    spatial = tuple(map(known_int, x.shape[2:]))
    rank, dtype = len(spatial), x.dtype

    def pixels_of(dimension: int) -> Value:
        def at(index: tuple[Index, ...]) -> Expr:
            coordinate = grid.at((*index, as_index(rank - 1 - dimension)))
            return _pixel(coordinate, spatial[dimension], rank, padding, align_corners)

        return ctx.materialize(Map(grid.shape[:-1], dtype, at))

    # A buffer for each dimension: what neighbouring places need lies side by side.
    pixels = [pixels_of(dimension) for dimension in range(rank)]
    source, zero = ctx.materialize(x), const(0, dtype)

    def at(index: tuple[Index, ...]) -> Expr:
        batch, channel, *place = index
        positions = [each.at((batch, *place)) for each in pixels]
        if interpolation == _NEAREST:
            corners = [[(call("round_even", p), const(1, dtype))] for p in positions]
        else:
            floors = [call("floor", p) for p in positions]
            fractions = [sub(p, f) for p, f in zip(positions, floors, strict=True)]
            corners = [
                [(f, sub(const(1, dtype), w)), (add(f, const(1, dtype)), w)]
                for f, w in zip(floors, fractions, strict=True)
            ]
        total: Expr | None = None
        for corner in itertools.product(*corners):
            inside, read = _read(source, batch, channel, [position for position, _ in corner], spatial, dtype)
            # Outside of an image PyTorch adds 0 times a weight, which may be NaN; outside of a volume nothing.
            value = read if rank == _VOLUME else where(inside, read, zero)
            if interpolation == _BILINEAR:
                weight = corner[0][1]
                for _, each in corner[1:]:
                    weight = mul(weight, each)
                value = mul(value, weight)
            value = where(inside, value, zero) if rank == _VOLUME else value
            total = value if total is None else add(total, value)
        assert total is not None
        return total

    return Map(ctx.shape, dtype, at)


def _read(
    source: Value, batch: Index, channel: Index, positions: Sequence[Expr], spatial: Sequence[int], dtype: str
) -> tuple[Expr, Expr]:
    """True if whole positions lie in the image, and the pixel there; outside of the image any pixel."""
    inside: Expr = const(True, "bool")
    place = []
    for position, size in zip(positions, spatial, strict=True):
        last = const(size - 1, dtype)
        inside = logical_and(inside, call("ge", position, const(0, dtype)))
        inside = logical_and(inside, call("le", position, last))
        # Clamped before the cast, which large numbers do not survive, and after it: what a cast makes of NaN is anything.
        near = cast(call("max", call("min", position, last), const(0, dtype)), INDEX_DTYPE)
        near = call("min", call("max", near, const(0, INDEX_DTYPE)), const(size - 1, INDEX_DTYPE))
        place.append(scalar_index(near, 0, size - 1))
    return inside, source.at((batch, channel, *place))


def _pixel(coordinate: Expr, size: int, rank: int, padding: int, align_corners: bool) -> Expr:
    """A coordinate of the grid in pixels, with the padding; rounded as PyTorch's operator rounds."""
    dtype = coordinate.dtype
    shifted = add(coordinate, const(1, dtype))
    if align_corners:
        position = mul(shifted, const((size - 1) / 2, dtype))
    else:
        position = div(sub(mul(shifted, const(size, dtype)), const(1, dtype)), const(2, dtype))
    if padding == _ZEROS:
        return position
    if padding != _BORDER:
        position = _reflected(position, size, align_corners)
    zero, last = const(0, dtype), const(size - 1, dtype)
    # What becomes of NaN differs in PyTorch's two operators.
    if rank != _VOLUME:
        return where(call("gt", position, zero), call("min", position, last), zero)
    return where(call("lt", position, last), call("max", position, zero), last)


def _reflected(position: Expr, size: int, align_corners: bool) -> Expr:
    """A position reflected at the centres of the outermost pixels, or at their outer edges, until it is between them."""
    dtype = position.dtype
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if span == 0:
        return const(0, dtype)
    away = call("abs", sub(position, const(low, dtype)))
    extra = call("fmod", away, const(2 * span, dtype))
    return add(call("min", extra, sub(const(2 * span, dtype), extra)), const(low, dtype))
