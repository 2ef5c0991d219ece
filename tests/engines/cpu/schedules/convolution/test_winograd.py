"""Winograd's algorithm against float64 eager, and its prefetches."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.engines.cpu.schedule_runner import APART, HOST, NARROW, compile_kernel, run_kernel
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, check, check_sizes, make
from torch_hybrid_backend.engines.cpu.schedules.convolution import rules
from torch_hybrid_backend.engines.cpu.target import Target


@pytest.mark.parametrize("target", [HOST, NARROW, APART], ids=["host", "narrow", "apart"])
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 13, 11), 48, (3, 3), padding=1),  # odd numbers of tiles and of outputs
        Case((3, 16, 7, 5), 20, (3, 3)),  # several images, ragged channels, no padding
        Case((1, 16, 8, 8), 16, (3, 3), padding=(3, 0), blocked_out=False),  # tiles that read nothing but padding
        Case((1, 64, 1, 1), 37, (3, 3), padding=1, long_epilogue=True),
        Case((2, 16, 9, 4), 33, (3, 3), padding=(1, 2), blocked_x=False),
        Case((1, 128, 17, 18), 96, (3, 3), padding=1),  # several runs of tiles
        Case((2, 96, 9, 7), 144, (3, 3), padding=1, groups=3),  # a group's last part is half empty
        Case((1, 80, 1, 5), 80, (3, 3), padding=1, groups=5, blocked_x=False, blocked_out=False),
        Case((1, 32, 9, 10), 32, (3, 3), padding=1, dtype="bfloat16"),  # its transformed weight is float32
    ],
)
def test_winograd(case: Case, m: int, target: Target) -> None:
    """F(2x2) and F(4x4): borders, tiles that reach beyond the output, ragged channels, every layout."""
    check(dataclasses.replace(case, winograd=m), target)


@pytest.mark.parametrize("m", [2, 4])
def test_sizes_known_at_run_time(m: int) -> None:
    """A kernel serves images of fewer tiles than cores, and of more than a task has in the cache."""
    sizes = [(1, 1), (2, 7), (13, 11), (14, 14), (40, 33)]
    check_sizes(Case((1, 32, 14, 14), 48, (3, 3), padding=1, winograd=m), sizes)
    small = dataclasses.replace(HOST, cores=2, l2_bytes=64 << 10)
    check_sizes(Case((2, 32, 8, 8), 20, (3, 3), padding=1, winograd=m), sizes, small)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case((2, 32, 13, 11), 48, (3, 3), padding=1),
        Case((1, 16, 9, 8), 20, (3, 3), blocked_x=False),
        Case((1, 64, 14, 14), 64, (3, 3), padding=1, groups=2),
    ],
)
def test_an_infinity_or_nan_reaches_only_its_windows(case: Case, m: int, target: Target) -> None:
    """Infinite and NaN pixels, alone, together, and at the border, give infinities, NaN and numbers where eager does."""
    x = torch.randn(case.x)
    *_, height, width = case.x
    for value, channel, row, column in (
        (math.inf, 3, 0, 0),
        (math.nan, 7, height - 1, 4),
        (-math.inf, 15, 5, width - 1),
        (math.inf, 15, 6, width - 1),
        (math.nan, 0, 4, 4),
    ):
        x[-1, channel, row, column] = value
    kernel, inputs, want = make(dataclasses.replace(case, winograd=m), target, x)
    (got,) = run_kernel(kernel, rules.emit, inputs, target)
    assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("groups", [1, 2])
def test_winograd_prefetches_its_weights(groups: int) -> None:
    """The next panel of weights is asked for, into the second-level cache."""
    kernel, _, _ = make(Case((1, 32, 14, 14), 32, (3, 3), padding=1, groups=groups, winograd=2), HOST)
    assert "prefetcht1" in compile_kernel(kernel, rules.emit).inspect_source("asm")
