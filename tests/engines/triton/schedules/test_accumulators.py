"""Accumulators of long rows: one reading of memory, as exact as several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.triton.regions_for_tests import HOPPER, check, kernels_of
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.engines.triton.schedules.accumulators import neutral

pytest.importorskip("triton")

# 4 rows or more: fewer are split among this target's multiprocessors.
_ROWS = 4


def test_a_variance_beside_a_large_mean(tmp_path: Path) -> None:
    """A mean of 10^4, a deviation of 1, 10^5 elements: what float32 tells apart of such elements; columns, float64 and squares near float32's
    end, too."""
    torch.manual_seed(0)
    check(tmp_path, lambda x: x.var(-1), 1e4 + torch.randn(_ROWS, 100_001), tolerance=5e-5)
    check(tmp_path, lambda x: x.var(-1), 1e4 + torch.randn(_ROWS, 9001).double(), tolerance=1e-7)
    check(tmp_path, lambda x: x.transpose(0, 1).var(-1), 1e4 + torch.randn(3001, 70), tolerance=1e-4)
    check(tmp_path, lambda x: x.var(-1), torch.full((_ROWS, 8193), 3e18), tolerance=1e-5)


def test_layer_norm_of_long_halves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        x = (5 + torch.randn(_ROWS, 9001)).to(dtype)
        check(tmp_path, lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), x)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_exponentials_beside_their_maximum(name: str, tmp_path: Path) -> None:
    """A maximum that comes last, or grows all the time; infinities, NaN, and rows of nothing but one infinity."""
    x = torch.randn(7, 9001)
    x[0, 9000] = 200.0
    x[1] = torch.linspace(-500, 500, 9001)
    x[2, 5] = x[2, 7000] = float("inf")
    x[3, :5000] = float("-inf")
    x[4] = float("-inf")
    x[5] = float("inf")
    x[6, 3000] = float("nan")
    check(tmp_path, lambda x: getattr(x, name)(-1), x, tolerance=1e-4)


def test_a_row_is_read_once_for_all_its_statistics() -> None:
    """A loop with one load reads a row once."""
    for function in (lambda x: x.var(-1), lambda x: x.logsumexp(-1)):
        (kernel,) = kernels_of(function, torch.empty(_ROWS, 9001))
        text = emit_kernel(kernel, "kernel", HOPPER).text
        assert (text.count("for chunk in"), text.count("tl.load(")) == (1, 1)


def test_neutral_elements() -> None:
    """Neutral elements change nothing that they are combined with."""
    assert (neutral("sum", "float32"), neutral("prod", "int64"), neutral("all", "bool")) == ("0.0", "1", "True")
    assert (neutral("max", "float32"), neutral("min", "float64")) == ("float('-inf')", "float('inf')")
    assert (neutral("max", "int8"), neutral("min", "int8"), neutral("min", "uint8")) == ("-128", "127", "255")
