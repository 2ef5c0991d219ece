"""Running sums, products, extrema.

If the backend has no kernels for `ScanOp`, each element reduces all before it. That is n times the work, but cheap for the small masks and
positions that models make from a cumulative sum, and keeps them in one region. Eager runs larger scans, in one pass, and running extrema.
"""

from __future__ import annotations

import math

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Buffer, Expr, ReduceOp, ScanOp, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.lowerings.views import axis
from torch_hybrid_backend.loops.ops import call, cast, const, from_index, where
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

# Steps, elements times the scanned dimension's size. So many take 20 us (8 times as many, 32 x 512 int64: 160 us; eager 6 us; 2-core Zen 5),
# about what it costs to leave a region and come back.
MOST = 1 << 20


@lowers(aten.cumsum.default)
def cumsum(ctx: Context, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    """out[i] = x[0] + ... + x[i] along `dim`, accumulated in the compute dtype of the result."""
    return _scan(ctx, "sum", x, dim)


@lowers(aten.cumprod.default)
def cumprod(ctx: Context, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    """out[i] = x[0] * ... * x[i] along `dim`, accumulated in the compute dtype of the result."""
    return _scan(ctx, "prod", x, dim)


@lowers(aten.logcumsumexp.default)
def logcumsumexp(ctx: Context, x: Value, dim: int) -> Value:
    """out[i] = log(exp(x[0]) + ... + exp(x[i])) along `dim`."""
    if not ctx.abilities.scans:
        raise _without_scans()
    return _scan(ctx, "logaddexp", x, dim)


def _extremum_and_position(target: OpOverload, combiner: str) -> None:
    @lowers(target)
    def lower(ctx: Context, x: Value, dim: int) -> tuple[Value, Value]:
        """(running extreme of x[0] ... x[i], its position: the last of equals, int64). A NaN stays."""
        if not ctx.abilities.scans:
            raise _without_scans()
        if not x.shape:
            return ctx.pointwise(lambda a: a, x), ctx.pointwise(lambda _: const(0, "int64"), x, dtype="int64")
        d = axis(dim, len(x.shape))
        # Booleans are compared as numbers.
        dtype = "int32" if x.dtype == "bool" else compute_dtype(x.dtype)

        def body(index: tuple[Index, ...]) -> Expr:
            return cast(x.at(index), dtype)

        extreme = ctx.realize(ScanOp(Buffer(ctx.shape, dtype if x.dtype == "bool" else x.dtype), d, combiner, body))
        position = ctx.realize(ScanOp(Buffer(ctx.shape, "int64"), d, f"arg{combiner}", body))
        return ctx.pointwise(lambda a: a, extreme) if x.dtype == "bool" else extreme, position


_extremum_and_position(aten.cummax.default, "max")
_extremum_and_position(aten.cummin.default, "min")


def _without_scans() -> Refuse:
    return Refuse(Reason.UNKNOWN_OPERATOR, "this backend has no kernels for running extrema")


def _scan(ctx: Context, combiner: str, x: Value, dim: int) -> Value:
    if ctx.out.dtype == "bool":
        raise Refuse(Reason.DTYPE, "a cumulative reduction to bool is left to eager")
    dtype = compute_dtype(ctx.out.dtype)
    if not x.shape:
        return ctx.pointwise(lambda a: cast(a, dtype), x, compute=compute_dtype(x.dtype))
    d, rank = axis(dim, len(x.shape)), len(x.shape)
    if ctx.abilities.scans:
        body = lambda index: cast(x.at(index), dtype)  # noqa: E731
        return ctx.realize(ScanOp(Buffer(ctx.shape, ctx.out.dtype), d, combiner, body))
    steps = math.prod(x.shape) * x.shape[d]
    if steps > MOST:
        raise Refuse(Reason.ARGUMENT, f"a cumulative reduction of {steps} steps, more than {MOST}, is left to eager")
    neutral = const(0 if combiner == "sum" else 1, dtype)

    def all_before(index: tuple[Index, ...]) -> Expr:
        behind = index[rank]
        value = cast(x.at((*index[:d], behind, *index[d + 1 : rank])), dtype)
        return where(call("le", from_index(behind), from_index(index[d])), value, neutral)

    return ctx.realize(
        ReduceOp(Buffer(ctx.shape, ctx.out.dtype), (*x.shape, x.shape[d]), (rank,), combiner, all_before)
    )
