"""Scans: whole rows, and rows in chunks, along any axis."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.triton.regions_for_tests import check, kernels_of, sampled
from torch_hybrid_backend.loops.kernels import RowKernel

pytest.importorskip("triton")

_FUNCTIONS = {
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: (1 + 1e-3 * x).cumprod(-1),
    "cummax": lambda x: x.cummax(-1)[0],
    "cummin": lambda x: x.cummin(-1)[0],
    "where cummax": lambda x: x.cummax(-1)[1],
    "where cummin": lambda x: x.cummin(-1)[1],
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "from behind": lambda x: x.flip(-1).cumsum(-1).flip(-1),
    "softmax of it": lambda x: x.cumsum(-1).softmax(-1),
    "scan of a scan": lambda x: (x.cumsum(-1) / 100).cummax(-1)[0],
}


@pytest.mark.parametrize(
    "name", sampled(_FUNCTIONS, ("cumsum", "where cummax", "logcumsumexp", "from behind", "softmax of it"))
)
def test_rows_and_columns(name: str, tmp_path: Path) -> None:
    """Scans of one element, rows that are held whole, and chunks, the last of which is not full; what is computed of the results joins them."""
    torch.manual_seed(0)
    function = _FUNCTIONS[name]
    for shape in ((3, 1), (5, 37), (2, 8201)):
        x = torch.randn(shape)
        assert [type(kernel) for kernel in kernels_of(function, x)] == [RowKernel]
        check(tmp_path, function, x, tolerance=2e-4)
    check(tmp_path, lambda x: function(x.transpose(0, 1)), torch.randn(530, 40), tolerance=2e-4)


@pytest.mark.parametrize(
    "name",
    sampled(("cumsum", "cummax", "where cummax", "where cummin", "logcumsumexp"), ("where cummin", "logcumsumexp")),
)
@pytest.mark.parametrize("length", [40, 9000])
def test_nan_infinities_and_equals(name: str, length: int, tmp_path: Path) -> None:
    """The last of equal elements is named; a NaN stays, and the last of them is named."""
    x = torch.randn(4, length).round()
    x[1, length // 2] = x[1, length - 3] = float("nan")
    x[2, :5] = float("-inf")
    x[2, 9] = x[2, length - 9] = float("inf")
    x[3] = float("-inf")
    function = _FUNCTIONS[name]
    check(tmp_path, function, x, tolerance=2e-4)


def test_integers_and_halves(tmp_path: Path) -> None:
    """Sums are of 64 bits; extrema of the smallest integers."""
    x = torch.randint(-128, 128, (3, 3000), dtype=torch.int8)
    for name in ("cumsum", "cummax", "where cummin"):
        check(tmp_path, _FUNCTIONS[name], x)
        check(tmp_path, _FUNCTIONS[name], x > 0)
        check(tmp_path, _FUNCTIONS[name], (x / 16).to(torch.float16))
