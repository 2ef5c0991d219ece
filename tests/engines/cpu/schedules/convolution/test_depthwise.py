"""Depthwise convolution against float64 eager."""

from __future__ import annotations

import pytest

from tests.engines.cpu.schedule_runner import APART, HOST, NARROW
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, check, check_sizes
from torch_hybrid_backend.engines.cpu.target import Target


@pytest.mark.parametrize("target", [HOST, NARROW, APART], ids=["host", "narrow", "apart"])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 9, 20), 32, (3, 3), 1, 1, groups=32),
        Case((2, 29, 9, 9), 29, (3, 3), 2, 1, groups=29),
        Case((1, 8, 6, 20), 8, (3, 3), 1, 0, groups=8),  # no row reads padding
        Case((1, 8, 2, 9), 8, (3, 3), 1, 1, groups=8),  # every row does
        Case((1, 20, 11, 5), 20, (7, 7), 1, 3, groups=20),
        Case((1, 16, 60), 16, (31,), 1, 15, groups=16),
    ],
)
def test_depthwise(case: Case, target: Target) -> None:
    """Depthwise convolution of one channel to one channel: ragged last block, strides, small, large and wide windows."""
    check(case, target)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 20, 9, 20), 20, (3, 3), 1, 1, groups=20),
        Case((2, 16, 9, 9), 16, (5, 5), 2, 2, groups=16),
        Case((1, 16, 12, 40), 16, (1, 17), 1, (0, 8), groups=16),
    ],
)
def test_sizes_known_at_run_time(case: Case) -> None:
    """A kernel serves images from a pixel on."""
    check_sizes(case, [(1, 1), (1, 3), (6, 2), (9, 16), (13, 29), (8, 57)])


def test_depthwise_reads_and_writes_row_major() -> None:
    """Depthwise works in any layout."""
    check(Case((1, 20, 6, 6), 20, (3, 3), 1, 1, groups=20, blocked_x=False, blocked_out=False))


@pytest.mark.parametrize("channels", [32, 27])
def test_long_epilogues_run_from_a_spilled_tile(channels: int) -> None:
    """An epilogue of many operations gives the same values."""
    check(Case((1, channels, 6, 10), channels, (3, 3), padding=1, groups=channels, long_epilogue=True))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    """Accumulation is in float64 for float64, in float32 for bfloat16."""
    check(Case((1, 20, 6, 10), 20, (3, 3), padding=1, groups=20, dtype=dtype))
