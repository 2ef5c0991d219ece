"""The choice of a convolution's algorithm, by counting."""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.operands.winograd_cost import winograd_gains, winograd_tasks
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.sizes.size import symbol

TARGET = Target("native", "test", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


def test_estimates_follow_the_arithmetic() -> None:
    """Large images gain most, by F(4x4); where weights are most of the traffic, nothing is gained; and few channels fill no vector."""
    large = winograd_gains(1, 64, 64, (56, 56), TARGET)
    assert next(iter(large)) == 4
    assert large[4] > large[2] > 1.5
    assert winograd_gains(1, 512, 512, (7, 7), TARGET)[4] < 1
    assert not winograd_gains(1, 64, 3, (224, 224), TARGET)
    assert not winograd_gains(0, 64, 64, (56, 56), TARGET)


def test_estimates_of_groups() -> None:
    """Groups gain as one convolution of their channels does; those whose channels do not fill vectors are left to the direct sum."""
    assert winograd_gains(1, 64, 64, (28, 28), TARGET, groups=3)[4] > 2
    assert winograd_gains(1, 64, 64, (14, 14), TARGET, groups=8)[2] > 1.15
    assert not winograd_gains(1, 24, 16, (28, 28), TARGET, groups=3)


def test_tasks_cover_every_tile() -> None:
    """Tasks have as many runs as it takes, for a number of images known or not."""
    for images in (1, 3, 8):
        tasks = winograd_tasks(images, 64, 64, (13, 14), 4, TARGET)
        assert tasks.runs * tasks.tiles >= images * 16 > (tasks.runs - 1) * tasks.tiles
    unknown = winograd_tasks(symbol("s0", 8), 64, 64, (13, 14), 4, TARGET)
    assert unknown.tiles >= 1
    assert not isinstance(unknown.runs, int)
