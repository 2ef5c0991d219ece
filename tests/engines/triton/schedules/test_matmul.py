"""Matrix products: sizes that fill no tile, batches, operands that are computed, what is fused behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.triton.regions_for_tests import HOPPER, check
from torch_hybrid_backend.engines.triton.schedules.matmul import operand_dtype
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import as_index
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import MatMulKernel

pytest.importorskip("triton")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 70, 33), (64, 64, 64), (130, 65, 100), (17, 200, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sizes(m: int, n: int, k: int, dtype: torch.dtype, tmp_path: Path) -> None:
    check(tmp_path, torch.mm, torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), kinds=(MatMulKernel,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_what_tensor_cores_do_not_multiply(dtype: torch.dtype, tmp_path: Path) -> None:
    check(tmp_path, torch.mm, (3 * torch.randn(20, 30)).to(dtype), (3 * torch.randn(30, 9)).to(dtype))


def test_batches_and_transposed_operands(tmp_path: Path) -> None:
    """One weight for all of a batch too."""
    check(tmp_path, lambda a, b: a @ b.transpose(1, 2), torch.randn(3, 20, 40), torch.randn(3, 50, 40))
    check(tmp_path, lambda a, b: a @ b, torch.randn(3, 20, 40), torch.randn(40, 50))


def test_an_epilogue(tmp_path: Path) -> None:
    """Bias, activation and a sum are in the same kernel."""
    x, w, bias, other = torch.randn(30, 40), torch.randn(50, 40), torch.randn(50), torch.randn(30, 50)
    linear = torch.nn.functional.linear
    check(tmp_path, lambda x, w, b, o: linear(x, w, b).relu() + o, x, w, bias, other, kinds=(MatMulKernel,))


def test_many_tiles_of_rows(tmp_path: Path) -> None:
    """More than a group of them, and a group that is not full."""
    check(tmp_path, torch.mm, torch.randn(64 * 11 - 3, 16), torch.randn(16, 130))


def test_operands_stay_half_where_nothing_rounds() -> None:
    """What is loaded, selected or padded; not what is computed. The interpreter multiplies no bfloat16."""
    half, single = Buffer((4,), "bfloat16"), Buffer((4,), "float32")
    load = half.at((as_index(0),))
    gpu = Target(90, 132)
    assert operand_dtype(gpu, load, load) == "bfloat16"
    assert (
        operand_dtype(gpu, load, ops.guard(ops.call("lt", load, load), load, ops.const(0.0, "float32"))) == "bfloat16"
    )
    assert operand_dtype(gpu, load, ops.add(load, load)) == "float32"
    assert operand_dtype(gpu, load, single.at((as_index(0),))) == "float32"
    assert operand_dtype(HOPPER, load, load) == "float32"
