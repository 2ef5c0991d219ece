"""Scatters: atomic operations into what a first kernel wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.triton.regions_for_tests import HOPPER, check, compiled
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.loops.kernels import MapKernel, ScatterKernel

pytest.importorskip("triton")
aten = torch.ops.aten
_INDEX = torch.randint(0, 40, (300,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_sums(dtype: torch.dtype, tmp_path: Path) -> None:
    """Two kernels: a copy, and many blocks that add to it, computing what they add on the way."""
    x, rows = (10 * torch.randn(50, 6)).to(dtype), (10 * torch.randn(300, 6)).to(dtype)
    kinds = (MapKernel, ScatterKernel)
    check(tmp_path, lambda x, i, r: x.index_add(0, i, r * 2), x, _INDEX, rows, kinds=kinds)
    region, _ = compiled(tmp_path, lambda x, i, r: x.index_add(0, i, r), x, _INDEX, rows)
    assert "tl.atomic_add(" in emit_kernel(region.kernels.kernels[1], "kernel", HOPPER).text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_add_up_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Half types are rounded once at the end: thousands of ones stay thousands, which the types themselves cannot count to."""
    ones, index = torch.ones(5000, dtype=dtype), torch.zeros(5000, dtype=torch.int64)
    region, taken = compiled(tmp_path, lambda i, o: aten.index_add(o.new_zeros(3), 0, i, o), index, ones)
    assert region(taken)[0].tolist() == [torch.tensor(5000.0).to(dtype).item(), 0, 0]


def _largest(x: torch.Tensor, i: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.scatter_reduce(0, i[:, None].expand(rows.shape), rows, "amax")


def _smallest(x: torch.Tensor, i: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.scatter_reduce(0, i[:, None].expand(rows.shape), rows, "amin")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Extremes are of both signs, with NaN of both signs on both sides."""
    x, rows = torch.randn(50, 6, dtype=dtype), torch.randn(300, 6, dtype=dtype)
    rows[3], rows[4], rows[7, 0], x[5] = torch.nan, -torch.tensor(torch.nan), -torch.inf, torch.nan
    for call in (_largest, _smallest):
        region, taken = compiled(tmp_path, call, x, _INDEX, rows)
        torch.testing.assert_close(region(taken)[0], call(x, _INDEX, rows), rtol=0, atol=0, equal_nan=True)


def test_writes(tmp_path: Path) -> None:
    """Plain stores, of each dtype as it lies in memory."""
    where = torch.randperm(400)[:300]
    for dtype in (torch.float32, torch.float16, torch.bool, torch.uint8):
        x, rows = torch.zeros(400, 3).to(dtype), (5 * torch.randn(300, 3)).to(dtype)
        region, taken = compiled(tmp_path, lambda x, i, r: aten.index_put(x, [i], r), x, where, rows)
        assert torch.equal(region(taken)[0], x.index_put([where], rows))


def test_torch_s_setting_decides(deterministic: None, tmp_path: Path) -> None:
    """Sums of floats are eager's where results must not depend on an order, and those of integers stay here."""
    x, rows = torch.zeros(50, 6), torch.ones(300, 6)
    with pytest.raises(AssertionError, match=r"torch\.use_deterministic_algorithms is on"):  # there is no such region
        compiled(tmp_path, lambda x, i, r: x.index_add(0, i, r), x, _INDEX, rows)
    check(
        tmp_path, lambda x, i, r: x.index_add(0, i, r), x.long(), _INDEX, rows.long(), kinds=(MapKernel, ScatterKernel)
    )
    assert TritonBackend(HOPPER).policy.abilities.scatters == "ordered"
