"""Indexing by data, joining, padding and replacing parts.

Eager raises for data-dependent indices out of range. Kernels clamp them, after wrapping negative ones where eager wraps, so that no memory
outside the tensor is read. Kernels that can set a flag have the call raise (`refuse_outside`); those of a GPU cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import (
    INDEX_DTYPE,
    Const,
    Expr,
    FromIndex,
    InverseFn,
    Map,
    Value,
    compute_dtype,
    scalar_index,
)
from torch_hybrid_backend.loops.lowering import Context, Refuse, broadcast, lowers, reindex
from torch_hybrid_backend.loops.lowerings.arithmetic import lit
from torch_hybrid_backend.loops.lowerings.views import axis, expanded, reshaped, slice_bounds, wrapped
from torch_hybrid_backend.loops.ops import (
    add,
    call,
    cast,
    const,
    from_index,
    guard,
    index_in,
    logical_and,
    logical_or,
    sub,
    where,
)
from torch_hybrid_backend.sizes.size import Dim, known_at_most, known_less
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten


def bounded(scalar: Expr, size: Dim, wrap: bool) -> Index:
    """A scalar as an index of a dimension: negatives counted from the end where `wrap`, then clamped to 0 .. size-1."""
    if size == 1:
        return as_index(0)
    if isinstance(scalar, FromIndex) and _lies_in(scalar.index, size):
        return scalar.index
    if isinstance(scalar, Const) and isinstance(size, int):
        position = int(scalar.value)
        return as_index(min(max(position + size if wrap and position < 0 else position, 0), size - 1))
    wide = cast(scalar, INDEX_DTYPE)
    if wrap:
        wide = where(call("lt", wide, lit(wide, 0)), add(wide, lit(wide, size)), wide)
    return scalar_index(call("min", call("max", wide, lit(wide, 0)), lit(wide, size - 1)), 0, size - 1)


def refuse_outside(ctx: Context, positions: Value, size: Dim, wrap: bool) -> None:
    """Have calls raise for positions outside 0 .. size-1, where `wrap` outside -size .. size-1."""
    if positions.dtype not in ("int32", "int64"):
        raise Refuse(Reason.DTYPE, f"indices of {positions.dtype} are an error in eager")
    if _are_codes(ctx):
        return

    def is_outside(scalar: Expr) -> Expr:
        wide = cast(scalar, INDEX_DTYPE)
        lowest = add(wide, lit(wide, size)) if wrap else wide
        return logical_or(call("lt", lowest, lit(wide, 0)), call("ge", wide, lit(wide, size)))

    ctx.refuse(positions, is_outside)


def _are_codes(ctx: Context) -> bool:
    """True if the indices are computed from parameters of unsigned bytes: codes of compressed weights. Checking them would read them twice."""
    assert ctx.node is not None
    pending, read = (
        [n for n in ctx.node.all_input_nodes if n.meta["val"].dtype in (torch.int32, torch.int64)],
        set[torch.fx.Node](),
    )
    sources: list[torch.fx.Node] = []
    while pending:
        node = pending.pop()
        if node in read:
            continue
        read.add(node)
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.dtype is torch.uint8:
            sources.append(node)
        elif not node.all_input_nodes:
            return False
        else:
            pending += node.all_input_nodes
    return bool(sources)


def _lies_in(index: Index, size: Dim) -> bool:
    return known_at_most(0, index.low) and known_less(index.high, size)


def replaced(index: tuple[Index, ...], dim: int, by: Index) -> tuple[Index, ...]:
    """The index with another position in one dimension."""
    return (*index[:dim], by, *index[dim + 1 :])


@lowers(aten.embedding.default)
def embedding(
    ctx: Context,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    """Rows of weight (V, D) at `indices`."""
    refuse_outside(ctx, indices, weight.shape[0], wrap=False)

    def at(index: tuple[Index, ...]) -> Expr:
        return weight.at((bounded(indices.at(index[:-1]), weight.shape[0], wrap=False), index[-1]))

    return Map(ctx.shape, ctx.out.dtype, at)


@lowers(aten.index_select.default)
def index_select(ctx: Context, x: Value, dim: int, index: Value) -> Value:
    """Slices of one dimension at `index` (1-D or a scalar)."""
    if not x.shape:
        refuse_outside(ctx, index, 1, wrap=False)
        return reshaped(x, ctx.shape)
    d, positions = axis(dim, len(x.shape)), reshaped(index, (ctx.shape[axis(dim, len(x.shape))],))
    refuse_outside(ctx, index, x.shape[d], wrap=False)

    def at(place: tuple[Index, ...]) -> Expr:
        return x.at(replaced(place, d, bounded(positions.at((place[d],)), x.shape[d], wrap=False)))

    return Map(ctx.shape, ctx.out.dtype, at)


@lowers(aten.gather.default)
def gather(ctx: Context, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    """x at the positions `index` gives along one dimension."""
    if not x.shape:
        refuse_outside(ctx, index, 1, wrap=False)
        return expanded(x, ctx.shape)
    d = axis(dim, len(x.shape))
    refuse_outside(ctx, index, x.shape[d], wrap=False)
    positions = reshaped(index, ctx.shape)

    def at(place: tuple[Index, ...]) -> Expr:
        position = bounded(positions.at(place), x.shape[d], wrap=False)
        return x.at(replaced(place, d, position) if index.shape else (position,))

    return Map(ctx.shape, ctx.out.dtype, at)


@lowers(aten.index.Tensor)
def index_(ctx: Context, x: Value, indices: Sequence[Value | None]) -> Value:
    """NumPy's indexing by broadcasting integer tensors: negatives wrap."""
    result: Value = unsafe_index(ctx, x, indices)
    refuse_places(ctx, x, indices)
    return result


def refuse_places(ctx: Context, x: Value, indices: Sequence[Value | None]) -> None:
    """Have calls raise where `x[indices]` does."""
    for positions, size in zip(indices, x.shape, strict=False):
        if positions is not None:
            refuse_outside(ctx, positions, size, wrap=True)


@lowers(aten._unsafe_index.Tensor)
def unsafe_index(ctx: Context, x: Value, indices: Sequence[Value | None]) -> Value:
    """Lower `x[indices]`, for positions that are known to be in range: PyTorch's formulas compute them."""
    given = {d: t for d, t in enumerate(indices) if t is not None}
    if any(t.dtype in ("bool", "uint8") for t in given.values()):
        raise Refuse(Reason.ARGUMENT, "indexing by a mask gives a shape that depends on data")
    if not given:
        return expanded(x, ctx.shape)
    source = indexed_place(x, given)
    return Map(ctx.shape, ctx.out.dtype, lambda place: x.at(source(place)))


def indexed_place(x: Value, given: Mapping[int, Value]) -> InverseFn:
    """Place in x of an element of `x[given]`, by NumPy's rules: integer tensors for some dimensions, broadcast against each other."""
    common = _common_shape([t.shape for t in given.values()])
    positions = {d: broadcast(t, common) for d, t in given.items()}
    first = _first(given)

    def source(place: tuple[Index, ...]) -> tuple[Index, ...]:
        inner = place[first : first + len(common)]
        rest = iter((*place[:first], *place[first + len(common) :]))
        return tuple(
            bounded(positions[d].at(inner), size, wrap=True) if d in positions else next(rest)
            for d, size in enumerate(x.shape)
        )

    return source


def indexed_shape(x: Value, given: Mapping[int, Value]) -> tuple[Dim, ...]:
    """The shape of `x[given]`."""
    rest = [n for d, n in enumerate(x.shape) if d not in given]
    first = _first(given)
    return (*rest[:first], *_common_shape([t.shape for t in given.values()]), *rest[first:])


def _first(given: Mapping[int, Value]) -> int:
    """Index tensors side by side replace their dimensions in place; separated ones move to the front."""
    dims = sorted(given)
    return dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0


def _common_shape(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """The shape that tensors of these shapes broadcast to."""
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*aligned, strict=True))


# Joining


@lowers(aten.cat.default)
def cat(ctx: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenate. The input that an element comes from is found by bisection, so that 32 inputs cost five comparisons, not 31."""
    parts = [t for t in tensors if 0 not in t.shape]
    d = axis(dim, len(ctx.shape))
    return _joined(
        ctx, parts, [t.shape[d] for t in parts], d, lambda part, place, start: part.at(_back(place, d, start))
    )


@lowers(aten.stack.default)
def stack(ctx: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    d = axis(dim, len(ctx.shape))
    return _joined(
        ctx, tensors, [1] * len(tensors), d, lambda part, place, start: part.at((*place[:d], *place[d + 1 :]))
    )


def _back(place: tuple[Index, ...], d: int, start: Dim) -> tuple[Index, ...]:
    return replaced(place, d, place[d] - start)


def _joined(
    ctx: Context,
    parts: Sequence[Value],
    sizes: Sequence[Dim],
    d: int,
    read: Callable[[Value, tuple[Index, ...], Dim], Expr],
) -> Value:
    dtype = ctx.out.dtype
    starts = [sum(sizes[:n]) for n in range(len(sizes))]

    def choose(place: tuple[Index, ...], low: int, high: int) -> Expr:
        if high - low == 1:
            return cast(read(parts[low], place, starts[low]), compute_dtype(dtype))
        middle = (low + high) // 2
        if known_less(place[d].high, starts[middle]):
            return choose(place, low, middle)
        if known_at_most(starts[middle], place[d].low):
            return choose(place, middle, high)
        before = call("lt", from_index(place[d]), from_index(starts[middle]))
        # `guard` keeps only its inside from being evaluated elsewhere: both halves need one.
        after = guard(call("not", before), choose(place, middle, high), const(0, compute_dtype(dtype)))
        return guard(before, choose(place, low, middle), after)

    return Map(ctx.shape, dtype, lambda place: choose(place, 0, len(parts)))


# Padding


@lowers(aten.constant_pad_nd.default)
def constant_pad(ctx: Context, x: Value, pad: Sequence[int], value: float = 0) -> Value:
    """`pad` holds (before, after) for the last dimension first; negative numbers crop."""
    before = _before(pad, len(x.shape))

    def at(place: tuple[Index, ...]) -> Expr:
        source = tuple(i - b for i, b in zip(place, before, strict=True))
        inside: Expr = const(True, "bool")
        for i, n in zip(source, x.shape, strict=True):
            inside = logical_and(inside, index_in(i, 0, n))
        return guard(inside, x.at(source), const(value, compute_dtype(x.dtype)))

    zeros = value == 0 and min(pad, default=0) >= 0
    return Map(ctx.shape, x.dtype, at, zero_padded=(x, tuple(before)) if zeros else None)


def _before(pad: Sequence[int], rank: int) -> list[int]:
    before = [0] * rank
    for n in range(len(pad) // 2):
        before[rank - 1 - n] = pad[2 * n]
    return before


def _mirrored(i: Index, n: Dim) -> Index:
    """A position outside 0 .. n-1, mirrored at the ends."""
    return i if _lies_in(i, n) else bounded(_reflected(from_index(i), n), n, wrap=False)


def replicated(i: Index, n: Dim) -> Index:
    """The end that is nearest to a position outside 0 .. n-1."""
    return i if _lies_in(i, n) else bounded(from_index(i), n, wrap=False)


@lowers(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(ctx: Context, x: Value, padding: Sequence[int]) -> Value:
    return _padded_by(ctx, x, padding, _mirrored)


@lowers(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(ctx: Context, x: Value, padding: Sequence[int]) -> Value:
    return _padded_by(ctx, x, padding, replicated)


def _reflected(scalar: Expr, size: Dim) -> Expr:
    """|scalar| folded back at the far edge too: n-1 - |n-1 - |i||."""
    last = lit(scalar, size - 1)
    return sub(last, call("abs", sub(last, call("abs", scalar))))


def _padded_by(ctx: Context, x: Value, padding: Sequence[int], fold: Callable[[Index, Dim], Index]) -> Value:
    return reindex(x, ctx.shape, padded_places(x.shape, padding, fold))


def padded_places(
    shape: tuple[Dim, ...], padding: Sequence[int], fold: Callable[[Index, Dim], Index]
) -> Callable[[tuple[Index, ...]], tuple[Index, ...]]:
    """Function from places in the padded tensor to those in a tensor of `shape`."""
    before = _before(padding, len(shape))
    return lambda place: tuple(fold(i - b, n) for i, b, n in zip(place, before, shape, strict=True))


# Replacing parts


@lowers(aten.slice_scatter.default)
def slice_scatter(
    ctx: Context, x: Value, src: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """x with the elements start, start + step, ... of one dimension taken from src."""
    d = axis(dim, len(x.shape))
    first, stop = slice_bounds(x.shape[d], start, end)
    ctx.rely_on(src.shape[d] * step - (stop - first))

    def at(place: tuple[Index, ...]) -> Expr:
        offset = place[d] - first
        inside = index_in(place[d], first, stop)
        if step > 1:
            inside = logical_and(inside, call("eq", from_index(offset % step), from_index(0)))
        part = cast(src.at(replaced(place, d, offset // step)), compute_dtype(x.dtype))
        return guard(inside, part, x.at(place))

    return Map(ctx.shape, x.dtype, at)


@lowers(aten.select_scatter.default)
def select_scatter(ctx: Context, x: Value, src: Value, dim: int, index: int) -> Value:
    """x with the slice at one position of a dimension taken from src."""
    d = axis(dim, len(x.shape))
    position = wrapped(index, x.shape[d])

    def at(place: tuple[Index, ...]) -> Expr:
        part = cast(src.at((*place[:d], *place[d + 1 :])), compute_dtype(x.dtype))
        return guard(index_in(place[d], position, position + 1), part, x.at(place))

    return Map(ctx.shape, x.dtype, at)


def _triangle(target: OpOverload, comparison: str) -> None:
    @lowers(target)
    def lower(ctx: Context, x: Value, diagonal: int = 0) -> Value:
        def at(place: tuple[Index, ...]) -> Expr:
            keep = call(comparison, from_index(place[-1] - place[-2]), from_index(diagonal))
            return where(keep, scalar := x.at(place), const(0, scalar.dtype))

        return Map(ctx.shape, x.dtype, at)


_triangle(aten.triu.default, "ge")
_triangle(aten.tril.default, "le")
