"""The matmul family: one batched MatMulOp each, with biases and scales as pointwise work on top."""

from __future__ import annotations

import math

import torch

from torch_hybrid_backend.core.precision import ROW_BITS
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, as_index, var
from torch_hybrid_backend.loops.ir import (
    Buffer,
    Expr,
    IntegerMatMulOp,
    Map,
    MatMulOp,
    Value,
    buffers_of_expr,
    canonical,
    compute_dtype,
)
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.lowerings import arithmetic as formula
from torch_hybrid_backend.loops.lowerings.reducing import axes_of, reduced_body
from torch_hybrid_backend.loops.lowerings.views import permuted, reshaped, selected
from torch_hybrid_backend.loops.ops import add, cast, mul
from torch_hybrid_backend.loops.quantized import NARROW

aten = torch.ops.aten


def _same_for_every_batch(value: Value) -> bool:
    """True if a (B, K, N) value does not depend on its first index: a matrix expanded over the batch."""
    batch, *rest = (var(f"i{d}", size) for d, size in enumerate(value.shape))
    varied, pinned = value.at((batch, *rest)), value.at((as_index(0), *rest))
    names = {b: str(n) for n, b in enumerate([*buffers_of_expr(varied), *buffers_of_expr(pinned)])}
    return canonical(varied, names) == canonical(pinned, names)


def batched(ctx: Context, a: Value, b: Value, dtype: str) -> Buffer:
    """(B, M, K) @ (B, K, N) in a buffer of the given dtype."""
    if not isinstance(b, Buffer) and b.shape[0] != 1 and _same_for_every_batch(b):
        matrix = selected(b, 0, 0)
        b = reshaped(matrix, (1, *matrix.shape))
    out = Buffer((a.shape[0], a.shape[1], b.shape[2]), dtype)
    a_bits = 32 if ctx.node is None else ctx.node.meta.get(ROW_BITS, 32)
    return ctx.realize(MatMulOp(out, a, b, a_bits=a_bits))


def product(ctx: Context, a: Value, b: Value, dtype: str) -> Value:
    """(M, K) @ (K, N) as an (M, N) view of the batched product."""
    a, b = reshaped(a, (1, *a.shape)), reshaped(b, (1, *b.shape))
    result = batched(ctx, a, b, dtype)
    return reshaped(result, result.shape[1:])


def _plus_scaled(ctx: Context, bias: Value, result: Value, beta: float, alpha: float) -> Value:
    """alpha * result + beta * bias; a bias times zero is not read, whatever it holds."""
    if beta == 0:
        return ctx.pointwise(lambda r: formula.scaled(r, alpha), result)

    def fn(r: Expr, b: Expr) -> Expr:
        return formula.plus(formula.scaled(r, alpha), formula.scaled(b, beta))

    return ctx.pointwise(fn, result, bias)


def _check_alike(*operands: Value) -> None:
    if len({operand.dtype for operand in operands}) > 1:
        raise Refuse(Reason.DTYPE, "a product of several dtypes is an error in eager")


@lowers(aten.mm.default)
def mm(ctx: Context, a: Value, b: Value) -> Value:
    _check_alike(a, b)
    return product(ctx, a, b, ctx.out.dtype)


@lowers(aten._int_mm.default)
def int_mm(ctx: Context, a: Value, b: Value) -> Value:
    """int8 or uint8 by int8, exactly, in int32."""
    if not ctx.abilities.integer_products or not {a.dtype, b.dtype} <= set(NARROW):
        raise Refuse(Reason.DTYPE, "products of integers are left to eager")
    left, right = reshaped(a, (1, *a.shape)), reshaped(b, (1, *b.shape))
    result = ctx.realize(IntegerMatMulOp(Buffer((1, a.shape[0], b.shape[1]), ctx.out.dtype), left, right))
    return reshaped(result, ctx.shape)


@lowers(aten.bmm.default)
def bmm(ctx: Context, a: Value, b: Value) -> Value:
    _check_alike(a, b)
    return batched(ctx, a, b, ctx.out.dtype)


@lowers(aten.addmm.default)
def addmm(ctx: Context, bias: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    """The product is kept in the compute dtype until the bias is added: one rounding, as in eager."""
    _check_alike(bias, a, b)
    return _plus_scaled(ctx, bias, product(ctx, a, b, compute_dtype(ctx.out.dtype)), beta, alpha)


@lowers(aten.baddbmm.default)
def baddbmm(ctx: Context, bias: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    _check_alike(bias, a, b)
    return _plus_scaled(ctx, bias, batched(ctx, a, b, compute_dtype(ctx.out.dtype)), beta, alpha)


@lowers(aten.mv.default)
def mv(ctx: Context, a: Value, x: Value) -> Value:
    _check_alike(a, x)
    return reshaped(product(ctx, a, reshaped(x, (*x.shape, 1)), ctx.out.dtype), ctx.shape)


@lowers(aten.addmv.default)
def addmv(ctx: Context, bias: Value, a: Value, x: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    _check_alike(bias, a, x)
    result = product(ctx, a, reshaped(x, (*x.shape, 1)), compute_dtype(ctx.out.dtype))
    return _plus_scaled(ctx, bias, reshaped(result, ctx.shape), beta, alpha)


@lowers(aten.dot.default, aten.vdot.default)
def dot(ctx: Context, a: Value, b: Value) -> Value:
    _check_alike(a, b)
    dtype = compute_dtype(ctx.out.dtype)
    return reduced_body(
        ctx, "sum", a, axes_of(None, 1), lambda i: mul(cast(a.at(i), dtype), cast(b.at(i), dtype)), ctx.out.dtype
    )


@lowers(aten.linear.default)
def linear(ctx: Context, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """x (..., K), weight (N, K) or (K)."""
    _check_alike(x, weight, *(() if bias is None else (bias,)))
    depth = x.shape[-1]
    flat = reshaped(x, (math.prod(x.shape[:-1]), depth))
    columns = permuted(reshaped(weight, (math.prod(weight.shape) // depth, depth)), (1, 0))
    dtype = ctx.out.dtype if bias is None else compute_dtype(ctx.out.dtype)
    result = reshaped(product(ctx, flat, columns, dtype), ctx.shape)
    return result if bias is None else ctx.pointwise(add, result, bias)


@lowers(aten._weight_int8pack_mm.default)
def weight_int8pack_mm(ctx: Context, a: Value, b: Value, scales: Value) -> Value:
    """a (M, K) times the transpose of b (N, K), int8, each row of which has one of `scales` (N)."""
    n, k = b.shape

    def at(index: tuple[Index, ...]) -> Expr:
        row, column = index
        return mul(cast(b.at((column, row)), "float32"), cast(scales.at((column,)), "float32"))

    return product(ctx, a, Map((k, n), "float32", at), ctx.out.dtype)


@lowers(aten.addbmm.default)
def addbmm(ctx: Context, bias: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    """The sum over the batch is one longer dot product: (M, B * K) @ (B * K, N)."""
    _check_alike(bias, a, b)
    batch, rows, depth = a.shape
    wide = reshaped(permuted(a, (1, 0, 2)), (rows, batch * depth))
    tall = reshaped(b, (batch * depth, b.shape[2]))
    return _plus_scaled(ctx, bias, product(ctx, wide, tall, compute_dtype(ctx.out.dtype)), beta, alpha)
