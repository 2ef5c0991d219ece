"""FlexAttention without gradients, written out: scores, the user's functions of them, a softmax and a product.

`flex_attention` is a higher-order operator, which calls graphs of the user's (`score_mod`, `mask_mod`) for each score: no engine takes it, and
on the CPU eager writes all scores to memory. Written out over tensors of all scores, it is what `loops.sdpa_matching` makes one operation of.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_hybrid_backend.torch_private import (
    FunctionalTensorMode,
    GetItemAsIndex,
    flex_attention_handlers,
    vmap_over_scores,
)

Tensor = torch.Tensor


@contextlib.contextmanager
def flex_attention_written_out() -> Iterator[None]:
    """Trace FlexAttention on the CPU as operators; its gradients stay the operator that they are."""
    handlers = flex_attention_handlers()
    if handlers is None:  # no graph has any
        yield
        return
    traced = handlers[FunctionalTensorMode]

    def functional(mode: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].device.type != "cpu" or torch.is_grad_enabled():
            return traced(mode, *args, **kwargs)
        with mode:
            return _written_out(*args, **kwargs)

    handlers[FunctionalTensorMode] = functional
    try:
        yield
    finally:
        handlers[FunctionalTensorMode] = traced


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """(result, log-sum-exps, largest scores), the latter two in base 2, (B, H, S). query (B, H, S, D); key and value have H or fewer heads, and
    B batches or one. The last of `block_mask` is `mask_mod`, which says for each score what its blocks say of many."""
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = (torch.repeat_interleave(x, groups, dim=1) for x in (key, value))
    key, value = (x.expand(query.size(0), *x.shape[1:]) for x in (key, value))
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(working) @ key.to(working).transpose(-2, -1)) * scale
    places = [torch.arange(n, device=query.device) for n in scores.shape]
    score_of = vmap_over_scores(score_mod, prefix=(0,), suffix=(None,) * len(score_mod_other_buffers))
    mask_of = vmap_over_scores(block_mask[-1], prefix=(), suffix=(None,) * len(mask_mod_other_buffers))
    with GetItemAsIndex():
        seen = mask_of(*places, *mask_mod_other_buffers)
        scores = score_of(scores, *places, *score_mod_other_buffers).to(working)
    scores = torch.where(seen, scores, -math.inf)
    top = torch.amax(scores, -1)
    sums = torch.where(top == -math.inf, -math.inf, torch.logsumexp(scores, -1))
    weights = torch.ops.aten._safe_softmax(scores, -1)  # 0 in a row that sees nothing
    result = weights.to(query.dtype) @ value.to(query.dtype)
    return result, sums / math.log(2), top / math.log(2)
