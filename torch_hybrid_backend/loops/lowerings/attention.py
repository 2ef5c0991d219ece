"""Scaled dot-product attention as one AttentionOp, and its gradients.

PyTorch has operators of attention for single devices and libraries. All compute the same, and are lowered to the same operation. They differ
in the log-sum-exp that training reads: in its shape, and in its value for a row that sees nothing. If the graph reads the log-sum-exp and the
engine writes none (its policy says so), the lowering refuses, and eager's operator runs.

A row that sees nothing is 0, as in the composite operator of PyTorch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.attention_scores import SdpaScore
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import (
    AttentionKeyGradientOp,
    AttentionOp,
    AttentionQueryGradientOp,
    Buffer,
    Expr,
    Map,
    Value,
    compute_dtype,
)
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers, reindex
from torch_hybrid_backend.loops.lowerings.views import expanded, reshaped
from torch_hybrid_backend.loops.ops import call, cast, const, from_index, guard, index_in, is_float, mul, where
from torch_hybrid_backend.sizes.size import Dim, ceil_div, known_int
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

# Operators that may have a mask, after their first three arguments.
MASKED_ATTENTION = frozenset(
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_attention_math.default,
        aten.scaled_dot_product_attention.default,
    )
)
_RANDOM = "attention with dropout draws random numbers"
_ALIGNED_ROWS = 32  # of the efficient operator's log-sum-exp


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments of an operator of attention, or of its gradients, by their names in the schemas. The operators have them in different orders.

    q is (*lead, S, D), k and v (*lead, T, D), `mask` None or a value that broadcasts to (*lead, S, T). Gradients only: `grad` and `out`, of the
    result's shape, and `log_sum_exp`. `others`: the other arguments.
    """

    q: Value
    k: Value
    v: Value
    mask: Value | None
    dropout: float
    causal: bool
    scale: float | None
    others: dict[str, Any]
    grad: Any = None
    out: Any = None
    log_sum_exp: Any = None


# Their names in the schemas.
_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "attn_mask": "mask",
    "attn_bias": "mask",
    "dropout_p": "dropout",
    "is_causal": "causal",
    "scale": "scale",
    "grad_out": "grad",
    "grad_out_": "grad",
    "out": "out",
    "logsumexp": "log_sum_exp",
}
_Lowering = Callable[[Context, _Arguments], Any]


def _lowers_attention(*targets: OpOverload, unread: tuple[str, ...] = ()) -> Callable[[_Lowering], _Lowering]:
    """Register a lowering as `lowers` does; it gets the arguments by name."""

    def register(lowering: _Lowering) -> _Lowering:
        for target in targets:
            lowers(target, unread=unread)(functools.wraps(lowering)(functools.partial(_lower, target, lowering)))
        return lowering

    return register


def _lower(target: OpOverload, lowering: _Lowering, ctx: Context, *args: Any, **kwargs: Any) -> Any:
    schema = target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    known = {"mask": None} | {own: given.pop(name) for name, own in _NAMES.items() if name in given}
    return lowering(ctx, _Arguments(**known, others=given))


def _four_dimensional(value: Value) -> Value:
    """(*, S, D) as (B, H, S, D): missing leading dimensions are 1, surplus ones are merged into the batch."""
    *lead, rows, columns = value.shape
    if len(lead) == 2:
        return value
    heads = lead[-1] if lead else 1
    return reshaped(value, (math.prod(lead[:-1]), heads, rows, columns))


def _heads_repeated(value: Value, heads: Dim) -> Value:
    """Grouped-query attention: each key or value head serves heads / H queries' heads."""
    batch, own, *rest = value.shape
    if own == heads:
        return value
    if heads % own != 0:
        raise Refuse(Reason.ARGUMENT, f"{heads} query heads are not a multiple of {own} key heads")
    share = heads // own
    return reindex(value, (batch, heads, *rest), lambda i: (i[0], i[1] // share, i[2], i[3]))


def _batches_repeated(value: Value, batch: Dim) -> Value:
    if value.shape[0] == batch:
        return value
    return reindex(value, (batch, *value.shape[1:]), lambda i: (as_index(0), *i[1:]))


def _additive(ctx: Context, mask: Value, lead: tuple[Dim, ...], rows: Dim, columns: Dim) -> Value:
    """The mask as floats to add, broadcast to the scores' shape. True in a mask of booleans: the key is visible."""
    shape = (*lead, rows, columns)
    if mask.dtype == "bool":
        float_dtype = compute_dtype(ctx.out.dtype)
        mask = ctx.pointwise(
            lambda m: where(cast(m, "bool"), const(0, float_dtype), const(-math.inf, float_dtype)),
            mask,
            dtype=float_dtype,
            compute="bool",
            shape=mask.shape,
        )
    return _four_dimensional(expanded(mask, shape))


def _last_aligned(shape: tuple[Dim, ...], dtype: str) -> Value:
    """A causal mask whose last query sees the last key, (B, H, S, T)."""
    rows, columns = shape[-2:]

    def at(index: tuple[Index, ...]) -> Expr:
        seen = call("le", from_index(index[3]), from_index(index[2] + (columns - rows)))
        return where(seen, const(0, dtype), const(-math.inf, dtype))

    return Map(shape, dtype, at)


def _attention(ctx: Context, args: _Arguments, empty: float | None = None) -> tuple[Value, Buffer | None]:
    """(result, log-sum-exp). The second is (B, H, S), with `empty` for rows that see nothing; None if `empty` is None."""
    _check_exact(ctx, args.dropout)
    shape = ctx.shape
    q, k, v, mask = args.q, args.k, args.v, args.mask
    lead, rows, columns = q.shape[:-2], q.shape[-2], k.shape[-2]
    if mask is not None:
        mask = _additive(ctx, mask, lead, rows, columns)
    _check_widths(q, v)
    q, k, v = (_four_dimensional(value) for value in (q, k, v))
    batch, heads = q.shape[:2]
    k, v = (_batches_repeated(_heads_repeated(value, heads), batch) for value in (k, v))
    out = Buffer((batch, heads, rows, v.shape[-1]), ctx.out.dtype)
    log_sum_exp = None if empty is None else Buffer((batch, heads, rows), compute_dtype(ctx.out.dtype))
    score = SdpaScore(scale=_factor(q, args.scale), causal=args.causal, mask=mask)
    op = AttentionOp(out, q=q, k=k, v=v, score=score, log_sum_exp=log_sum_exp, empty=empty or 0.0)
    return reshaped(ctx.realize(op), shape), log_sum_exp


def _check_exact(ctx: Context, dropout: float) -> None:
    if dropout:
        raise Refuse(Reason.ARGUMENT, _RANDOM)
    if not is_float(compute_dtype(ctx.out.dtype)):
        raise Refuse(Reason.DTYPE, f"attention of {ctx.out.dtype} is left to eager")


def _factor(q: Value, scale: float | None) -> float:
    return 1 / math.sqrt(known_int(q.shape[-1])) if scale is None else scale


def _check_widths(*operands: Value) -> None:
    if not all(isinstance(operand.shape[-1], int) for operand in operands):
        raise Refuse(Reason.SYMBOLIC_SHAPE, "the width of attention's heads is only known at run time")


def _read_log_sum_exp(ctx: Context, results: int, empty: float) -> float | None:
    """`empty` if the graph reads the log-sum-exp, the second of an operator's `results`, else None.

    Refuses if the graph reads a later result, or a log-sum-exp that the engine does not write.
    """
    if any(ctx.wants(position) for position in range(2, results)):
        raise Refuse(Reason.ARGUMENT, "the state of attention's random numbers, which backward needs, is eager's")
    if not ctx.wants(1):
        return None
    if not ctx.abilities.attention_gradients:
        raise Refuse(Reason.ARGUMENT, "the log-sum-exp of attention, which training needs, is computed by eager")
    return empty


@_lowers_attention(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention_for_cpu(ctx: Context, args: _Arguments) -> tuple[Value, Value | None]:
    """The CPU's flash attention: (result, log-sum-exp (B, H, S))."""
    return _attention(ctx, args, _read_log_sum_exp(ctx, 2, 0.0))


@_lowers_attention(aten._scaled_dot_product_flash_attention.default)
def flash_attention(ctx: Context, args: _Arguments) -> tuple[Value | None, ...]:
    """CUDA's flash attention: (result, log-sum-exp (B, H, S), None, ...)."""
    empty = _read_log_sum_exp(ctx, 9, math.inf)
    return *_attention(ctx, _as_flash(args), empty), *(None,) * 7


def _as_flash(args: _Arguments) -> _Arguments:
    """The arguments of CUDA's flash attention, whose causal mask lets the last query see the last key, with a mask instead of the flag."""
    q, rows, columns = args.q, args.q.shape[-2], args.k.shape[-2]
    if not args.causal or rows == columns:
        return args
    return replace(args, mask=_last_aligned((*q.shape[:-1], columns), compute_dtype(q.dtype)), causal=False)


@_lowers_attention(aten._scaled_dot_product_efficient_attention.default)
def efficient_attention(ctx: Context, args: _Arguments) -> tuple[Value | None, ...]:
    """CUDA's memory-efficient attention: (result, log-sum-exp, None, None).

    Its log-sum-exp has a multiple of 32 rows; those beyond are +inf.
    """
    result, log_sum_exp = _attention(ctx, args, _read_log_sum_exp(ctx, 4, -math.inf))
    return result, None if log_sum_exp is None else _rows_padded(log_sum_exp), None, None


def _rows_padded(log_sum_exp: Buffer) -> Value:
    *lead, rows = log_sum_exp.shape
    padded = ceil_div(rows, _ALIGNED_ROWS) * _ALIGNED_ROWS
    if padded == rows:
        return log_sum_exp

    def at(index: tuple[Index, ...]) -> Expr:
        inside = index_in(index[-1], 0, rows)
        return guard(inside, log_sum_exp.at(index), const(math.inf, log_sum_exp.dtype))

    return Map((*lead, padded), log_sum_exp.dtype, at)


@_lowers_attention(aten._scaled_dot_product_cudnn_attention.default)
def cudnn_attention(ctx: Context, args: _Arguments) -> tuple[Value | None, ...]:
    """cuDNN's attention: (result, log-sum-exp (B, H, S, 1), None, ...)."""
    result, log_sum_exp = _attention(ctx, args, _read_log_sum_exp(ctx, 9, -math.inf))
    if log_sum_exp is None:
        return result, *(None,) * 8
    return result, reshaped(log_sum_exp, (*log_sum_exp.shape, 1)), *(None,) * 7


@_lowers_attention(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(ctx: Context, args: _Arguments) -> Value:
    return _attention(ctx, args)[0]


@_lowers_attention(
    aten._scaled_dot_product_attention_math.default, aten._scaled_dot_product_attention_math_for_mps.default
)
def attention_math(ctx: Context, args: _Arguments) -> tuple[Value, None]:
    """(result, None): the attention weights are not kept."""
    if ctx.wants(1) or args.others["dropout_mask"] is not None:
        raise Refuse(Reason.ARGUMENT, "the attention weights are wanted, which the fused operation does not keep")
    return _attention(ctx, args)[0], None


# Gradients


def _gradients(ctx: Context, args: _Arguments) -> tuple[Value, Value, Value]:
    """Gradients of queries, keys and values, in their dtypes. `log_sum_exp`: (B, H, S)."""
    if not ctx.abilities.attention_gradients:
        raise Refuse(Reason.ARGUMENT, "the gradients of attention are computed by eager")
    _check_exact(ctx, args.dropout)
    q, k, v, mask, log_sum_exp = args.q, args.k, args.v, args.mask, args.log_sum_exp
    if len(q.shape) != 4:
        raise Refuse(Reason.ARGUMENT, "gradients of attention are taken with operands of four dimensions")
    batch, heads, rows, _ = q.shape
    own_heads, columns = k.shape[1:3]
    if v.shape[1] != own_heads or k.shape[0] != batch or v.shape[0] != batch:
        raise Refuse(Reason.ARGUMENT, "keys and values of attention have different heads or batches in backward")
    if mask is not None:
        mask = _additive(ctx, mask, (batch, heads), rows, columns)
    dtype, factor = compute_dtype(q.dtype), _factor(q, args.scale)
    score = SdpaScore(scale=factor, causal=args.causal, mask=mask)
    products = ctx.pointwise(mul, args.grad, args.out, dtype=dtype, compute=dtype, shape=args.grad.shape)
    delta = ctx.reduce("sum", products, (3,), dtype=dtype)
    statistics = ctx.pointwise(_finite_or_infinite, log_sum_exp, dtype=dtype, compute=dtype, shape=log_sum_exp.shape)
    keys, values = _heads_repeated(k, heads), _heads_repeated(v, heads)
    read = dict[str, Any](
        q=q, k=keys, v=values, grad=args.grad, log_sum_exp=statistics, delta=delta, score=score, scale=factor
    )
    for_queries = ctx.realize(AttentionQueryGradientOp(Buffer(q.shape, q.dtype), **read))
    for_values = Buffer(v.shape, v.dtype)
    for_keys = ctx.realize(AttentionKeyGradientOp(Buffer(k.shape, k.dtype), **read, value=for_values))
    return for_queries, for_keys, for_values


def _finite_or_infinite(log_sum_exp: Expr) -> Expr:
    """Rows that see nothing have +inf, whatever the operator wrote: exp(-inf - +inf) is 0, and exp(-inf - -inf) is not."""
    infinity = const(math.inf, log_sum_exp.dtype)
    return where(call("eq", log_sum_exp, const(-math.inf, log_sum_exp.dtype)), infinity, log_sum_exp)


@_lowers_attention(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_for_cpu_backward(ctx: Context, args: _Arguments) -> tuple[Value, Value, Value]:
    """(gradient of q, of k, of v)."""
    return _gradients(ctx, args)


# Without dropout the state of random numbers is not read.
_STATE = ("philox_seed", "philox_offset")
_LENGTHS = ("cum_seq_q", "cum_seq_k")


@_lowers_attention(aten._scaled_dot_product_flash_attention_backward.default, unread=(*_LENGTHS, *_STATE))
def flash_attention_backward(ctx: Context, args: _Arguments) -> tuple[Value, Value, Value]:
    """CUDA's flash attention: (gradient of q, of k, of v)."""
    return _gradients(ctx, _as_flash(args))


@_lowers_attention(aten._scaled_dot_product_efficient_attention_backward.default, unread=_STATE)
def efficient_attention_backward(ctx: Context, args: _Arguments) -> tuple[Value | None, ...]:
    """CUDA's memory-efficient attention: (gradient of q, of k, of v, None)."""
    if ctx.wants(3) and args.mask is not None and args.others["grad_input_mask"][3]:
        raise Refuse(Reason.ARGUMENT, "the gradient of attention's bias is computed by eager")
    if args.k.shape[1] != args.q.shape[1]:
        raise Refuse(Reason.ARGUMENT, "memory-efficient attention has as many heads of keys as of queries in backward")
    rows = reindex(args.log_sum_exp, args.q.shape[:3], lambda index: index)
    return *_gradients(ctx, replace(args, log_sum_exp=rows)), None


@_lowers_attention(aten._scaled_dot_product_cudnn_attention_backward.default, unread=(*_LENGTHS, *_STATE))
def cudnn_attention_backward(ctx: Context, args: _Arguments) -> tuple[Value, Value, Value]:
    """cuDNN's attention: (gradient of q, of k, of v)."""
    return _gradients(ctx, replace(args, log_sum_exp=reshaped(args.log_sum_exp, args.q.shape[:3])))
