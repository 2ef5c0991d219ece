"""Views: the same elements under other indices. Bijections carry their inverse, so that they stay usable in epilogues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_hybrid_backend.core.limits import MAX_ELEMENTS
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index, linear, reshape_index
from torch_hybrid_backend.loops.ir import Value
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers, reindex
from torch_hybrid_backend.sizes.size import Dim, Size, function, known_at_most, known_int, known_less

aten = torch.ops.aten


def axis(dim: int, rank: int) -> int:
    """A dimension counted from the front; a tensor without dimensions has one for this purpose, as in eager."""
    return dim % max(rank, 1)


def reshaped(value: Value, shape: tuple[Dim, ...]) -> Value:
    """The value's elements, in row-major order, in another shape of as many elements."""
    if shape == value.shape:
        return value
    source = value.shape
    return reindex(
        value,
        shape,
        lambda index: reshape_index(index, source, shape),
        lambda index: reshape_index(index, shape, source),
    )


def permuted(value: Value, order: Sequence[int]) -> Value:
    """Dimension d of the result is dimension order[d] of the value."""
    inverse = tuple(sorted(range(len(order)), key=lambda d: order[d]))
    return reindex(
        value,
        tuple(value.shape[d] for d in order),
        lambda index: tuple(index[d] for d in inverse),
        lambda index: tuple(index[d] for d in order),
    )


def channelwise(value: Value, shape: tuple[Dim, ...]) -> Value:
    """A vector along dimension 1 of a tensor of the given shape."""
    return reindex(value, shape, lambda index: (index[1],))


def expanded(value: Value, shape: tuple[Dim, ...]) -> Value:
    """The value broadcast to `shape`; a bijection, with its inverse, where no dimension is stretched."""
    if shape == value.shape:
        return value
    lead = len(shape) - len(value.shape)
    pinned = [size == 1 for size in value.shape]
    bijective = all(size == 1 for size in shape[:lead]) and shape[lead:] == value.shape

    def forward(index: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(as_index(0) if p else i for p, i in zip(pinned, index[lead:], strict=True))

    def inverse(index: tuple[Index, ...]) -> tuple[Index, ...]:
        return (as_index(0),) * lead + index

    return reindex(value, shape, forward, inverse if bijective else None)


def sliced(value: Value, dim: int, start: Dim, size: Dim, step: int = 1) -> Value:
    """Elements start, start + step, ... of one dimension, `size` of them."""
    if start == 0 and step == 1 and size == value.shape[dim]:
        return value
    shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
    return reindex(value, shape, lambda index: (*index[:dim], index[dim] * step + start, *index[dim + 1 :]))


def selected(value: Value, dim: int, position: Dim) -> Value:
    """The slice at one position of a dimension, which disappears."""
    shape = (*value.shape[:dim], *value.shape[dim + 1 :])
    return reindex(value, shape, lambda index: (*index[:dim], as_index(position), *index[dim:]))


def slice_bounds(size: Dim, start: Dim | None, end: Dim | None) -> tuple[Dim, Dim]:
    """A slice's first position and the one behind its last, as Python clips them."""
    if not any(isinstance(bound, Size) for bound in (size, start, end)):
        first, last, _ = slice(start, end).indices(known_int(size))
        return first, max(first, last)
    begin = 0 if start is None else _clipped(start, size)
    return begin, function("max", begin, size if end is None else _clipped(end, size))


def _clipped(position: Dim, size: Dim) -> Dim:
    if isinstance(position, int) and abs(position) >= MAX_ELEMENTS:  # no number for a kernel, and none is needed
        return size if position > 0 else 0
    if known_at_most(0, position):
        return function("min", position, size)
    if known_less(position, 0):
        return function("max", position + size, 0)
    raise Refuse(
        Reason.SYMBOLIC_SHAPE, f"whether {position} counts from the front or the end is only known at run time"
    )


@lowers(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def view(ctx: Context, x: Value, *_shape: object) -> Value:
    """The value in the shape of the node's result, in which -1 is resolved."""
    return reshaped(x, ctx.shape)


@lowers(
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.expand.default,
    aten.expand_copy.default,
)
def expand(ctx: Context, x: Value, *_shape: object, **_options: object) -> Value:
    """Identities (values have no memory format) and broadcasts."""
    return expanded(x, ctx.shape)


@lowers(aten.permute.default)
def permute(ctx: Context, x: Value, dims: Sequence[int]) -> Value:
    return permuted(x, [axis(d, len(dims)) for d in dims])


@lowers(aten.transpose.int)
def transpose(ctx: Context, x: Value, dim0: int, dim1: int) -> Value:
    rank = len(x.shape)
    order = list(range(rank))
    if rank:
        first, second = axis(dim0, rank), axis(dim1, rank)
        order[first], order[second] = second, first
    return permuted(x, order)


@lowers(aten.t.default)
def t(ctx: Context, x: Value) -> Value:
    return permuted(x, range(len(x.shape))[::-1])


@lowers(aten.slice.Tensor)
def slice_(
    ctx: Context, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    dim = axis(dim, len(x.shape))
    first, _ = slice_bounds(x.shape[dim], start, end)
    # Of no elements the last is one step before the first.
    ctx.rely_on(first, x.shape[dim] - 1 - (first + (ctx.shape[dim] - 1) * step))
    return sliced(x, dim, first, ctx.shape[dim], step)


@lowers(aten.select.int)
def select(ctx: Context, x: Value, dim: int, index: Dim) -> Value:
    dim = axis(dim, len(x.shape))
    position = wrapped(index, x.shape[dim])
    ctx.rely_on(position, x.shape[dim] - 1 - position)
    return selected(x, dim, position)


def wrapped(index: Dim, size: Dim) -> Dim:
    """A position in a dimension, counted from the front; numbers below zero count from the end."""
    if known_at_most(0, index):
        return index
    if known_less(index, 0):
        return index + size
    raise Refuse(Reason.SYMBOLIC_SHAPE, f"whether {index} counts from the front or the end is only known at run time")


@lowers(aten.split.Tensor, aten.split_with_sizes.default)
def split(ctx: Context, x: Value, split_size: int | Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    dim = axis(dim, len(x.shape))
    parts = []
    start: Dim = 0
    for out in ctx.outs:
        parts.append(sliced(x, dim, start, out.shape[dim]))
        start = start + out.shape[dim]
    ctx.rely_on(*(out.shape[dim] for out in ctx.outs), x.shape[dim] - start)
    return tuple(parts)


@lowers(aten.unbind.int)
def unbind(ctx: Context, x: Value, dim: int = 0) -> tuple[Value, ...]:
    dim = axis(dim, len(x.shape))
    return tuple(selected(x, dim, position) for position in range(x.shape[dim]))


@lowers(aten.flip.default)
def flip(ctx: Context, x: Value, dims: Sequence[int]) -> Value:
    flipped = {axis(d, len(x.shape)) for d in dims}

    def turn(index: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(x.shape[d] - 1 - i if d in flipped else i for d, i in enumerate(index))

    return reindex(x, x.shape, turn, turn)


@lowers(aten.roll.default)
def roll(ctx: Context, x: Value, shifts: Sequence[int] | int, dims: Sequence[int] | int = ()) -> Value:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        flat = reshaped(x, (math.prod(x.shape),))
        return reshaped(_rolled(flat, {0: shifts[0]}), x.shape)
    total: dict[int, int] = {}
    for d, shift in zip(dims, shifts, strict=True):
        total[axis(d, len(x.shape))] = total.get(axis(d, len(x.shape)), 0) + shift
    return _rolled(x, total)


def _rolled(x: Value, shifts: dict[int, int]) -> Value:
    def move(index: tuple[Index, ...], sign: int) -> tuple[Index, ...]:
        return tuple(
            (i + sign * shifts[d] % x.shape[d]) % x.shape[d] if d in shifts else i for d, i in enumerate(index)
        )

    return reindex(x, x.shape, lambda index: move(index, -1), lambda index: move(index, 1))


@lowers(aten.repeat.default)
def repeat(ctx: Context, x: Value, repeats: Sequence[int]) -> Value:
    lead = len(ctx.shape) - len(x.shape)
    return reindex(x, ctx.shape, lambda index: tuple(i % n for i, n in zip(index[lead:], x.shape, strict=True)))


@lowers(aten.diagonal.default)
def diagonal(ctx: Context, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """The diagonal of two dimensions, which becomes the last one."""
    row, column = axis(dim1, len(x.shape)), axis(dim2, len(x.shape))

    def forward(index: tuple[Index, ...]) -> tuple[Index, ...]:
        rest = iter(index[:-1])
        at = {row: index[-1] + max(-offset, 0), column: index[-1] + max(offset, 0)}
        return tuple(at[d] if d in at else next(rest) for d in range(len(x.shape)))

    return reindex(x, ctx.shape, forward)


@lowers(aten.unfold.default)
def unfold(ctx: Context, x: Value, dimension: int, size: int, step: int) -> Value:
    """Windows of one dimension; the place in the window becomes the last dimension."""
    if not x.shape:
        return reshaped(x, ctx.shape)
    dim = axis(dimension, len(x.shape))
    ctx.rely_on(x.shape[dim] - size - (ctx.shape[dim] - 1) * step)
    return reindex(x, ctx.shape, lambda index: (*index[:dim], index[dim] * step + index[-1], *index[dim + 1 : -1]))


@lowers(aten.pixel_shuffle.default)
def pixel_shuffle(ctx: Context, x: Value, upscale_factor: int) -> Value:
    """(*, C r^2, H, W) -> (*, C, H r, W r)."""
    *lead, channels, height, width = x.shape
    r, rank = upscale_factor, len(lead)
    blocks = reshaped(x, (*lead, channels // (r * r), r, r, height, width))
    order = [*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2]
    return reshaped(permuted(blocks, order), ctx.shape)


@lowers(aten.pixel_unshuffle.default)
def pixel_unshuffle(ctx: Context, x: Value, downscale_factor: int) -> Value:
    """(*, C, H r, W r) -> (*, C r^2, H, W)."""
    *lead, channels, height, width = x.shape
    r, rank = downscale_factor, len(lead)
    blocks = reshaped(x, (*lead, channels, height // r, r, width // r, r))
    order = [*range(rank), rank, rank + 2, rank + 4, rank + 1, rank + 3]
    return reshaped(permuted(blocks, order), ctx.shape)


@lowers(aten.as_strided.default)
def as_strided(
    ctx: Context, x: Value, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Value:
    """A view by the strides of the traced input. Refused unless those cover the input's elements densely, in any order, or where sizes are
    known only at run time, unless the view has the input's own dimensions."""
    node = ctx.node.args[0] if ctx.node is not None else None
    meta = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(meta, torch.Tensor):
        raise Refuse(Reason.ARGUMENT, "as_strided of something that is no tensor of the graph")
    spec = TensorSpec.of(meta)
    if not spec.is_static or any(isinstance(n, Size) for n in (*size, *stride, *ctx.shape)):
        axes = _axes(spec, size, stride) if storage_offset in (None, meta.storage_offset()) else None
        if axes is not None:
            return reindex(
                x, ctx.shape, lambda index: tuple(as_index(0) if axis is None else index[axis] for axis in axes)
            )
        raise Refuse(Reason.SYMBOLIC_SHAPE, "as_strided with sizes that are only known at run time")
    order = _memory_order(x.shape, tuple(meta.stride()))
    start = 0 if storage_offset is None else storage_offset - int(meta.storage_offset())
    last = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if order is None or start < 0 or last >= math.prod(x.shape):
        raise Refuse(Reason.ARGUMENT, "as_strided reads memory that its input's elements do not cover densely")
    flat = reshaped(permuted(x, order), (math.prod(x.shape),))
    strides = tuple(int(s) for s in stride)
    return reindex(flat, ctx.shape, lambda index: (linear(index, strides) + start,))


def _axes(spec: TensorSpec, size: Sequence[Dim], stride: Sequence[Dim]) -> list[int | None] | None:
    """The view's dimension that each dimension of a tensor is, None for one of size 1; None where the view has others."""
    axes: list[int | None] = [None] * len(spec.shape)
    left = {axis: form for axis, form in enumerate(zip(spec.shape, spec.strides, strict=True)) if form[0] != 1}
    for position, form in enumerate(zip(size, stride, strict=True)):
        if form[0] == 1:
            continue
        axis = next((axis for axis, each in left.items() if each == form), None)
        if axis is None:
            return None
        del left[axis]
        axes[axis] = position
    return None if left else axes


def _memory_order(shape: tuple[Any, ...], strides: tuple[int, ...]) -> list[int] | None:
    """The dimensions from the slowest to the fastest in memory; None where elements overlap or leave gaps."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d]))
    step = 1
    for d in reversed(order):
        if shape[d] > 1 and strides[d] != step:
            return None
        step *= shape[d]
    return order
