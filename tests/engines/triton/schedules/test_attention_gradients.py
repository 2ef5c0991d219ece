"""Gradients of attention beside autograd's of the composite in float64, run by the interpreter with a GPU's tiles."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.engines.triton.machine_code_for_tests import kernels_for, machine_code
from tests.engines.triton.programs_for_tests import HOPPER, TARGETS
from tests.engines.triton.regions_for_tests import compiled
from torch_hybrid_backend.engines.triton.emit import emit_kernel
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
        g: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        *mask: torch.Tensor,
    ) -> list[torch.Tensor]:
        return list(backward(g, q, k, v, out, sums, 0.0, causal, attn_mask=mask[0] if mask else None))

    region, taken = compiled(folder, run_forward, q, k, v, *masks, target=target)
    assert [type(kernel) for kernel in region.kernels.kernels] == [FlashKernel]
    out, sums = region(taken)
    eager, eager_sums = forward(
        *(x.double() for x in (q, k, v)), 0.0, causal, attn_mask=mask.double() if masks else None
    )
    torch.testing.assert_close(out.double(), eager, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(sums.double(), eager_sums, rtol=tolerance, atol=tolerance)
    region, taken = compiled(folder, run_backward, g, q, k, v, out, sums, *masks, target=target)
    kinds = [type(kernel) for kernel in region.kernels.kernels]
    assert kinds == [RowKernel, QueryGradientKernel, KeyGradientKernel]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    additive = None if mask is None else mask.double()
    share = q.shape[1] // k.shape[1]
    repeated = (leaves[0], *(x.repeat_interleave(share, 1) for x in leaves[1:]))
    exact = aten._scaled_dot_product_attention_math(*repeated, additive, 0.0, causal)[0]
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
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 2e-2), (torch.bfloat16, 6e-2), (torch.float64, 1e-12)]
)
def test_dtypes(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    q, k, v = (torch.randn(1, 2, n, 32).to(dtype) for n in (70, 70, 70))
    _check(tmp_path, q, k, v, causal=True, tolerance=tolerance)


def test_heads_that_share_keys(tmp_path: Path) -> None:
    """The gradients of keys and values are sums over the heads that read them, made by one program."""
    q, k, v = torch.randn(2, 6, 40, 16), torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    _check(tmp_path, q, k, v)


def test_nothing_is_added_up_in_memory(tmp_path: Path) -> None:
    """Then the order of additions, and with it the result, is the same in every run."""
    q, sums = torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70)
    region, _ = compiled(tmp_path, lambda x, s: list(backward(x, x, x, x, x, s, 0.0, True)), q, sums)
    for kernel in region.kernels.kernels:
        assert "atomic" not in emit_kernel(kernel, "kernel", HOPPER).text


def test_a_causal_gradient_visits_what_is_seen(tmp_path: Path) -> None:
    """Queries before a block of keys do not see it: they are not read, and NaN there does not reach the gradient of the last keys."""
    q, sums = torch.randn(1, 1, 128, 16), torch.randn(1, 1, 128)
    unread = q.clone()
    unread[:, :, :64] = math.nan

    def last_keys(g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        return backward(g, q, k, k, g, sums, 0.0, True)[1][:, :, 64:]

    region, taken = compiled(tmp_path, last_keys, q, unread, q, sums)
    (got,) = region(taken)
    region, taken = compiled(tmp_path, last_keys, q, q, q, sums)
    assert torch.equal(got, region(taken)[0])


@pytest.mark.full
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code(capability: int, width: int, tmp_path: Path) -> None:
    """Machine code of bfloat16 has products by tensor cores, and nothing spilled."""
    target = Target(capability, 132)
    q, sums = torch.empty(1, 16, 2048, width, dtype=torch.bfloat16), torch.empty(1, 16, 2048)
    kernels = kernels_for(lambda x, s: list(backward(x, x, x, x, x, s, 0.0, True)), q, sums, target=target)
    for kernel in kernels[1:]:
        code = machine_code(kernel, target, tmp_path)
        assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in code.ptx
        assert code.spilled_bytes == 0
