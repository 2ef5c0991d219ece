"""Where taps lie in the image, and which tests are left to a program."""

from __future__ import annotations

import torch

from tests.engines.triton.regions_for_tests import kernels_of
from torch_hybrid_backend.engines.triton.schedules.windows import window
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.kernels import ConvKernel


def _window(size: int, **arguments: int) -> tuple[list[str], int]:
    convolve = lambda x, w: torch.nn.functional.conv2d(x, w, **arguments)  # noqa: E731
    (kernel,) = kernels_of(convolve, torch.empty(1, 3, 9, 9), torch.empty(4, 3, size, size))
    assert isinstance(kernel, ConvKernel)
    taps = [LoopVar(f"tap{d}", size) for d in range(2)]
    points = {v: index_of(v) for v in kernel.domain}
    place, tests = window(kernel, points, {tap: index_of(tap) for tap in taps}, taps)
    return [repr(index) for index in place], len(tests)


def test_places() -> None:
    """Stride, padding and dilation; without padding everything is inside, and nothing is tested."""
    assert _window(3, stride=2, dilation=2) == (["i2*2 + tap0*2", "i3*2 + tap1*2"], 0)
    assert _window(3, padding=1) == (["i2 + tap0 + -1", "i3 + tap1 + -1"], 2)
    assert _window(1) == (["i2", "i3"], 0)
