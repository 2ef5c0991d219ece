"""Kernels of a processor: their multiply-adds, which decide what is worth tuning."""

from __future__ import annotations

import pytest

from tests.engines.cpu.kernels_for_tests import matmul_kernel
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import INVERTED, SMALL, Case, make, make_stages
from tests.engines.cpu.schedules.matmul.unpacked_for_tests import kernel_of
from torch_hybrid_backend.engines.cpu.convolution_fusion import fused_kernel


def test_products() -> None:
    """Packed or not: rows by columns by depth."""
    assert matmul_kernel().multiply_adds == 8 * 64 * 16
    assert kernel_of(5, 40, 33).multiply_adds == 5 * 40 * 33


@pytest.mark.parametrize(
    ("case", "work"),
    [
        (Case((2, 24, 9, 7), 40, (3, 3), padding=1), 2 * 40 * 63 * 24 * 9),
        (Case((1, 32, 10, 10), 64, (3, 3), padding=1, groups=4), 64 * 100 * 8 * 9),
        (Case((1, 20, 11, 5), 20, (7, 7), 1, 3, groups=20), 20 * 55 * 49),
        (Case((1, 8, 50), 12, (5,), 2, 2), 12 * 25 * 8 * 5),
    ],
)
def test_convolutions(case: Case, work: int) -> None:
    """Padding of packed weights does not count."""
    kernel, _, _ = make(case, SMALL)
    assert kernel.multiply_adds == work


def test_chains() -> None:
    """Those of their convolutions together."""
    stages, _, _ = make_stages(INVERTED, SMALL)
    assert fused_kernel(stages).multiply_adds == 8 * 32 * 2400 + 32 * 600 * 9 + 32 * 12 * 600
