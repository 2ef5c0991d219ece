"""Convolutions of all forms, beside PyTorch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.triton.regions_for_tests import check
from torch_hybrid_backend.loops.kernels import ConvKernel

pytest.importorskip("triton")

_CASES = {
    "1x1": (torch.nn.Conv2d(8, 20, 1), (2, 8, 9, 7)),
    "3x3 with padding": (torch.nn.Conv2d(3, 18, 3, padding=1), (1, 3, 12, 11)),
    "stride and dilation": (torch.nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2), (2, 4, 13, 10)),
    "groups": (torch.nn.Conv2d(12, 24, 3, padding=1, groups=3), (1, 12, 8, 8)),
    "depthwise": (torch.nn.Conv2d(10, 10, 5, padding=2, groups=10), (1, 10, 9, 9)),
    "no bias": (torch.nn.Conv2d(5, 7, (2, 3), bias=False), (1, 5, 6, 6)),
    "many channels": (torch.nn.Conv2d(20, 18, 3, padding=(1, 0), stride=(1, 2)), (2, 20, 8, 9)),
    "1x1 with stride": (torch.nn.Conv2d(40, 20, 1, stride=2), (1, 40, 7, 7)),
    "many channels of groups": (torch.nn.Conv2d(40, 34, (1, 3), padding=1, groups=2), (1, 40, 5, 6)),
    "one dimension": (torch.nn.Conv1d(6, 9, 4, stride=3, padding=1), (2, 6, 31)),
}


@pytest.mark.parametrize("is_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", _CASES)
def test_forms(name: str, is_last: bool, tmp_path: Path) -> None:
    module, shape = _CASES[name]
    weights = [p.detach() for p in module.parameters()]
    x = torch.randn(shape)
    if is_last:
        x, weights[0] = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, weights[0]))

    def convolve(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        bias = weights[1] if len(weights) > 1 else None
        function = torch.conv1d if x.dim() == 3 else torch.conv2d
        return function(x, weights[0], bias, module.stride, module.padding, module.dilation, module.groups).relu()

    check(tmp_path, convolve, x, *weights, kinds=(ConvKernel,), tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Halves are summed in float32, and the bias is added before the result is rounded."""
    x, w, b = (torch.randn(shape).to(dtype) for shape in ((1, 18, 6, 6), (17, 18, 3, 3), (17,)))
    check(tmp_path, lambda x, w, b: torch.nn.functional.conv2d(x, w / 10, b, padding=1), x, w, b)


def test_what_is_computed_is_0_in_the_padding(tmp_path: Path) -> None:
    """The logarithm of an element outside the image would be -inf."""
    x, w = torch.rand(1, 20, 6, 6) + 0.5, torch.randn(18, 20, 3, 3)
    check(tmp_path, lambda x, w: torch.nn.functional.conv2d(x.log(), w, padding=1), x, w, tolerance=1e-4)
