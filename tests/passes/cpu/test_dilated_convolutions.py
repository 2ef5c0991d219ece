"""Dilated convolutions become dense ones of their phases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_hybrid_backend.passes.cpu.dilated_convolutions import dilated_convolutions


def _dilations(subject) -> set[int]:
    nodes = subject.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    return {step for node in nodes for step in node.args[5]}


@pytest.mark.parametrize(("dilation", "size"), [(2, (8, 8)), (2, (11, 9)), (3, (12, 17)), (5, (20, 23))])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_phases(captured, dilation, size, batch, bias):
    """Sizes that the dilation divides and others, several images."""
    model = nn.Conv2d(96, 97, 3, padding=dilation, dilation=dilation, bias=bias)
    subject = captured(model, torch.randn(batch, 96, *size), dynamic=False)
    assert subject.apply(dilated_convolutions)
    assert _dilations(subject) == {1}


@pytest.mark.parametrize(
    ("options", "size", "dynamic"),
    [
        ({"padding": 1}, 16, False),
        ({"padding": 2, "dilation": 2, "stride": 2}, 16, False),
        ({"padding": 4, "dilation": 2}, 16, False),
        ({"padding": 2, "dilation": 2, "groups": 2}, 16, False),
        ({"padding": 6, "dilation": 6}, 16, False),
        ({"padding": 2, "dilation": 2}, 16, True),
    ],
    ids=["dense", "stride", "size", "groups", "small phases", "symbolic batch"],
)
def test_left_alone(captured, options, size, dynamic):
    """Convolutions that this formula does not cover are left alone, and those whose copies would cost more than they save."""
    model = nn.Conv2d(96, 96, 3, **options)
    subject = captured(model, torch.randn(2, 96, size, size), dynamic=dynamic)
    assert not subject.apply(dilated_convolutions, exact=True)


def test_few_channels_are_left_alone(captured):
    """The copies would take a large part of the sum."""
    subject = captured(nn.Conv2d(32, 64, 3, padding=2, dilation=2), torch.randn(1, 32, 16, 16), dynamic=False)
    assert not subject.apply(dilated_convolutions, exact=True)
