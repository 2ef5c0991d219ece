"""Convolutions of one pixel before resampling."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.passes.cpu.resample_last import resample_last
from torch_hybrid_backend.passes.hoist import hoist


class Head(nn.Module):
    """Images of one, a half and a third of the side, concatenated in some order and projected to `channels`."""

    def __init__(
        self, channels: int = 3, order: tuple[int, ...] = (0, 1, 2), mode: str = "bilinear", bias: bool = True
    ):
        super().__init__()
        self.order, self.mode = order, mode
        self.project = nn.Conv2d(4 * len(order), channels, 1, bias=bias)

    def forward(self, *images):
        size = images[0].shape[2:]
        grown = [images[0], *(functional.interpolate(image, size, mode=self.mode) for image in images[1:])]
        return self.project(torch.cat([grown[i] for i in self.order], 1)).relu()


def images(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, 4, side, side, dtype=dtype) for side in (12, 6, 4)]


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2), (1, 0, 0, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_parts_are_projected_where_they_are_small(captured, mode, order, bias):
    """The result is the same; nothing resampled is concatenated; every resampled image has the projection's channels."""
    subject = captured(Head(order=order, mode=mode, bias=bias).eval(), *images())
    assert subject.apply(resample_last)
    names = subject.operators()
    assert names["convolution.default"] == len({1, 2} & set(order)) + (0 in order)
    resampled = [n for n in subject.gm.graph.nodes if str(n.target).startswith("aten.upsample")]
    assert resampled
    assert {n.meta["val"].shape[1] for n in resampled} == {3}


def test_a_single_resampled_image(captured):
    """A classifier behind a resampling."""
    head = nn.Sequential(nn.Upsample(scale_factor=4, mode="bilinear"), nn.Conv2d(8, 5, 1)).eval()
    subject = captured(head, torch.randn(1, 8, 5, 7))
    assert subject.apply(resample_last)
    assert subject.operators()["convolution.default"] == 1


def test_float64_is_exact_enough(captured):
    """The rewriting is exact arithmetic in another order."""
    subject = captured(Head().double().eval(), *images(torch.float64))
    assert subject.apply(resample_last)
    torch.testing.assert_close(subject.run(), subject.before, rtol=1e-12, atol=1e-12)


def test_weights_are_cut_outside_the_call(captured):
    """The parts of the weight depend on parameters alone."""
    subject = captured(Head().eval(), *images())
    assert subject.apply(resample_last)
    main = hoist(subject.gm, subject.captured.static_inputs).main
    assert subject.operators(main)["slice.Tensor"] == 0


def test_what_would_gain_nothing_is_left_alone(captured):
    """More channels than the image has; a kernel of more than a pixel; a resampled image that something else reads; a smaller image."""
    cases = [
        (Head(channels=5), images()),
        (nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(4, 3, 3)), images()[:1]),
        (nn.Sequential(nn.Upsample(scale_factor=0.5), nn.Conv2d(4, 3, 1)), images()[:1]),
    ]
    for module, inputs in cases:
        subject = captured(module.eval(), *inputs)
        assert not subject.apply(resample_last)

    project = nn.Conv2d(4, 3, 1)

    def read_twice(x):
        large = functional.interpolate(x, scale_factor=2)
        return project(large), large.sum()

    assert not captured(read_twice, images()[0]).apply(resample_last)
