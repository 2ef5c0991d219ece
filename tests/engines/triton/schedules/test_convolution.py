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
    "one dimension": (torch.nn.Conv1d(6, 9, 4, stride=3, padding=1), (2, 6, 31)),
}


@pytest.mark.parametrize("name", _CASES)
def test_forms(name: str, tmp_path: Path) -> None:
    module, shape = _CASES[name]
    weights = [p.detach() for p in module.parameters()]

    def convolve(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        bias = weights[1] if len(weights) > 1 else None
        function = torch.conv1d if x.dim() == 3 else torch.conv2d
        return function(x, weights[0], bias, module.stride, module.padding, module.dilation, module.groups).relu()

    check(tmp_path, convolve, torch.randn(shape), *weights, kinds=(ConvKernel,))
