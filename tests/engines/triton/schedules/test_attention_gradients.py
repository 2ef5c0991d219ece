"""Gradients of attention beside autograd's of the composite in float64, run by the interpreter with a GPU's tiles."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.engines.triton.programs_for_tests import HOPPER, TARGETS
from tests.engines.triton.regions_for_tests import compiled
from torch_hybrid_backend.engines.triton.kernels import FlashKernel, KeyGradientKernel, QueryGradientKernel
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.kernels import RowKernel

pytest.importorskip("triton")

aten = torch.ops.aten
forward = aten._scaled_dot_product_flash_attention_for_cpu.default
backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _check(
    folder: Path,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    target: Target = HOPPER,
    tolerance: float = 1e-5,
) -> None:
    """Forward with its log-sum-exp, then backward from both, in kernels. Heads that share keys are summed in the kernels."""
    g = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype)
    masks = () if mask is None else (mask,)

    def run_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> list[torch.Tensor]:
        return list(forward(q, k, v, 0.0, causal, attn_mask=mask[0] if mask else None))

    def run_backward(
        g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, *mask: torch.Tensor
    ) -> list[torch.Tensor]:
        return list(backward(g, q, k, v, out, sums, 0.0, causal, attn_mask=mask[0] if mask else None))

    region, taken = compiled(folder, run_forward, q, k, v, *masks, target=target)
    assert [type(kernel) for kernel in region.kernels.kernels] == [FlashKernel]
    out, sums = region(taken)
    eager, eager_sums = forward(*(x.double() for x in (q, k, v)), 0.0, causal, attn_mask=mask.double() if masks else None)
    torch.testing.assert_close(out.double(), eager, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(sums.double(), eager_sums, rtol=tolerance, atol=tolerance)
    region, taken = compiled(folder, run_backward, g, q, k, v, out, sums, *masks, target=target)
    kinds = [type(kernel) for kernel in region.kernels.kernels]
    assert kinds == [RowKernel, QueryGradientKernel, KeyGradientKernel]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    additive = None if mask is None else mask.double()
    exact = aten._scaled_dot_product_attention_math(*leaves, additive, 0.0, causal)[0]
    for got, want in zip(region(taken), torch.autograd.grad(exact, leaves, g.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("queries", "keys", "width", "causal", "target"),
    [
        (70, 70, 20, True, "hopper"),
        (33, 90, 16, False, "hopper"),
        (1, 1, 8, True, "hopper"),
        pytest.param(130, 64, 72, True, "hopper", marks=pytest.mark.full),
        pytest.param(64, 130, 128, True, "large tiles", marks=pytest.mark.full),
    ],
)
def test_sizes(queries: int, keys: int, width: int, causal: bool, target: str, tmp_path: Path) -> None:
    """Rows and keys that fill no tile, widths that are no powers of two."""
    q, k, v = (torch.randn(2, 2, rows, width) for rows in (queries, keys, keys))
    _check(tmp_path, q, k, v, causal=causal, target=TARGETS[target])


@pytest.mark.parametrize("causal_rows", [0, 3])
def test_masks(causal_rows: int, tmp_path: Path) -> None:
    """Added to the scores; a row that sees nothing has no gradient."""
    q, k, v = (torch.randn(1, 2, n, 16) for n in (40, 50, 50))
    mask = torch.randn(1, 1, 40, 50)
    mask[..., :causal_rows, :] = -math.inf
    _check(tmp_path, q, k, v, mask)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-2), (torch.bfloat16, 6e-2), (torch.float64, 1e-12)])
def test_dtypes(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    q, k, v = (torch.randn(1, 2, n, 32).to(dtype) for n in (70, 70, 70))
    _check(tmp_path, q, k, v, causal=True, tolerance=tolerance)


def test_two_runs_are_equal(tmp_path: Path) -> None:
    """Nothing is added up in memory in an order that may vary; each launch of the program writes the same bits."""
    q, k, v, g = (torch.randn(1, 2, 70, 16) for _ in range(4))
    out, sums = forward(q, k, v)
    region, taken = compiled(tmp_path, lambda g, q, k, v, o, s: list(backward(g, q, k, v, o, s, 0.0, False)), g, q, k, v, out, sums)
    text = [kernel for kernel in region.kernels.kernels if isinstance(kernel, KeyGradientKernel)]
    assert len(text) == 1
    for first, second in zip(region(taken), region(taken), strict=True):
        assert torch.equal(first, second)
