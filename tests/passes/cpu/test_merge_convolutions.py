"""Convolutions of one input become one, with their activations."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.codegen.assemble import lower_region
from torch_hybrid_backend.loops.ir import ConvOp, Map
from torch_hybrid_backend.passes.canonical.cse import cse
from torch_hybrid_backend.passes.canonical.fold_batch_norm import fold_batch_norm
from torch_hybrid_backend.passes.cpu.merge_convolutions import merge_convolutions
from torch_hybrid_backend.passes.hoist import hoist


class Branches(nn.Module):
    """An Inception block: 1x1 convolutions of one input with batch norm and ReLU, 3x3 ones behind all but the first."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 48), bias: bool = False, channels: int = 7) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Conv2d(channels, width, 1, bias=bias) for width in widths)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.second = nn.ModuleList(nn.Conv2d(width, 5, 3, padding=1) for width in widths[1:])
        for norm in self.norms:
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.bias)

    def forward(self, x):
        parts = [functional.relu(norm(part(x))) for part, norm in zip(self.first, self.norms, strict=True)]
        return torch.cat([parts[0], *(part(y) for part, y in zip(self.second, parts[1:], strict=True))], 1)


def convolutions(subject) -> int:
    return subject.operators()["convolution.default"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dynamic", [False, True])
def test_branches_are_one_convolution(captured, bias, batch, dynamic):
    """Unequal widths, batch norm folded, static and symbolic sizes; one ReLU is left."""
    subject = captured(Branches(bias=bias).eval(), torch.randn(batch, 7, 5, 11), dynamic=dynamic)
    subject.apply(fold_batch_norm, cse)
    assert convolutions(subject) == 5
    assert subject.apply(merge_convolutions)
    assert convolutions(subject) == 3
    assert subject.operators()["relu.default"] == 1


def test_no_image(captured):
    """An empty batch, whose batch norms are not folded: without them."""
    model = Branches(bias=True).eval()
    model.norms = nn.ModuleList(nn.Identity() for _ in model.norms)
    subject = captured(model, torch.randn(0, 7, 5, 11))
    assert subject.apply(merge_convolutions)
    assert convolutions(subject) == 3


def test_float64_is_exact_enough(captured):
    """Merging changes no element's sum."""
    subject = captured(Branches().double().eval(), torch.randn(2, 7, 5, 3, dtype=torch.float64))
    assert subject.apply(fold_batch_norm, merge_convolutions)
    assert convolutions(subject) == 3
    torch.testing.assert_close(subject.run(), subject.before, rtol=1e-12, atol=1e-12)


def test_weights_are_joined_outside_the_call(captured):
    """The concatenations of weights depend on parameters alone: the main graph keeps the model's only."""
    subject = captured(Branches().eval(), torch.randn(2, 7, 5, 3))
    assert subject.apply(fold_batch_norm, merge_convolutions)
    main = hoist(subject.gm, subject.captured.static_inputs).main
    assert subject.operators()["cat.default"] == 3
    assert subject.operators(main)["cat.default"] == 1


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(7, 16, 3),
        nn.Conv2d(7, 16, 3, padding=2),
        nn.Conv2d(7, 16, 3, stride=2, padding=1),
        nn.Conv2d(7, 16, 5, padding=1),
        nn.Conv2d(7, 16, 3, padding=1, bias=False),
        nn.Conv2d(7, 16, 3, padding=1, dilation=2),
        nn.ConvTranspose2d(7, 16, 3, padding=1),
        nn.Conv2d(7, 7, 3, padding=1, groups=7),
        nn.Conv2d(7, 17, 3, padding=1),
    ],
    ids=str,
)
def test_unlike_convolutions_stay_apart(captured, other):
    """Another padding, stride, kernel, dilation, kind; no bias; channels that are no whole blocks."""
    one = nn.Conv2d(7, 16, 3, padding=1)
    subject = captured(lambda x: (one(x).relu().sum(1), other(x).relu().sum(1)), torch.randn(2, 7, 9, 6))
    assert not subject.apply(merge_convolutions, exact=True)


@pytest.mark.parametrize(
    "model",
    [
        lambda a, b: (a.relu(), b.relu()),
        lambda a, b: (a.relu().flatten(1), b.relu().sum(1)),
        lambda a, b: a.sigmoid() * b.sigmoid(),
        lambda a, b: (a.relu().sum(1), b.sigmoid().sum(1)),
        lambda a, b: (functional.leaky_relu(a, 0.1).sum(1), functional.leaky_relu(b, 0.2).sum(1)),
        lambda a, b: ((a * a).sum(1), (b * b).sum(1)),
    ],
    ids=["returned", "view returned", "gate", "other activation", "other slope", "square"],
)
def test_readers_that_forbid_it(captured, model):
    """A returned value keeps its own memory; epilogues that differ, or that another operator continues, stay where they are."""
    a, b = nn.Conv2d(7, 16, 1), nn.Conv2d(7, 16, 1)
    subject = captured(lambda x: model(a(x), b(x)), torch.randn(2, 7, 5, 3))
    assert not subject.apply(merge_convolutions, exact=True)


@pytest.mark.parametrize("size", [(1, 5, 3), (2, 7, 11)])
@pytest.mark.parametrize("widths", [(16, 32, 48), (48, 16)])
def test_slices_are_read_in_place(monkeypatch, size, widths):
    """The kernels of the convolutions behind read their channels of the merged one's result, and read the right ones."""
    batch, rows, columns = size
    slices: list[int] = []

    def lower(*args, **kwargs):
        graph = lower_region(*args, **kwargs)
        slices.append(sum(isinstance(op, ConvOp) and isinstance(op.x, Map) for op in graph.ops))
        return graph

    monkeypatch.setattr("torch_hybrid_backend.codegen.assemble.lower_region", lower)
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Branches(widths).eval(), torch.randn(batch, 7, rows, columns)
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", options={"placement": "estimate"})
        torch.testing.assert_close(compiled(x).double(), model.double()(x.double()), rtol=1e-5, atol=1e-5)
    assert slices == [len(widths) - 1]
