"""Convolution on tiles of pixels: the kernel runs on emulated tiles and is compared with eager in float64."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import pytest
import torch

from tests.engines.cpu.amx_for_tests import ODD_NUMBERS, emulated
from tests.engines.cpu.schedule_runner import compile_kernel, offsets, run_kernel, to_memory
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case
from tests.engines.cpu.schedules.convolution.tile_convolutions_for_tests import TILES_HOST, check_integers, tiles_of
from torch_hybrid_backend.engines.cpu.schedules.convolution.amx import emit

__all__ = ["emulated"]  # the fixture


@pytest.mark.parametrize(
    "case",
    [
        Case((2, 32, 7, 9), 40, (1, 1)),
        pytest.param(Case((1, 16, 9, 7), 32, (3, 3), padding=1), marks=pytest.mark.full),
        Case((1, 48, 11, 8), 33, (3, 2), stride=2, padding=(1, 0), blocked_x=False, blocked_out=False),
        pytest.param(
            Case((1, 16, 12, 12), 16, (3, 3), padding=2, dilation=2, long_epilogue=True), marks=pytest.mark.full
        ),
        Case((2, 32, 40), 32, (5,), padding=2),
        Case((1, 128, 6, 6), 32, (3, 3), padding=1),  # k in two parts
        Case((6, 32, 5, 7), 48, (3, 3), stride=2, padding=1),  # several images in a task
        pytest.param(Case((1, 32, 7, 7), 24, (3, 3), stride=2), marks=pytest.mark.full),
        Case((4, 96, 5, 7), 120, (3, 3), stride=2, padding=1, groups=3),
        pytest.param(Case((2, 64, 5, 7), 64, (1, 1), groups=2, blocked_x=False), marks=pytest.mark.full),
    ],
    ids=lambda case: f"{case.x} {case.o} {case.kernel}",
)
def test_matches_eager(emulated: ctypes.CDLL, case: Case) -> None:
    """Every geometry and layout, with a bias, a residual and a ReLU."""
    kernel, inputs, want = tiles_of(case, "float32")
    (got,) = run_kernel(kernel, emit, inputs, TILES_HOST)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 9, 9), 40, (3, 3), padding=1),
        Case((2, 40, 7, 6), 24, (3, 3), padding=1),  # channels that fill no vector
        Case((2, 24, 9, 5), 32, (1, 1), blocked_x=False),
        Case((4, 64, 5, 5), 40, (3, 3), padding=1),  # several images in a task
        Case((2, 96, 7, 6), 48, (3, 3), padding=1, groups=4),  # groups that begin within a vector
        Case((2, 128, 9, 5), 256, (1, 1), groups=2),
        Case((1, 80, 30), 80, (5,), padding=2, groups=5),
    ],
    ids=lambda case: f"{case.x} {case.o} {case.kernel}",
)
def test_bfloat16(emulated: ctypes.CDLL, case: Case) -> None:
    """Images and weights of bfloat16 are multiplied as they are."""
    kernel, inputs, want = tiles_of(dataclasses.replace(case, dtype="bfloat16"), "bfloat16")
    (got,) = run_kernel(kernel, emit, inputs, TILES_HOST)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("images", "channels", "channel"), [(1, 16, 3), (4, 16, 3), (1, 80, 3), (1, 80, 40), (1, 80, 70)]
)
def test_numbers_that_cannot_be_split(emulated: ctypes.CDLL, images: int, channels: int, channel: int) -> None:
    """Pixels that see such a number of the image are as eager's, and so are all others, whichever step of channels has it."""
    case = Case((images, channels, 12, 12), 32, (3, 3), padding=1)
    kernel, _, _ = tiles_of(case, "float32")
    function = compile_kernel(kernel, emit, TILES_HOST)["kernel"]
    (write,) = kernel.writes
    near = torch.zeros(12, 12, dtype=torch.bool)
    near[:2, 4:7] = True
    products = channels / 16  # a bound is over |A| |B|, of 144 products
    for number in ODD_NUMBERS:
        x = torch.randn(case.x)
        x[:: images + 1, channel, 0, 5] = x[images // 2, channel, 0, 5] = number
        own, inputs, want = tiles_of(case, "float32", x)
        got = torch.empty(write.span)
        before = emulated.products_so_far()
        function(*[to_memory(inputs[read.buffer], read.layout) for read in own.reads], got)
        assert emulated.products_so_far() > before
        got, want = got[offsets(write.buffer.shape, write.layout)], want.float().double()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
        torch.testing.assert_close(got[..., ~near].double(), want[..., ~near], rtol=2e-6, atol=1e-5 * products)
        finite = want.isfinite()
        bound = 5e-5 * products + (5e-6 * abs(number) if math.isfinite(number) else 0.0)
        assert ((got.double() - want).abs() <= bound)[finite].all()


@pytest.mark.parametrize(
    ("shape", "outputs", "kernel", "groups", "together"),
    [
        ((2, 64, 6, 7), 32, (3, 3), 8, 4),
        ((1, 128, 5, 9), 64, (3, 3), 2, 1),
        ((2, 96, 30), 48, (5,), 4, 2),
        ((2, 72, 6, 6), 72, (3, 3), 3, 1),  # groups that begin within a vector
    ],
)
def test_groups_of_integers(
    emulated: ctypes.CDLL, shape: tuple[int, ...], outputs: int, kernel: tuple[int, ...], groups: int, together: int
) -> None:
    """Each by itself, or several as one; around the image lies no zero."""
    check_integers(shape, outputs, kernel, 1, 1, "uint8", groups, together, border=7)
