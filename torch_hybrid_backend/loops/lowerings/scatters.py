"""Scatters along one dimension, where few slices are written.

There is no scatter in the loops language: each element asks of every slice written whether it is meant. That is exact whatever the indices, and
as cheap as a copy for one slice or a few: the gradient of a gather or of a loss of class numbers, one new position of a KV cache. Where many
are written, eager writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.limits import MAX_SCATTERED_SLICES
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Expr, Map, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, broadcast, lowers
from torch_hybrid_backend.loops.lowerings.arithmetic import lit
from torch_hybrid_backend.loops.lowerings.views import axis
from torch_hybrid_backend.loops.ops import add, call, cast, const, from_index, guard, index_in, logical_and, where
from torch_hybrid_backend.sizes.size import Dim, known_int

aten = torch.ops.aten


@lowers(aten.scatter.value)
def scatter_value(ctx: Context, x: Value, dim: int, index: Value, value: float) -> Value:
    """x with `value` at the positions `index` gives along one dimension."""
    number = const(torch.tensor(value, dtype=ctx.out.torch_dtype, device=str(CPU)).item(), compute_dtype(ctx.out.dtype))
    return _scattered(ctx, x, dim, index, lambda place: number, accumulate=False)


@lowers(aten.scatter.src)
def scatter_source(ctx: Context, x: Value, dim: int, index: Value, source: Value) -> Value:
    """x with the elements of `source` at the positions `index` gives along one dimension; of several the last one counts."""
    return _scattered(ctx, x, dim, index, source.at, accumulate=False)


@lowers(aten.scatter_add.default)
def scatter_add(ctx: Context, x: Value, dim: int, index: Value, source: Value) -> Value:
    """x plus the elements of `source` at the positions `index` gives along one dimension."""
    if ctx.out.dtype == "bool":
        raise Refuse(Reason.DTYPE, "sums of bool are left to eager")
    return _scattered(ctx, x, dim, index, source.at, accumulate=True)


def _scattered(
    ctx: Context,
    x: Value,
    dim: int,
    index: Value,
    source: Callable[[tuple[Index, ...]], Expr],
    accumulate: bool,
) -> Value:
    d = axis(dim, len(x.shape)) if x.shape else 0
    if len(index.shape) != len(x.shape) or not x.shape:
        raise Refuse(Reason.ARGUMENT, "a scatter with an index of another rank, or to a scalar, is left to eager")
    if any(n != m for k, (n, m) in enumerate(zip(index.shape, x.shape, strict=True)) if k != d):
        raise Refuse(Reason.ARGUMENT, "a scatter that does not reach all of the other dimensions is left to eager")
    _check(index.shape[d])

    def at(place: tuple[Index, ...]) -> Expr:
        def slice_(number: int) -> tuple[Index, ...]:
            return (*place[:d], as_index(number), *place[d + 1 :])

        result = x.at(place)
        for number in range(index.shape[d]):
            meant = call("eq", cast(index.at(slice_(number)), "int64"), from_index(place[d]))
            new = source(slice_(number))
            result = where(meant, add(result, new) if accumulate else new, result)
        return result

    return Map(ctx.shape, ctx.out.dtype, at, ((x, lambda place: place),))


@lowers(aten.index_put.default)
def index_put(
    ctx: Context, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """x with `values` at the slices that one index tensor names along one dimension; negative ones count from the end."""
    given = [(d, t) for d, t in enumerate(indices) if t is not None]
    if len(given) != 1 or given[0][1].dtype in ("bool", "uint8"):
        raise Refuse(Reason.ARGUMENT, "writing at a mask, or along several dimensions at once, is left to eager")
    d, index = given[0]
    if len(index.shape) != 1:
        raise Refuse(Reason.ARGUMENT, f"writing at an index of {len(index.shape)} dimensions is left to eager")
    if accumulate and ctx.out.dtype == "bool":
        raise Refuse(Reason.DTYPE, "sums of bool are left to eager")
    count, size = index.shape[0], x.shape[d]
    _check(count)
    new = broadcast(values, (*x.shape[:d], count, *x.shape[d + 1 :]))

    def at(place: tuple[Index, ...]) -> Expr:
        result = x.at(place)
        for number in range(count):
            position = cast(index.at((as_index(number),)), "int64")
            position = where(call("lt", position, lit(position, 0)), add(position, lit(position, size)), position)
            written = new.at((*place[:d], as_index(number), *place[d + 1 :]))
            meant = call("eq", position, from_index(place[d]))
            result = where(meant, add(result, written) if accumulate else written, result)
        return result

    return Map(ctx.shape, ctx.out.dtype, at, ((x, lambda place: place),))


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


def _check(count: Dim) -> None:
    count = known_int(count)
    if count > MAX_SCATTERED_SLICES:
        raise Refuse(Reason.ARGUMENT, f"writing {count} slices, more than {MAX_SCATTERED_SLICES}, is left to eager")
