"""Convolutions of all forms, beside PyTorch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.triton.programs_for_tests import run_program
from tests.engines.triton.regions_for_tests import check, kernels_of
from torch_hybrid_backend.engines.triton.alternatives import tiled
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling
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
    "volumes": (
        torch.nn.Conv3d(20, 18, (2, 3, 1), stride=(1, 2, 1), padding=(0, 1, 0), dilation=(2, 1, 1)),
        (1, 20, 4, 5, 3),
    ),
    "volumes, few channels": (torch.nn.Conv3d(4, 18, 3, padding=1, groups=2), (1, 4, 3, 4, 4)),
    "volumes, depthwise": (torch.nn.Conv3d(4, 4, 3, padding=1, groups=4), (2, 4, 3, 4, 4)),
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
        return getattr(torch, f"conv{x.dim() - 2}d")(
            x, weights[0], bias, module.stride, module.padding, module.dilation, module.groups
        ).relu()

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


# The image; the weight; stride, padding, dilation, output padding, groups. All have a bias and a ReLU behind them.
_TRANSPOSED = {
    "3x3": ((1, 20, 5, 6), (20, 18, 3, 3), 2, 1, 1, 1, 1),
    "two images, as many taps everywhere": ((2, 20, 5, 6), (20, 18, 4, 4), 2, 1, 1, 0, 1),
    "stride 1": ((1, 17, 5, 6), (17, 18, 3, 3), 1, 1, 1, 0, 1),
    "points without taps": ((1, 20, 4, 4), (20, 18, 2, 2), 4, 0, 6, 3, 1),
    "stride and dilation without common divisor": ((1, 20, 5, 4), (20, 18, 3, 3), 3, 1, 2, 1, 1),
    "gaps between the windows": ((1, 20, 4, 4), (20, 9, 1, 2), 3, 0, 1, 2, 1),
    "groups": ((1, 32, 5, 6), (32, 9, 3, 3), 2, 1, 1, 1, 2),
    "few channels": ((1, 3, 5, 6), (3, 18, 5, 5), 2, 1, 2, 1, 1),
    "depthwise": ((2, 6, 5, 6), (6, 1, 3, 3), 2, 1, 1, 1, 6),
    "groups of few channels": ((1, 6, 5), (6, 2, 3), 4, 1, 6, 1, 3),
    "one dimension": ((1, 20, 9), (20, 18, 7), 3, 2, 1, 1, 1),
    "volumes": ((1, 20, 3, 4, 3), (20, 18, 3, 2, 3), 2, 1, 1, 1, 1),
}


@pytest.mark.parametrize("name", _TRANSPOSED)
def test_transposed(name: str, tmp_path: Path) -> None:
    """Those whose windows overlap or leave gaps, with channels outermost and innermost. What a padded result lacks, and what no window reaches,
    is right too."""
    x_shape, w_shape, *geometry, groups = _TRANSPOSED[name]
    stride, padding, dilation, extra = ([n] * (len(x_shape) - 2) for n in geometry)
    inputs = [torch.randn(shape) for shape in (x_shape, w_shape, (w_shape[1] * groups,))]

    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x, w, b, stride, padding, dilation, True, extra, groups).relu()

    check(tmp_path, convolve, *inputs, kinds=(ConvKernel,), tolerance=1e-4)
    inputs[:2] = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in inputs[:2])
    check(tmp_path, convolve, *inputs, kinds=(ConvKernel,), tolerance=1e-4)


@pytest.mark.parametrize("groups", [1, 16])
def test_a_window_in_the_padding(groups: int, tmp_path: Path) -> None:
    """The only window of a result of one point sees nothing of the image."""
    x, w = torch.randn(2, 16, 1), torch.randn(16, 16 // groups, 1)
    check(tmp_path, lambda x, w: torch.conv1d(x, w, stride=3, padding=1, groups=groups), x, w, kinds=(ConvKernel,))


@pytest.mark.parametrize("groups", [1, 6])
def test_what_is_no_tap_is_not_read(groups: int, tmp_path: Path) -> None:
    """Behind the weight's last element there is none: NaN there would be seen. Nor does an infinite element of the image meet a weight that
    is not its own."""
    memory = torch.ones(2, 6, 6 // groups, 3, 3)
    memory[1] = torch.nan

    def convolve(x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.conv_transpose2d(x, memory[0], stride=2, padding=1, groups=groups)

    check(tmp_path, convolve, torch.full((1, 6, 3, 3), torch.inf), memory, kinds=(ConvKernel,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_of_volumes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Halves are summed in float32 there too, and the bias is added before the result is rounded."""
    x, w, b = (torch.randn(shape).to(dtype) for shape in ((1, 18, 3, 4, 4), (17, 18, 2, 3, 3), (17,)))
    check(tmp_path, lambda x, w, b: torch.conv3d(x, w / 18, b, padding=1), x, w, b)
    w = w.transpose(0, 1).contiguous()
    check(tmp_path, lambda x, w, b: torch.conv_transpose3d(x, w / 18, b, stride=2), x, w, b)


def test_volumes_in_parts_along_k(tmp_path: Path) -> None:
    """A convolution of volumes whose taps several programs share."""
    x, w = torch.randn(2, 16, 3, 4, 4), torch.randn(9, 16, 2, 3, 3)
    (kernel,) = kernels_of(lambda x, w: torch.conv3d(x, w, stride=(1, 1, 2), padding=(0, 1, 1)), x, w)
    assert isinstance(kernel, ConvKernel)
    wanted = torch.conv3d(x.double(), w.double(), stride=(1, 1, 2), padding=(0, 1, 1))
    memory = dict(zip((read.buffer for read in kernel.reads), (x, w), strict=True))
    for each in tiled(kernel, Tiling(16, 16, 16, splits=3)):
        memory.update(zip((write.buffer for write in each.writes), run_program(each, memory), strict=True))
    torch.testing.assert_close(memory[kernel.writes[0].buffer].double(), wanted, rtol=1e-4, atol=1e-4)
