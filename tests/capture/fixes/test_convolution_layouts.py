"""Convolutions of images of all sizes are traced once, where PyTorch would choose other libraries for small ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torch_hybrid_backend import backend as _registered  # noqa: F401
from torch_hybrid_backend.capture.fixes.convolution_layouts import convolutions_of_all_sizes

SIZES = [(96, 80), (8, 9), (33, 120), (12, 200), (5, 5)]  # more and fewer than 20,480 elements, with batch and channels
NETS = [
    pytest.param(lambda: nn.Conv2d(8, 16, 3, padding=1), torch.contiguous_format, id="2-D"),
    pytest.param(lambda: nn.Conv2d(8, 16, 3, padding=1), torch.channels_last, id="channels last"),
    pytest.param(lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), torch.contiguous_format, id="depthwise"),
    pytest.param(lambda: nn.Conv2d(8, 16, 3, padding=2, dilation=2), torch.contiguous_format, id="dilated"),
    pytest.param(lambda: nn.ConvTranspose2d(8, 4, 2, stride=2), torch.contiguous_format, id="transposed"),
]


def _image(height: int, width: int, layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """An image (1, 8, height, width) whose sizes are known only at run time."""
    x = torch.randn(1, 8, height, width).to(memory_format=layout)
    for dim in (2, 3):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


@pytest.mark.parametrize(("make", "layout"), NETS)
def test_all_sizes(recorder: Any, make: Any, layout: torch.memory_format) -> None:
    """Sizes on both sides of the limit are one graph, with eager's results and strides."""
    torch.compiler.reset()
    model = nn.Sequential(make(), nn.ReLU()).eval()
    compiled = recorder.compile(model)
    with torch.no_grad(), convolutions_of_all_sizes():
        for height, width in SIZES:
            x = _image(height, width, layout)
            found, expected = compiled(x), model(x)
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride()
    assert len(recorder.graphs) == 1


def test_formats_that_differ(recorder: Any) -> None:
    """A dilated convolution of channels-last images has eager's strides on both sides: PyTorch's libraries for it have two formats."""
    torch.compiler.reset()
    model = nn.Conv2d(8, 16, 3, padding=2, dilation=2).eval()
    compiled = recorder.compile(model)
    with torch.no_grad(), convolutions_of_all_sizes():
        for height, width in SIZES:
            x = _image(height, width, torch.channels_last)
            assert compiled(x).stride() == model(x).stride()


def test_who_traces() -> None:
    """Dynamo traces so for this backend. Another backend's trace assumes what PyTorch assumes."""

    def other(gm: torch.fx.GraphModule, _: object) -> Any:
        traces.append(gm)
        return gm.forward

    def mine(gm: torch.fx.GraphModule, _: object) -> Any:
        return other(gm, _)

    mine.__module__ = "torch_hybrid_backend.test"
    model = nn.Conv2d(8, 16, 3)
    counts = []
    for backend in (mine, other):
        torch.compiler.reset()
        traces: list[torch.fx.GraphModule] = []
        compiled = torch.compile(model, backend=backend)
        with torch.no_grad():
            for height, width in SIZES:
                compiled(_image(height, width))
        counts.append(len(traces))
    assert counts[0] == 1
    assert counts[1] > 1
