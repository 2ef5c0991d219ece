"""Scaled dot-product attention as one AttentionOp.

The log-sum-exp that training needs is not computed: where the graph reads it, the operator is refused and eager's runs. Operators that
PyTorch has for one device each compute the same thing: each is lowered to the same operation.
"""

from __future__ import annotations

import math

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import as_index
from torch_hybrid_backend.loops.ir import AttentionOp, Buffer, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers, reindex
from torch_hybrid_backend.loops.lowerings.views import expanded, reshaped
from torch_hybrid_backend.loops.ops import cast, const, is_float, where
from torch_hybrid_backend.sizes.size import Dim

aten = torch.ops.aten


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
    """The mask as floats to add, broadcast to the scores' shape; booleans say what takes part."""
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


def _attention(
    ctx: Context, q: Value, k: Value, v: Value, mask: Value | None, dropout: float, causal: bool, scale: float | None
) -> Value:
    if dropout:
        raise Refuse(Reason.ARGUMENT, "attention with dropout draws random numbers")
    if not is_float(compute_dtype(ctx.out.dtype)):
        raise Refuse(Reason.DTYPE, f"attention of {ctx.out.dtype} is left to eager")
    shape = ctx.shape
    lead, rows, columns = q.shape[:-2], q.shape[-2], k.shape[-2]
    if mask is not None:
        mask = _additive(ctx, mask, lead, rows, columns)
    q, k, v = (_four_dimensional(value) for value in (q, k, v))
    batch, heads = q.shape[:2]
    k, v = (_batches_repeated(_heads_repeated(value, heads), batch) for value in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out = Buffer((batch, heads, rows, v.shape[-1]), ctx.out.dtype)
    return reshaped(ctx.realize(AttentionOp(out, q, k, v, mask, factor, causal)), shape)


def _check_unread(ctx: Context, results: int) -> None:
    """Refuses an operator of so many results, where the graph reads one beside the first: log-sum-exps and states of random generators."""
    if any(ctx.wants(position) for position in range(1, results)):
        raise Refuse(Reason.ARGUMENT, "the log-sum-exp of attention, which training needs, is computed by eager")


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention_for_cpu(
    ctx: Context,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, None]:
    """The CPU's flash attention: (result, None)."""
    _check_unread(ctx, 2)
    return _attention(ctx, q, k, v, attn_mask, dropout_p, is_causal, scale), None


@lowers(aten._scaled_dot_product_flash_attention.default)
def flash_attention(
    ctx: Context,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    """CUDA's flash attention: (result, None, ...)."""
    _check_unread(ctx, 9)
    if is_causal and q.shape[-2] != k.shape[-2]:
        # Its mask is aligned at the last query and the last key, that of the other operators at the first ones.
        raise Refuse(Reason.ARGUMENT, "flash attention is causal, and has more keys than queries, or fewer")
    return _attention(ctx, q, k, v, None, dropout_p, is_causal, scale), *(None,) * 8


@lowers(aten._scaled_dot_product_efficient_attention.default)
def efficient_attention(
    ctx: Context,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    """CUDA's memory-efficient attention: (result, None, ...)."""
    _check_unread(ctx, 4)
    return _attention(ctx, q, k, v, attn_bias, dropout_p, is_causal, scale), *(None,) * 3


@lowers(aten._scaled_dot_product_cudnn_attention.default)
def cudnn_attention(
    ctx: Context,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    """cuDNN's attention: (result, None, ...)."""
    _check_unread(ctx, 9)
    return _attention(ctx, q, k, v, attn_bias, dropout_p, is_causal, scale), *(None,) * 8


@lowers(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    ctx: Context,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    return _attention(ctx, q, k, v, attn_mask, dropout_p, is_causal, scale)


@lowers(aten._scaled_dot_product_attention_math.default, aten._scaled_dot_product_attention_math_for_mps.default)
def attention_math(
    ctx: Context,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Value | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Value, None]:
    """(result, None): the attention weights are not kept."""
    if ctx.wants(1) or dropout_mask is not None:
        raise Refuse(Reason.ARGUMENT, "the attention weights are wanted, which the fused operation does not keep")
    return _attention(ctx, q, k, v, attn_mask, dropout_p, is_causal, scale), None
