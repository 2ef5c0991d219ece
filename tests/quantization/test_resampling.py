"""Convolutions of one pixel behind a resampling stay in floating point, where they go before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_hybrid_backend
from torch_hybrid_backend import quantize
from torch_hybrid_backend.passes.cpu import resample_last
from torch_hybrid_backend.quantization import resampling
from torch_hybrid_backend.quantization.quantize import QuantizedModule

Fusing = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Decoder(nn.Module):
    """A large and a small image, put together by `fusing` and projected by `project`."""

    def __init__(self, fusing: Fusing, project: nn.Module) -> None:
        super().__init__()
        self.large, self.small = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 3, stride=4)
        self.fusing, self.project = fusing, project

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = self.large(x)
        return self.project(self.fusing(large, self.small(x)))


def _up(small: torch.Tensor, mode: str = "bilinear") -> torch.Tensor:
    return functional.interpolate(small, size=(16, 16), mode=mode)


def _fused(large: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    return torch.cat([large, _up(small)], dim=1)


def _written(large: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    return torch.cat([large, _up(small)], 1).add_(1.0)


def _quantized(model: nn.Module) -> QuantizedModule:
    torch.manual_seed(0)
    return quantize(model.eval(), [torch.randn(2, 3, 16, 16) for _ in range(2)])


@pytest.mark.parametrize(
    ("fusing", "project"),
    [
        (_fused, nn.Conv2d(32, 16, 1)),
        (lambda large, small: torch.concat((_up(small, "nearest"), large), -3), nn.Conv2d(32, 8, 1, bias=False)),
        (lambda large, small: _up(small), nn.Conv2d(16, 16, 1)),
    ],
    ids=["concatenated", "nearest", "alone"],
)
def test_stays_in_float(fusing: Fusing, project: nn.Module) -> None:
    """The projection alone does, `explain` says why, and compiled it runs on the small image."""
    model = _quantized(Decoder(fusing, project))
    assert model.ranges.in_float == {"project": "slower"}
    assert set(model.ranges.sites) == {"large", "small"}
    x = torch.randn(2, 3, 16, 16)
    compiled = torch.compile(model, backend="hybrid")
    with torch.no_grad():
        compiled(x)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        report = torch_hybrid_backend.explain(model, x)
    assert "model.project, aten.convolution.default: slower: in floating point it goes before the resampling" in str(
        report
    )


def test_both_sides_know_the_same_growth() -> None:
    """`quantize` leaves the layers that the pass moves."""
    assert resampling.MIN_GROWTH == resample_last.MIN_GROWTH


@pytest.mark.parametrize(
    ("fusing", "project"),
    [
        (_fused, nn.Conv2d(32, 24, 1)),
        (_fused, nn.Conv2d(32, 16, 1, stride=2)),
        (_fused, nn.Conv2d(32, 16, 3)),
        (_fused, nn.Conv2d(32, 16, 1, groups=2)),
        (_written, nn.Conv2d(32, 16, 1)),
        (lambda large, small: torch.cat([large, functional.pad(small, (6, 6, 6, 6))], 1), nn.Conv2d(32, 16, 1)),
        (lambda large, small: functional.interpolate(large, size=(20, 20)), nn.Conv2d(16, 16, 1)),
        (lambda large, small: _up(small, "bicubic"), nn.Conv2d(16, 16, 1)),
        (lambda large, small: torch.cat([_up(small), large], 2), nn.Conv2d(16, 16, 1)),
    ],
    ids=["more channels", "stride", "3x3", "groups", "written", "padded", "little", "bicubic", "along lines"],
)
def test_is_quantized(fusing: Fusing, project: nn.Module) -> None:
    """Layers that would not go before the resampling, or would gain nothing there."""
    model = _quantized(Decoder(fusing, project))
    assert model.ranges.in_float == {}
    assert "project" in model.ranges.sites
