"""Multi-head attention with its projections as calls of their own, which `call_sites` sees.

`torch.nn.functional.multi_head_attention_forward` is one function to a mode of torch's: what it calls inside is out of sight. Here is the same
for inference. Its formula: Vaswani et al., "Attention Is All You Need", 2017.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

# ("in_proj" or "out_proj", input, weight, bias) -> the linear layer's result
Project = Callable[[str, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]

_PARAMETERS = inspect.signature(functional.multi_head_attention_forward).parameters
_NAMES = tuple(_PARAMETERS)
_DEFAULTS = {name: p.default for name, p in _PARAMETERS.items() if p.default is not inspect.Parameter.empty}


def arguments_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    return {**_DEFAULTS, **dict(zip(_NAMES, args, strict=False)), **kwargs}


def is_taken(given: Mapping[str, Any]) -> bool:
    """True if `multi_head_attention` computes a call of these arguments: keys and values that are added, or projected already, are rare, and
    what torch refuses it is to refuse itself."""
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    rare = any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    if rare or given["add_zero_attn"] or (given["training"] and given["dropout_p"]):
        return False
    if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim() or key.shape[:-1] != value.shape[:-1]:
        return False
    if query.shape[-1] != given["embed_dim_to_check"] or query.shape[-1] % given["num_heads"]:
        return False
    if given["is_causal"] and mask is None:
        return False
    if query.dim() == 3 and query.shape[1] != key.shape[1]:
        return False
    of_keys = (key.shape[1], key.shape[0]) if query.dim() == 3 else (key.shape[0],)
    of_scores = (query.shape[0], key.shape[0])
    of_heads = (given["num_heads"] * (query.shape[1] if query.dim() == 3 else 1), *of_scores)
    return _is_mask(mask, of_scores, of_heads) and _is_mask(given["key_padding_mask"], of_keys)


def _is_mask(mask: torch.Tensor | None, *shapes: tuple[int, ...]) -> bool:
    return mask is None or (mask.shape in shapes and (mask.dtype == torch.bool or mask.is_floating_point()))


def multi_head_attention(project: Project, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of `multi_head_attention_forward` for a call that `is_taken`: the attended values, (length, batch, width) or (length, width),
    and the weights of attention where they are asked for. `project` computes its linear layers."""
    is_batched = given["query"].dim() == 3
    q, k, v = _projected(project, given)
    if not is_batched:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    length, batch, width = q.shape
    heads, keys = given["num_heads"], k.shape[0]
    # (length, batch, heads * d) -> (batch, heads, length, d)
    q, k, v = (x.view(x.shape[0], batch, heads, width // heads).permute(1, 2, 0, 3) for x in (q, k, v))
    mask = _mask(given, q.dtype, batch, keys)
    weights = None
    if given["need_weights"]:
        scores = (q * (width // heads) ** -0.5) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        attended = weights @ v
        weights = weights.mean(1) if given["average_attn_weights"] else weights
        weights = weights if is_batched else weights.squeeze(0)
    else:
        is_causal = given["is_causal"] and given["key_padding_mask"] is None
        attended = functional.scaled_dot_product_attention(q, k, v, None if is_causal else mask, is_causal=is_causal)
    rows = attended.permute(2, 0, 1, 3).reshape(length * batch, width)
    result = project("out_proj", rows, given["out_proj_weight"], given["out_proj_bias"])
    result = result.view(length, batch, result.shape[-1])
    return (result if is_batched else result.squeeze(1)), weights


def _projected(project: Project, given: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values: of one product, of two, or of three, as many as have inputs of their own."""
    inputs = [given["query"], given["key"], given["value"]]
    bias = given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return tuple(project("in_proj", *each) for each in zip(inputs, weights, biases, strict=True))
    weight, (query, key, value) = given["in_proj_weight"], inputs
    if key is not value:
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return tuple(project("in_proj", *each) for each in zip(inputs, weight.chunk(3), biases, strict=True))
    if query is key:
        return project("in_proj", query, weight, bias).chunk(3, -1)
    width = query.shape[-1]
    parts = [None, None] if bias is None else bias.split([width, 2 * width])
    of_query, of_keys = weight.split([width, 2 * width])
    return project("in_proj", query, of_query, parts[0]), *project("in_proj", key, of_keys, parts[1]).chunk(2, -1)


def _mask(given: Mapping[str, Any], dtype: torch.dtype, batch: int, keys: int) -> torch.Tensor | None:
    """The mask that is added to the scores (batch, heads, length, keys), or None: the two masks together, -inf where either says so."""
    mask: torch.Tensor | None = given["attn_mask"]
    padding: torch.Tensor | None = given["key_padding_mask"]
    if mask is not None:
        mask = _added(mask, dtype)
        mask = mask if mask.dim() == 2 else mask.view(batch, given["num_heads"], *mask.shape[1:])
    if padding is None:
        return mask
    padding = _added(padding, dtype).view(batch, 1, 1, keys)
    return padding if mask is None else mask + padding


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
