"""Convolutions with few channels in and out of a group, beside PyTorch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.triton.regions_for_tests import HOPPER, check, kernels_of
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.engines.triton.schedules import depthwise
from torch_hybrid_backend.loops.kernels import ConvKernel

pytest.importorskip("triton")

# Channels of the image, and the result; groups; kernel; what else.
_FORMS = {
    "depthwise": (10, 10, 10, (3, 3), {"padding": 1}),
    "stride, dilation": (70, 70, 70, (3, 3), {"stride": 2, "padding": 2, "dilation": 2}),
    "two results of a channel": (6, 12, 6, (3, 2), {}),
    "two channels for two results": (8, 8, 4, (3, 3), {"padding": (0, 1)}),
    "a long window": (5, 5, 5, (7, 7), {"padding": 3}),
    "one channel": (1, 1, 1, (5, 5), {"padding": 2}),
    "one tap": (9, 9, 9, (1, 1), {"stride": 3}),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", _FORMS)
def test_forms(name: str, memory_format: torch.memory_format, tmp_path: Path) -> None:
    channels, out_channels, groups, kernel, arguments = _FORMS[name]
    x = torch.randn(2, channels, 7, 6).to(memory_format=memory_format)
    w, bias = torch.randn(out_channels, channels // groups, *kernel), torch.randn(out_channels)

    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w, b, groups=groups, **arguments).relu() + 1

    check(tmp_path, convolve, x, w, bias, kinds=(ConvKernel,))
    (conv,) = kernels_of(convolve, x, w, bias)
    assert isinstance(conv, ConvKernel)
    assert depthwise.serves(conv)
    assert "tl.dot" not in emit_kernel(conv, "kernel", HOPPER).text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Halves are summed in float32. One dimension too."""
    x, w = torch.randn(2, 6, 40).to(dtype), torch.randn(6, 1, 5).to(dtype)
    check(tmp_path, lambda x, w: torch.nn.functional.conv1d(x, w, padding=2, groups=6), x, w)


def test_what_is_computed_is_0_in_the_padding(tmp_path: Path) -> None:
    """The logarithm of an element outside the image would be -inf."""
    x, w = torch.rand(1, 4, 6, 6) + 0.5, torch.randn(4, 1, 3, 3)
    check(tmp_path, lambda x, w: torch.nn.functional.conv2d(x.log(), w, padding=1, groups=4), x, w)


def test_more_channels_are_a_matrix_product() -> None:
    """More channels, of a group's result or of k, are a matrix product."""
    convolve = torch.nn.functional.conv2d
    for shape in ((32, 1, 3, 3), (2, 64, 1, 1), (2, 2, 9, 9)):
        (kernel,) = kernels_of(convolve, torch.empty(1, shape[1], 9, 9), torch.empty(shape))
        assert isinstance(kernel, ConvKernel)
        assert not depthwise.serves(kernel)
