"""Running sums and products.

There is no scan in the loops language: each element reduces all before it. That is n times the work, and yet cheap for the small masks and
positions that models make from a cumulative sum, and keeps them in one region. Larger ones are left to eager, which passes once.
"""

from __future__ import annotations

import math

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Buffer, Expr, ReduceOp, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.lowerings.views import axis
from torch_hybrid_backend.loops.ops import call, cast, const, from_index, where

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


def _scan(ctx: Context, combiner: str, x: Value, dim: int) -> Value:
    if ctx.out.dtype == "bool":
        raise Refuse(Reason.DTYPE, "a cumulative reduction to bool is left to eager")
    dtype = compute_dtype(ctx.out.dtype)
    if not x.shape:
        return ctx.pointwise(lambda a: cast(a, dtype), x, compute=compute_dtype(x.dtype))
    d, rank = axis(dim, len(x.shape)), len(x.shape)
    steps = math.prod(x.shape) * x.shape[d]
    if steps > MOST:
        raise Refuse(Reason.ARGUMENT, f"a cumulative reduction of {steps} steps, more than {MOST}, is left to eager")
    neutral = const(0 if combiner == "sum" else 1, dtype)

    def body(index: tuple[Index, ...]) -> Expr:
        behind = index[rank]
        value = cast(x.at((*index[:d], behind, *index[d + 1 : rank])), dtype)
        return where(call("le", from_index(behind), from_index(index[d])), value, neutral)

    return ctx.realize(ReduceOp(Buffer(ctx.shape, ctx.out.dtype), (*x.shape, x.shape[d]), (rank,), combiner, body))
