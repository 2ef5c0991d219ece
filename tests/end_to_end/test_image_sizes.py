"""Images of any height and width by one compilation."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan

SIZES = [(30, 44), (16, 16), (17, 33), (45, 21)]


class Segmenter(nn.Module):
    """Strides, a residual, depthwise and dilated layers, gates by pooling, and a decoder that brings the image's size back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(16, 32, 1), nn.ReLU6(), nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.Conv2d(32, 16, 1)
        )
        self.gate = nn.Conv2d(16, 16, 1)
        self.dilated = nn.Conv2d(16, 16, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.head = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.stem(image), 3, 2, 1)
        x = x + self.block(x)
        x = x * torch.sigmoid(self.gate(functional.adaptive_avg_pool2d(x, 1)))
        x = self.up(torch.cat([x, torch.relu(self.dilated(x))], 1))
        return functional.interpolate(self.head(x), size=image.shape[-2:], mode="bilinear", align_corners=False)


class Enlarger(nn.Module):
    """A super-resolution network: pixels from channels, beside the image resampled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2), nn.Tanh(), nn.Conv2d(32, 12, 3, padding=1), nn.PixelShuffle(2)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image) + functional.interpolate(image, scale_factor=2.0)


def compare(model: nn.Module, sizes: Sequence[tuple[int, int]], tolerance: float, **options: object) -> list[Plan]:
    """The plans that calls at all sizes, and at several numbers of images, have made; each result is compared with float64."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, plans = model.eval(), list[Plan]()
    config = Config.from_env(os.environ).with_options({"prefer_kernels": True, "strict": True, **options}, None)
    fast = torch.compile(model, backend=functools.partial(compile_graph, config=config, on_plan=plans.append))
    with torch.no_grad():
        for number, size in enumerate(sizes):
            image = torch.randn(2 + number % 2, 3, *size)
            for dimension in (0, 2, 3):
                torch._dynamo.mark_dynamic(image, dimension)
            want = model.double()(image.double())
            model.float()
            found = fast(image).double()
            assert float((found - want).norm() / want.norm()) < tolerance, size
    return plans


@pytest.mark.parametrize("model", [Segmenter, Enlarger])
def test_one_compilation_serves_all_sizes(model: type[nn.Module]) -> None:
    """Nothing but arithmetic on sizes is left to eager, and no other size compiles again."""
    (plan,) = compare(model(), SIZES, 1e-5)
    assert all(node.operator.startswith("<built-in function") for node in plan.nodes if node.engine == "eager")


def test_pooling_and_resampling() -> None:
    """Every kind whose windows and places follow from sizes known at run time."""

    class Kinds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = functional.avg_pool2d(x, 2)
            ragged = functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
            parts = [
                functional.adaptive_avg_pool2d(x, (3, 5)),
                functional.interpolate(half, size=(3, 5), mode="nearest"),
                functional.interpolate(ragged, size=(3, 5), mode="bilinear", align_corners=True),
                functional.interpolate(
                    functional.interpolate(half, scale_factor=1.5, mode="bilinear"), size=(3, 5), mode="bicubic"
                ),
            ]
            return torch.cat(parts, 1)

    compare(Kinds(), SIZES, 1e-5)


@pytest.mark.full  # the schedules have tests of their own; `test_one_compilation_serves_all_sizes` runs them together
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.03), ("int8", 0.1)])
def test_reduced_precision(precision: str, tolerance: float) -> None:
    """Dot products read words of channels at every size."""
    compare(Segmenter(), SIZES, tolerance, precision=precision, precision_tolerance=1.0)


def test_a_padded_size_that_is_cropped_again() -> None:
    """A size that already is a multiple is equal to the padded one, which is called otherwise."""
    torch.compiler.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x, (0, -x.shape[-1] % 4)).relu()[..., : x.shape[-1]]

    compiled = torch.compile(function, backend="hybrid")
    for size in (15, 17, 16, 20, 7):
        x = torch.randn(3, size)
        assert torch.equal(compiled(x), function(x))
