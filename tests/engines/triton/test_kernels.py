"""The kernels of attention as data: heads that share keys, and the split along keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.triton.regions_for_tests import compiled
from torch_hybrid_backend.codegen.kernel_key import canonical_text
from torch_hybrid_backend.engines.triton.kernels import FlashKernel, split_along_keys
from torch_hybrid_backend.engines.triton.target import INTERPRETER
from torch_hybrid_backend.loops.kernels import RowKernel

pytest.importorskip("triton")

attend = torch.nn.functional.scaled_dot_product_attention


def _kernel(folder: Path, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> FlashKernel:
    region, _ = compiled(folder, function, *inputs, target=INTERPRETER)
    (kernel,) = region.kernels.kernels
    assert isinstance(kernel, FlashKernel)
    return kernel


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "share"), [(12, 12, 1), (4, 4, 3), (1, 1, 12), (4, 2, 3), (2, 1, 6), (12, 1, 1)]
)
def test_heads_that_share_keys(key_heads: int, value_heads: int, share: int, tmp_path: Path) -> None:
    """The most heads in a row that read the same keys and the same values."""
    q, k, v = torch.randn(1, 12, 3, 8), torch.randn(1, key_heads, 5, 8), torch.randn(1, value_heads, 5, 8)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, *(x.repeat_interleave(12 // x.shape[1], 1) for x in (k, v)))

    assert _kernel(tmp_path, function, q, k, v).share == share


def test_a_split_kernel(tmp_path: Path) -> None:
    """The first kernel reads what attention reads, the second what follows it, and only that writes the result. All have a text."""
    q, x = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    kernel = _kernel(tmp_path, lambda q, x: attend(q, q, q) + x, q, x)
    partial, combining = split_along_keys(kernel, 4)
    assert isinstance(partial, FlashKernel)
    assert isinstance(combining, RowKernel)
    assert partial.splits == 4
    assert [a.buffer.shape for a in partial.writes] == [(4, 1, 2, 3, 8), (4, 1, 2, 3)]
    assert [a.buffer for a in partial.reads] == [kernel.reads[0].buffer]
    assert [a.buffer for a in combining.reads] == [*(a.buffer for a in partial.writes), kernel.reads[1].buffer]
    assert combining.writes == kernel.writes
    assert len({canonical_text(k) for k in (kernel, partial, combining)}) == 3


def test_what_operators_of_pytorch_could_compute(tmp_path: Path) -> None:
    """Scores in the terms of attention operators, where they are of that kind; else None."""
    q, mask = torch.randn(1, 2, 3, 8), torch.randn(3, 3)
    plain = _kernel(tmp_path, lambda q, mask: attend(q, q, q, attn_mask=mask, scale=0.5), q, mask)
    assert (plain.scale, plain.causal, len(plain.mask_vars)) == (0.5, False, 4)
    written = _kernel(tmp_path, lambda q: torch.softmax(q @ q.transpose(-1, -2), -1) @ q, q)
    assert (written.scale, written.mask) == (None, None)
