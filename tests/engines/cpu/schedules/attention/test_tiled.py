"""Tiled attention against float64 eager."""

from __future__ import annotations

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW
from tests.engines.cpu.schedules.attention.attention_for_tests import check
from torch_hybrid_backend.engines.cpu.target import Target


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 5, 7, 3, 3),  # smaller than a vector everywhere
        (2, 1, 40, 37, 20, 24),  # ragged everywhere
        (1, 1, 1, 100, 16, 16),  # one query
        (1, 1, 6, 1, 8, 40),  # one key
    ],
)
def test_matches_eager(shape: tuple[int, ...]) -> None:
    """(B, H, S, T, D, E)."""
    check(shape)  # type: ignore[arg-type]


def test_causal() -> None:
    """A query sees the keys up to its own position, also with more keys than queries."""
    check((2, 3, 33, 33, 16, 16), causal=True)
    check((1, 1, 10, 50, 8, 8), causal=True)


@pytest.mark.parametrize("mask_shape", [(1, 1, 20, 50), (2, 1, 1, 50)])
def test_additive_mask(mask_shape: tuple[int, ...]) -> None:
    """Masks of the whole score matrix and of keys, with minus infinities."""
    torch.manual_seed(1)
    mask = torch.randn(mask_shape)
    check((2, 2, 20, 50, 16, 16), mask=torch.where(torch.rand(mask_shape) < 0.3, -torch.inf, mask))


def test_a_fully_masked_row_is_zero() -> None:
    """A fully masked row is as in eager's scaled_dot_product_attention: zeros, not NaN."""
    mask = torch.zeros(1, 1, 4, 9)
    mask[:, :, 2] = -torch.inf
    check((1, 2, 4, 9, 8, 8), mask=mask)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
def test_heads_that_share_keys(target: Target) -> None:
    """A decoder's grouped heads are rows of one task where that leaves every core one; with a mask, and a new position in the cache."""
    mask = torch.zeros(2, 1, 1, 100)
    mask[0, :, :, 60:] = -torch.inf
    check((2, 32, 1, 100, 64, 64), target=target, shared=8, mask=mask, new_at=37)
    mask = torch.randn(1, 12, 3, 70)
    check((1, 12, 3, 70, 20, 24), target=target, shared=6, mask=mask, heads_inside=True)
    check((1, 6, 1, 1100, 16, 16), target=target, shared=6, new_at=1099)
    check((1, 8, 4, 40, 16, 16), target=target, shared=4, causal=True)


def test_long_keys_go_in_blocks() -> None:
    """Beyond 1024 keys the softmax runs online; a block that is wholly masked changes nothing."""
    mask = torch.zeros(1, 1, 1, 1100)
    mask[..., :600] = -torch.inf
    check((1, 1, 20, 1100, 16, 40), mask=mask)
    check((1, 1, 1100, 1100, 8, 8), causal=True)


def test_rows_are_shared_out_where_heads_are_few() -> None:
    """Rows of one head are shared by three cores: pieces of the query rows, each with its own packed keys."""
    check((1, 1, 50, 20, 8, 8), target=NARROW)


def test_memory_of_projections() -> None:
    """q, k, v and the output lie as (B, S, H, D)."""
    check((1, 2, 17, 20, 8, 8), heads_inside=True)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    """float64 stays float64; bfloat16 is computed in float32."""
    check((1, 2, 9, 20, 8, 8), dtype=dtype)
