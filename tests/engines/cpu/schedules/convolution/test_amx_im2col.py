"""Convolution of few channels on tiles: the kernel runs on emulated tiles and is compared with eager in float64."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch

from tests.engines.cpu.amx_for_tests import emulated
from tests.engines.cpu.schedule_runner import run_kernel
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case
from tests.engines.cpu.schedules.convolution.tile_convolutions_for_tests import TILES_HOST, tiles_of
from torch_hybrid_backend.engines.cpu.schedules.convolution.amx import emit
from torch_hybrid_backend.loops.kernels import Argument
from torch_hybrid_backend.loops.layout import Strided

__all__ = ["emulated"]  # the fixture


@pytest.mark.parametrize(
    "case",
    [
        Case((2, 3, 13, 17), 40, (7, 5), stride=2, padding=(3, 2)),  # few channels
        Case((1, 1, 9, 30), 16, (3, 11), padding=2),
        Case((2, 5, 12, 9), 33, (2, 3), stride=3, dilation=2),
        Case((2, 12, 40), 32, (5,), padding=2),
        Case((3, 8, 6, 6), 32, (1, 1), stride=2, blocked_x=False),
    ],
    ids=lambda case: f"{case.x} {case.o} {case.kernel}",
)
def test_bfloat16(emulated: ctypes.CDLL, case: Case) -> None:
    """Images and weights of bfloat16 are multiplied as they are."""
    kernel, inputs, want = tiles_of(dataclasses.replace(case, dtype="bfloat16"), "bfloat16")
    (got,) = run_kernel(kernel, emit, inputs, TILES_HOST)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))


def test_some_of_the_channels_of_a_wider_image(emulated: ctypes.CDLL) -> None:
    """Three of four: whole vectors would read the fourth, and behind the last pixel there is none."""
    case = Case((1, 3, 9, 9), 32, (3, 3), padding=1, dtype="bfloat16")
    kernel, inputs, want = tiles_of(case, "bfloat16")
    wide = Strided((9 * 9 * 4, 1, 9 * 4, 4))
    reads = tuple(Argument(r.buffer, wide) if r.buffer.shape == case.x else r for r in kernel.reads)
    (got,) = run_kernel(dataclasses.replace(kernel, reads=reads), emit, inputs, TILES_HOST)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))
