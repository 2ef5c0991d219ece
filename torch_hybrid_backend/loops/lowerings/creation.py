"""Tensors made from numbers, and conversions. Uninitialised tensors (empty, empty_like) have no value and stay with eager."""

from __future__ import annotations

import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Expr, Map, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.ops import add, call, cast, const, from_index, is_float, mul
from torch_hybrid_backend.sizes.size import Dim, Size

aten = torch.ops.aten
prims = torch.ops.prims


def _filled(ctx: Context, value: float | Size) -> Value:
    """A result with `value` in every element, rounded to its dtype."""
    if isinstance(value, Size):
        size = const(value, compute_dtype(ctx.out.dtype))
        return Map(ctx.shape, ctx.out.dtype, lambda index: size)
    number = torch.tensor(value, dtype=ctx.out.torch_dtype, device=str(CPU)).item()
    scalar = const(number, compute_dtype(ctx.out.dtype))
    return Map(ctx.shape, ctx.out.dtype, lambda index: scalar)


@lowers(aten.full.default, aten.full_like.default, aten.new_full.default, aten.fill.Scalar)
def full(ctx: Context, *arguments: object, **_options: object) -> Value:
    """A result filled with a number, the last positional argument of each of these operators."""
    value = arguments[-1]
    if not isinstance(value, (bool, int, float, Size)):
        raise Refuse(Reason.ARGUMENT, f"the fill value is a {type(value).__name__}, not a number")
    return _filled(ctx, value)


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def zeros(ctx: Context, *_arguments: object, **_options: object) -> Value:
    return _filled(ctx, 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(ctx: Context, *_arguments: object, **_options: object) -> Value:
    return _filled(ctx, 1)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(ctx: Context, value: float | Size, **_options: object) -> Value:
    return _filled(ctx, value)


@lowers(aten.arange.default)
def arange(ctx: Context, end: float, **_options: object) -> Value:
    return _progression(ctx, 0, 1)


@lowers(aten.arange.start)
def arange_start(ctx: Context, start: float | Dim, end: float, **_options: object) -> Value:
    return _progression(ctx, start, 1)


@lowers(aten.arange.start_step)
def arange_step(ctx: Context, start: float, end: float, step: float = 1, **_options: object) -> Value:
    return _progression(ctx, start, step)


@lowers(prims.iota.default)
def iota(ctx: Context, length: int, *, start: int, step: int, **_options: object) -> Value:
    return _progression(ctx, start, step)


def _progression(ctx: Context, start: float | Dim, step: float) -> Value:
    """start + i * step; floats are computed in float64 and rounded once, as eager accumulates them."""
    dtype = ctx.out.dtype

    def at(index: tuple[Index, ...]) -> Expr:
        if not is_float(compute_dtype(dtype)):
            return from_index(index[0] * int(step) + _whole(start), compute_dtype(dtype))
        if float(step).is_integer() and (isinstance(start, Size) or float(start).is_integer()):
            return from_index(index[0] * int(step) + _whole(start), compute_dtype(dtype))
        value = add(const(start, "float64"), mul(from_index(index[0], "float64"), const(step, "float64")))
        return cast(value, compute_dtype(dtype))

    return Map(ctx.shape, dtype, at)


def _whole(number: float | Dim) -> Dim:
    return number if isinstance(number, Size) else int(number)


@lowers(aten.eye.default, aten.eye.m)
def eye(ctx: Context, *_sizes: int, **_options: object) -> Value:
    dtype = compute_dtype(ctx.out.dtype)

    def at(index: tuple[Index, ...]) -> Expr:
        return cast(call("eq", from_index(index[0]), from_index(index[1])), dtype)

    return Map(ctx.shape, ctx.out.dtype, at)


# Casts and copies


def converted(ctx: Context, x: Value, dtype: str) -> Value:
    """x in another dtype, rounded as a cast in eager rounds."""
    return ctx.pointwise(lambda a: a, x, dtype=dtype, compute=compute_dtype(x.dtype), shape=ctx.shape)


@lowers(aten._to_copy.default, prims.convert_element_type.default)
def to_copy(ctx: Context, x: Value, *_dtype: object, **_options: object) -> Value:
    """A cast. Memory formats do not matter to values, and another device is refused by the node's specs."""
    if ctx.out.dtype == x.dtype:
        return ctx.pointwise(lambda a: a, x)
    return converted(ctx, x, ctx.out.dtype)


@lowers(aten.copy.default)
def copy(ctx: Context, destination: Value, source: Value, non_blocking: bool = False) -> Value:
    return converted(ctx, source, ctx.out.dtype)


@lowers(aten.fill.Tensor)
def fill(ctx: Context, x: Value, value: Value) -> Value:
    return converted(ctx, value, ctx.out.dtype)
