"""1x1 convolutions of pairs of pixels: exact sums of integers, by the arithmetic in place of AArch64's instructions; and bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engines.cpu.arm_for_tests import OPTIONS, random_bytes


class _Pointwise(nn.Module):
    """A 1x1 convolution of integers of 8 bits by constant ones, in float32, which holds the sums."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() * 0.5
        return (nn.functional.conv1d if weight.dim() == 3 else nn.functional.conv2d)(x.float() * 0.5, weight)


@pytest.mark.parametrize(
    ("channels", "outputs", "sizes"),
    [
        (8, 8, (7, 7)),
        (24, 22, (5, 3)),
        (16, 44, (1, 9)),
        (8, 40, (2,)),
        (12, 8, (4, 4)),
        (8, 3, (4, 4)),
        (8, 8, (1, 1)),
    ],
)
def test_sums_are_exact(channels: int, outputs: int, sizes: tuple[int, ...]) -> None:
    """Odd numbers of pixels, channels that fill no block, one row, one dimension; and what pairs do not serve."""
    torch.manual_seed(0)
    for left, right in (("uint8", "int8"), ("int8", "int8"), ("int8", "uint8")):
        model = _Pointwise(random_bytes((outputs, channels, *(1 for _ in sizes)), getattr(torch, right)))
        x = random_bytes((2, channels, *sizes), getattr(torch, left))
        with torch.no_grad():
            compiled = torch.compile(
                model, backend="hybrid", options={**OPTIONS, "target": "neoverse-v1"}, dynamic=False
            )
            assert torch.equal(compiled(x), model(x)), (left, right)


def test_any_number_of_images() -> None:
    """Known only at run time; weights that stream, channels of several parts."""
    torch.manual_seed(0)
    model = _Pointwise(random_bytes((76, 96, 1, 1), torch.int8))
    compiled = torch.compile(model, backend="hybrid", options={**OPTIONS, "target": "neoverse-v1"}, dynamic=True)
    with torch.no_grad():
        for images in (2, 3):
            x = random_bytes((images, 96, 3, 5), torch.uint8)
            assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize(("channels", "outputs"), [(8, 24), (12, 10), (10, 8)])
def test_bfloat16(channels: int, outputs: int) -> None:
    """Between other convolutions, whose layout the pairs are read from."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(4, channels, 3),
        nn.ReLU(),
        nn.Conv2d(channels, outputs, 1),
        nn.ReLU(),
        nn.Conv2d(outputs, 8, 1),
    ]
    model, x = nn.Sequential(*layers).bfloat16().eval(), torch.randn(2, 4, 9, 7).bfloat16()
    with torch.no_grad():
        result = torch.compile(model, backend="hybrid", options={**OPTIONS, "target": "neoverse-v1"}, dynamic=False)(x)
        exact = model.double()(x.double())
    torch.testing.assert_close(result.double(), exact, rtol=2**-6, atol=2**-7 * exact.abs().max().item())
