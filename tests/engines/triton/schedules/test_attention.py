"""Attention programs beside PyTorch's composite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.triton.programs_for_tests import TARGETS
from tests.engines.triton.regions_for_tests import check
from torch_hybrid_backend.engines.triton.kernels import FlashKernel

pytest.importorskip("triton")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width"), [(5, 5, 8), (70, 70, 20), (1, 90, 16), (64, 130, 32)])
def test_sizes(target: str, causal: bool, queries: int, keys: int, width: int, tmp_path: Path) -> None:
    """Rows and keys that fill no tile; a causal mask begins at the first key."""
    q, k, v = (torch.randn(2, 3, n, width) for n in (queries, keys, keys))
    attend = torch.nn.functional.scaled_dot_product_attention
    function = lambda q, k, v: attend(q, k, v, is_causal=causal)  # noqa: E731
    check(tmp_path, function, q, k, v, target=TARGETS[target], kinds=(FlashKernel,))


def test_masks(tmp_path: Path) -> None:
    """Added to the scores; one for all heads, or one for each."""
    q, k, v = (torch.randn(2, 3, n, 16) for n in (40, 50, 50))
    attend = torch.nn.functional.scaled_dot_product_attention
    for shape in ((2, 3, 40, 50), (1, 1, 40, 50)):
        check(tmp_path, lambda q, k, v, m: attend(q, k, v, attn_mask=m), q, k, v, torch.randn(shape))
