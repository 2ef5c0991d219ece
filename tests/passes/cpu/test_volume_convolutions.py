"""3-D convolutions become 2-D ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_hybrid_backend.passes.cpu.volume_convolutions import volume_convolutions


def _ranks(subject) -> set[int]:
    nodes = subject.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    return {node.meta["val"].dim() for node in nodes}


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 3, "padding": 2, "dilation": 2, "bias": False},
        {"kernel_size": (1, 5, 3), "padding": (0, 2, 1), "stride": (1, 2, 2)},
        {"kernel_size": (1, 3, 3), "stride": (2, 1, 1)},
        {"kernel_size": (3, 1, 1), "padding": (1, 0, 0)},
        {"kernel_size": (2, 1, 1), "stride": (2, 1, 1), "dilation": (3, 1, 1)},
        {"kernel_size": 1},
        {"kernel_size": (2, 4, 4), "stride": (2, 4, 4)},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3])
def test_volumes(captured, options, batch):
    """Kernels of all depths, strides, padding and dilation; odd sizes."""
    subject = captured(nn.Conv3d(5, 7, **options), torch.randn(batch, 5, 7, 9, 11), dynamic=False)
    assert subject.apply(volume_convolutions)
    assert _ranks(subject) == {4}


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv3d(6, 6, 3, padding=1, groups=6),
        nn.Conv3d(6, 4, 3, stride=2, groups=2, bias=False),
        nn.Conv3d(6, 12, (3, 5, 3), padding=(2, 0, 1), dilation=(2, 1, 1), groups=6),
        nn.Conv3d(6, 6, (1, 3, 3), stride=(2, 1, 1), groups=3),
        nn.Conv3d(6, 6, (3, 1, 1), padding=(1, 0, 0), groups=6),
        nn.ConvTranspose3d(6, 5, 2, 2),
        nn.ConvTranspose3d(6, 5, (1, 2, 3), (1, 2, 3), bias=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3])
def test_groups_and_windows(captured, model, batch):
    """Groups of channels; transposed convolutions whose windows do not overlap."""
    subject = captured(model, torch.randn(batch, 6, 7, 9, 11), dynamic=False)
    assert subject.apply(volume_convolutions)
    assert _ranks(subject) == {4}


@pytest.mark.parametrize(
    ("model", "batch", "dynamic"),
    [
        (nn.ConvTranspose3d(4, 6, 3, 2), 2, False),
        (nn.ConvTranspose3d(4, 6, 2, 2, groups=2), 2, False),
        (nn.Conv2d(4, 6, 3), 2, False),
        (nn.Conv3d(4, 6, 3), 2, True),
    ],
    ids=["overlapping windows", "windows of groups", "images", "symbolic batch"],
)
def test_left_alone(captured, model, batch, dynamic):
    """Convolutions that this formula does not cover are left alone."""
    x = torch.randn(batch, 4, *([5] * (model.weight.dim() - 2)))
    assert not captured(model, x, dynamic=dynamic).apply(volume_convolutions, exact=True)
