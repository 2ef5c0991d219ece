"""Embedding bags: sums and means of rows of a table, one bag after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Buffer, Expr, Map, SegmentOp, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.lowerings.arithmetic import lit
from torch_hybrid_backend.loops.lowerings.indexing import bounded, refuse_outside
from torch_hybrid_backend.loops.ops import (
    call,
    cast,
    const,
    div,
    from_index,
    guard,
    index_in,
    is_float,
    logical_and,
    mul,
    sub,
    where,
)

aten = torch.ops.aten

_SUM, _MEAN = 0, 1


@lowers(aten._embedding_bag_forward_only.default, aten._embedding_bag.default)
def embedding_bag(
    ctx: Context,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Value | None, ...]:
    """(bags (B, D), and what only the backward reads): weight (V, D), indices (N), offsets (B), or (B + 1) with the last end."""
    if not ctx.abilities.segments:
        raise Refuse(Reason.ARGUMENT, "embedding bags are left to eager")
    if mode not in (_SUM, _MEAN):
        raise Refuse(Reason.ARGUMENT, "embedding bags of maxima are left to eager")
    if any(map(ctx.wants, (1, 2, 3))):
        raise Refuse(Reason.ARGUMENT, "the results of an embedding bag for its backward are left to eager")
    if not is_float(compute_dtype(weight.dtype)) or len(indices.shape) != 1:
        raise Refuse(Reason.DTYPE, "embedding bags of other than floating-point rows are left to eager")
    rows, points, bags = weight.shape[0], indices.shape[0], offsets.shape[0]
    dtype = compute_dtype(weight.dtype)

    def begun(index: tuple[Index, ...]) -> Expr:
        """An offset; -1, which is refused, if it is the first and not 0."""
        here = offsets.at(index)
        is_first = call("eq", from_index(index[0]), from_index(as_index(0)))
        return where(logical_and(is_first, call("ne", here, lit(here, 0))), lit(here, -1), here)

    refuse_outside(ctx, indices, rows, wrap=False)
    refuse_outside(ctx, Map(offsets.shape, offsets.dtype, begun), points + 1, wrap=False)

    def offset(bag: Index) -> Expr:
        return from_index(bounded(offsets.at((bag,)), points + 1, wrap=False))

    def bounds(bag: Index) -> tuple[Expr, Expr]:
        if include_last_offset:
            return offset(bag), offset(bag + 1)
        is_inner = index_in(bag + 1, 0, bags)
        return offset(bag), guard(is_inner, offset(bag + 1), from_index(as_index(points)))

    def is_counted(point: Index) -> Expr | None:
        row = cast(indices.at((point,)), "int64")
        return call("ne", row, lit(row, padding_idx)) if padding_idx >= 0 else None

    def body(index: tuple[Index, ...]) -> Expr:
        point, column = index
        value = weight.at((bounded(indices.at((point,)), rows, wrap=False), column))
        if per_sample_weights is not None:
            value = mul(value, cast(per_sample_weights.at((point,)), dtype))
        counted = is_counted(point)
        return value if counted is None else where(counted, value, const(0, dtype))

    total: Value = ctx.realize(SegmentOp(Buffer(ctx.shape, dtype), points=points, bounds=bounds, body=body))
    if mode == _SUM:
        return _bags(ctx, total, lambda value, _: value)
    if padding_idx < 0:

        def count(bag: Index) -> Expr:
            first, end = bounds(bag)
            return sub(end, first)
    else:

        def one(index: tuple[Index, ...]) -> Expr:
            counted = is_counted(index[0])
            assert counted is not None
            return cast(counted, "int64")

        counts = ctx.realize(SegmentOp(Buffer(ctx.shape[:1], "int64"), points=points, bounds=bounds, body=one))

        def count(bag: Index) -> Expr:
            return counts.at((bag,))

    def mean(value: Expr, bag: Index) -> Expr:
        number = count(bag)
        return div(value, cast(call("max", number, lit(number, 1)), dtype))

    return _bags(ctx, total, mean)


def _bags(ctx: Context, total: Value, finish: Callable[[Expr, Index], Expr]) -> tuple[Value | None, ...]:
    value = Map(ctx.shape, ctx.out.dtype, lambda i: finish(total.at(i), i[0]), ((total, lambda i: i),))
    return value, None, None, None
