"""Scatters: elements written, or combined with what is there, at positions that data name.

If few slices are written along one dimension, each element compares its position with every slice's index. That is exact for all indices, and
as cheap as a copy: the gradient of a loss of class numbers, one new position of a KV cache. If many are written, kernels must be able to
combine in place (`loops.lowerings.scattering`): the gradients of embeddings, of gathers and of resampling, sums over the edges of a graph.
Indices out of range are clamped and reported, as in `loops.lowerings.indexing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Expr, Map, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, broadcast, lowers
from torch_hybrid_backend.loops.lowerings.arithmetic import lit, scaled
from torch_hybrid_backend.loops.lowerings.indexing import (
    bounded,
    indexed_place,
    indexed_shape,
    refuse_outside,
    refuse_places,
    replaced,
)
from torch_hybrid_backend.loops.lowerings.scattering import filled, reduced, scattered
from torch_hybrid_backend.loops.lowerings.views import axis, reshaped
from torch_hybrid_backend.loops.ops import add, call, cast, const, from_index, guard, index_in, logical_and, where
from torch_hybrid_backend.sizes.size import Dim, known_at_most, known_int, product

aten = torch.ops.aten

# That are written one by one where kernels cannot write to one place at once, each at the cost of a comparison for every element.
MAX_SLICES = 4
_SUMS_OF_BOOL = "sums of bool are left to eager"


@lowers(aten.scatter.value)
def scatter_value(ctx: Context, x: Value, dim: int, index: Value, value: float) -> Value:
    """x with `value` at the positions `index` gives along one dimension."""
    number = const(torch.tensor(value, dtype=ctx.out.torch_dtype, device=str(CPU)).item(), compute_dtype(ctx.out.dtype))
    return _scattered(ctx, x, dim, index, lambda place: number, "write", ordered=True)


@lowers(aten.scatter.src)
def scatter_source(ctx: Context, x: Value, dim: int, index: Value, source: Value) -> Value:
    """x with the elements of `source` at the positions `index` gives along one dimension; of several the last one counts, where few slices are
    written; else any may, as in eager."""
    return _scattered(ctx, x, dim, index, source.at, "write")


@lowers(aten.scatter_add.default)
def scatter_add(ctx: Context, x: Value, dim: int, index: Value, source: Value) -> Value:
    """x plus the elements of `source` at the positions `index` gives along one dimension."""
    return _scattered(ctx, x, dim, index, source.at, "sum")


@lowers(aten.scatter.reduce)
def scatter_by(ctx: Context, x: Value, dim: int, index: Value, source: Value, *, reduce: str) -> Value:
    if reduce != "add":
        raise Refuse(Reason.ARGUMENT, f"a scatter that combines by {reduce!r} is left to eager")
    return _scattered(ctx, x, dim, index, source.at, "sum")


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: Context, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """x combined with the elements of `source` at the positions `index` gives along one dimension."""
    domain, place = _along(ctx, x, dim, index)
    return reduced(ctx, x, domain, place, source.at, reduce, include_self)


@lowers(aten.index_reduce.default)
def index_reduce(
    ctx: Context, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """x combined with slices of `source` at the positions `index` (1-D) gives of one dimension."""
    domain, place = _slices(ctx, x, dim, index)
    return reduced(ctx, x, domain, place, source.at, reduce, include_self)


@lowers(aten.index_add.default)
def index_add(ctx: Context, x: Value, dim: int, index: Value, source: Value, *, alpha: float = 1) -> Value:
    """x plus alpha times slices of `source` at the positions `index` (1-D, or a scalar) gives of one dimension."""
    if ctx.out.dtype == "bool":
        raise Refuse(Reason.DTYPE, _SUMS_OF_BOOL)
    domain, place = _slices(ctx, x, dim, index)
    d = axis(dim, len(x.shape))
    if _are_few(ctx, domain[d]):
        positions = reshaped(index, (domain[d],))
        return _compared(
            ctx, x, d, domain[d], lambda i: positions.at((i[d],)), lambda i: scaled(source.at(i), alpha), "sum"
        )
    return scattered(ctx, x, domain, place, lambda i: scaled(source.at(i), alpha), "sum")


def _scattered(
    ctx: Context,
    x: Value,
    dim: int,
    index: Value,
    source: Callable[[tuple[Index, ...]], Expr],
    combiner: str,
    ordered: bool = False,
) -> Value:
    if combiner == "sum" and ctx.out.dtype == "bool":
        raise Refuse(Reason.DTYPE, _SUMS_OF_BOOL)
    domain, place = _along(ctx, x, dim, index)
    d = axis(dim, len(x.shape))
    reaches_all = all(n == m for k, (n, m) in enumerate(zip(domain, x.shape, strict=True)) if k != d)
    if reaches_all and _are_few(ctx, domain[d]):
        return _compared(ctx, x, d, domain[d], index.at, source, combiner)
    if not reaches_all and ctx.abilities.scatters == "none":
        raise Refuse(Reason.ARGUMENT, "a scatter that does not reach all of the other dimensions is left to eager")
    return scattered(ctx, x, domain, place, source, combiner, ordered=ordered)


def _along(
    ctx: Context, x: Value, dim: int, index: Value
) -> tuple[tuple[Dim, ...], Callable[[tuple[Index, ...]], tuple[Index, ...]]]:
    """The points of `index`, and the position in x that each names along one dimension."""
    if len(index.shape) != len(x.shape) or not x.shape:
        raise Refuse(Reason.ARGUMENT, "a scatter with an index of another rank, or to a scalar, is left to eager")
    d = axis(dim, len(x.shape))
    refuse_outside(ctx, index, x.shape[d], wrap=False)
    return index.shape, lambda i: replaced(i, d, bounded(index.at(i), x.shape[d], wrap=False))


def _slices(
    ctx: Context, x: Value, dim: int, index: Value
) -> tuple[tuple[Dim, ...], Callable[[tuple[Index, ...]], tuple[Index, ...]]]:
    """The points of slices of one dimension, and the positions in x that `index` names for them."""
    if not x.shape:
        raise Refuse(Reason.ARGUMENT, "slices added to a scalar are left to eager")
    d, count = axis(dim, len(x.shape)), product(index.shape)
    positions = reshaped(index, (count,))
    refuse_outside(ctx, index, x.shape[d], wrap=False)
    return replaced_size(x.shape, d, count), lambda i: replaced(
        i, d, bounded(positions.at((i[d],)), x.shape[d], wrap=False)
    )


def replaced_size(shape: tuple[Dim, ...], d: int, by: Dim) -> tuple[Dim, ...]:
    return (*shape[:d], by, *shape[d + 1 :])


def _compared(
    ctx: Context,
    x: Value,
    d: int,
    count: Dim,
    position: Callable[[tuple[Index, ...]], Expr],
    source: Callable[[tuple[Index, ...]], Expr],
    combiner: str,
) -> Value:
    """Each element compares itself with each of `count` slices of dimension d. `position`, `source`: over the points of the slices."""

    def at(place: tuple[Index, ...]) -> Expr:
        result = x.at(place)
        for number in range(int(count)):
            here = replaced(place, d, as_index(number))
            meant = call("eq", cast(position(here), "int64"), from_index(place[d]))
            new = source(here)
            result = where(meant, add(result, new) if combiner == "sum" else new, result)
        return result

    return Map(ctx.shape, ctx.out.dtype, at, ((x, lambda place: place),))


def _are_few(ctx: Context, count: Dim) -> bool:
    """True if so few slices are written that each element may compare with all. Refuses more if kernels cannot write them."""
    if ctx.abilities.scatters != "none":
        return isinstance(count, int) and count <= MAX_SLICES
    count = known_int(count)
    if count > MAX_SLICES:
        raise Refuse(Reason.ARGUMENT, f"writing {count} slices, more than {MAX_SLICES}, is left to eager")
    return True


@lowers(aten.index_put.default)
def index_put(
    ctx: Context, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """x with `values` at the elements that `x[indices]` would read; negative positions count from the end."""
    given = {d: t for d, t in enumerate(indices) if t is not None}
    if (
        len(given) == 1
        and next(iter(given.values())).dtype == "bool"
        and known_at_most(product(values.shape), 1)
        and not accumulate
        and ctx.abilities.scatters != "none"
    ):
        return _masked(ctx, x, *next(iter(given.items())), values)
    if not given or any(t.dtype in ("bool", "uint8") for t in given.values()):
        raise Refuse(Reason.ARGUMENT, "writing at a mask, or everywhere, is left to eager")
    if accumulate and ctx.out.dtype == "bool":
        raise Refuse(Reason.DTYPE, _SUMS_OF_BOOL)
    refuse_places(ctx, x, indices)
    combiner = "sum" if accumulate else "write"
    d, index = next(iter(given.items()))
    if len(given) == 1 and len(index.shape) == 1 and _are_few(ctx, index.shape[0]):
        count, size = index.shape[0], x.shape[d]
        new = broadcast(values, replaced_size(x.shape, d, count))

        def position(i: tuple[Index, ...]) -> Expr:
            here = cast(index.at((i[d],)), "int64")
            return where(call("lt", here, lit(here, 0)), add(here, lit(here, size)), here)

        return _compared(ctx, x, d, count, position, new.at, combiner)
    if ctx.abilities.scatters == "none":
        raise Refuse(Reason.ARGUMENT, "writing along several dimensions at once is left to eager")
    domain = indexed_shape(x, given)
    new = broadcast(values, domain)
    # One number everywhere: what is written does not depend on who comes last.
    return scattered(ctx, x, domain, indexed_place(x, given), new.at, combiner, ordered=product(values.shape) == 1)


def _masked(ctx: Context, x: Value, d: int, mask: Value, value: Value) -> Value:
    """x with one number where a mask holds, which stands for the dimensions from d on that it has."""
    number = reshaped(value, ())

    def at(place: tuple[Index, ...]) -> Expr:
        return where(mask.at(place[d : d + len(mask.shape)]), number.at(()), x.at(place))

    return Map(ctx.shape, ctx.out.dtype, at, ((x, lambda place: place),))


@lowers(aten.put.default)
def put(ctx: Context, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """x with the elements of `source` at positions of x as if it were flat; negative ones count from the end."""
    if accumulate and ctx.out.dtype == "bool":
        raise Refuse(Reason.DTYPE, _SUMS_OF_BOOL)
    flat = reshaped(x, (product(x.shape),))
    given = {0: reshaped(index, (product(index.shape),))}
    refuse_outside(ctx, index, flat.shape[0], wrap=True)
    place, elements = indexed_place(flat, given), reshaped(source, (product(index.shape),))
    result = scattered(ctx, flat, given[0].shape, place, elements.at, "sum" if accumulate else "write")
    return reshaped(result, x.shape)


@lowers(aten.embedding_dense_backward.default)
def embedding_backward(
    ctx: Context, grad: Value, indices: Value, rows: Dim, padding_idx: int, scale_grad_by_freq: bool
) -> Value:
    """The gradient of a table: each row sums the gradients of its look-ups, but row `padding_idx` stays 0. grad: (*indices.shape, D)."""
    if scale_grad_by_freq:
        raise Refuse(Reason.ARGUMENT, "the gradient of an embedding that is scaled by frequency is left to eager")
    zero = const(0, compute_dtype(grad.dtype))

    def body(i: tuple[Index, ...]) -> Expr:
        row = cast(indices.at(i[:-1]), "int64")
        return where(call("eq", row, lit(row, padding_idx)), zero, grad.at(i)) if padding_idx >= 0 else grad.at(i)

    return scattered(
        ctx,
        filled(ctx, 0),
        grad.shape,
        lambda i: (bounded(indices.at(i[:-1]), rows, wrap=False), i[-1]),
        body,
        "sum",
    )


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(ctx: Context, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """x with `source` on a diagonal: its last dimension runs along it."""
    first, second = axis(dim1, len(x.shape)), axis(dim2, len(x.shape))
    zero = const(0, compute_dtype(x.dtype))

    def at(place: tuple[Index, ...]) -> Expr:
        row, column = place[first], place[second]
        others = tuple(i for d, i in enumerate(place) if d not in (first, second))
        along = row if offset >= 0 else column
        meant = call("eq", from_index(column - row), from_index(offset))
        # Beside the diagonal the source may have no such element.
        new = guard(logical_and(meant, index_in(along, 0, source.shape[-1])), source.at((*others, along)), zero)
        return where(meant, new, x.at(place))

    return Map(ctx.shape, ctx.out.dtype, at, ((x, lambda place: place),))
