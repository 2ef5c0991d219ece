"""A token of a decoder with a static cache, whose heads share keys and values, as one region."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional


@pytest.mark.parametrize(("heads", "kept"), [(4, 4), (8, 4), (8, 1), (16, 1)], ids=str)
@torch.no_grad()
def test_a_token_of_grouped_heads(heads: int, kept: int) -> None:
    """Its key and value are written to the cache, and are what the token itself sees; nothing falls back to eager."""

    def token(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        keys[:, :, at], values[:, :, at] = k, v
        seen = (torch.arange(keys.shape[2]) <= at)[None]
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)

    torch.manual_seed(0)
    compiled = torch.compile(token, backend="hybrid", dynamic=False, options={"strict": True})
    caches = [torch.randn(2, kept, 100, 64) for _ in range(2)]
    expected = [cache.double() for cache in caches]
    for position in (40, 0, 99, -3):
        q, k, v = torch.randn(2, heads, 1, 64), *(torch.randn(2, kept, 1, 64) for _ in range(2))
        at = torch.tensor([position])
        got = compiled(q, k, v, *caches, at)
        want = token(q.double(), k.double(), v.double(), *expected, at)
        # No key is at or before a position that counts from the end.
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
        for cache, in_double in zip(caches, expected, strict=True):
            assert torch.equal(cache.double(), in_double)
