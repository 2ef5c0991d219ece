"""PyTorch's fast path for transformer encoders, in operators that engines know.

In evaluation without gradients `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call one operator each, which ATen runs
as plain matrix products and a softmax: nothing inside can be fused, packed or replaced. Nested tensors stay with those operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor


def transformer_encoder_layer(
    x: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """`aten._transformer_encoder_layer_fwd`: x (N, T, E) -> (N, T, E), both of x's dtype; `mask` as for `_attended`."""
    if not _is_plain(x, num_heads):
        return NotImplemented

    def normed(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(y, (embed_dim,), weight, bias, eps)

    y = normed(x, norm_weight_1, norm_bias_1) if norm_first else x
    y = x + _attended(y, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, mask_type)
    y = y if norm_first else normed(y, norm_weight_1, norm_bias_1)
    inner = normed(y, norm_weight_2, norm_bias_2) if norm_first else y
    inner = functional.linear(inner, ffn_weight_1, ffn_bias_1)
    inner = functional.gelu(inner) if use_gelu else functional.relu(inner)
    y = y + functional.linear(inner, ffn_weight_2, ffn_bias_2)
    return y if norm_first else normed(y, norm_weight_2, norm_bias_2)


def native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """`aten._native_multi_head_attention` of one tensor to itself: (N, T, E) -> (N, T, E), and the weights (N, T, T), averaged over
    heads or (N, H, T, T); nothing in their place where they are not wanted."""
    if query is not key or key is not value or not _is_plain(query, num_head):
        return NotImplemented
    if not need_weights:
        y = _attended(query, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, mask_type)
        return y, None
    q, k, v = _heads(query, num_head, qkv_weight, qkv_bias)
    scores = torch.matmul(q * (embed_dim // num_head) ** -0.5, k.transpose(-2, -1))
    if mask is not None:
        scores = scores.masked_fill(_as_scores(mask, mask_type, query), -torch.inf)
    weights = scores.softmax(-1)
    y = functional.linear(_joined(torch.matmul(weights, v)), proj_weight, proj_bias)
    return y, weights.mean(1) if average_attn_weights else weights


def _is_plain(x: Tensor, heads: int) -> bool:
    return not x.is_nested and x.dim() == 3 and x.shape[-1] % heads == 0


def _heads(x: Tensor, heads: int, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each (N, H, T, E / H)."""
    n, t, e = x.shape
    q, k, v = functional.linear(x, weight, bias).view(n, t, 3, heads, e // heads).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _joined(y: Tensor) -> Tensor:
    n, heads, t, width = y.shape
    return y.transpose(1, 2).reshape(n, t, heads * width)  # sizes may be 0, of which -1 says nothing


def _as_scores(mask: Tensor, mask_type: int | None, x: Tensor) -> Tensor:
    """The mask, true where a score does not count, as it broadcasts over scores (N, H, T, T). Other numbers than zero count as true.

    mask_type: 0 for (T, T), 1 for (N, T), 2 for (N, H, T, T).
    """
    mask = mask.to(torch.bool)
    if mask_type == 0:
        return mask.view(1, 1, *mask.shape)
    return mask.view(x.shape[0], 1, 1, x.shape[1]) if mask_type == 1 else mask


def _attended(
    x: Tensor,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None,
    mask_type: int | None,
) -> Tensor:
    """Self-attention (N, T, E) -> (N, T, E) with its projections."""
    q, k, v = _heads(x, heads, qkv_weight, qkv_bias)
    if mask is None:
        y = functional.scaled_dot_product_attention(q, k, v)
    else:
        left_out = _as_scores(mask, mask_type, x)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=left_out.logical_not())
        # A query without any key: zero there, not a number in the fast path.
        y = y.masked_fill(left_out.all(-1, keepdim=True), torch.nan)
    return functional.linear(_joined(y), proj_weight, proj_bias)
