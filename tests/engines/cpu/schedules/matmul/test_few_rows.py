"""Few rows times a plain weight, against float64 eager."""

from __future__ import annotations

import pytest

from tests.engines.cpu.schedule_runner import HOST, NARROW
from tests.engines.cpu.schedules.matmul.unpacked_for_tests import check, kernel_of
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 16, 16),  # one row
        (1, 331, 48),  # k is no whole number of vectors
        (2, 64, 200),
        (6, 80, 33),  # the last columns overlap
        (7, 300, 131),
    ],
)
def test_matches_eager(m: int, k: int, n: int, target: Target) -> None:
    """Every pad and overlap."""
    check(kernel_of(m, k, n), target)


@pytest.mark.parametrize("m", [8, 12, 15])
def test_dot_products_of_many_rows(m: int) -> None:
    """More rows, fewer of W's at once."""
    check(kernel_of(m, 131, 67))


def test_weight_inside_a_larger_one() -> None:
    """Rows lie apart, and begin inside the array."""
    check(kernel_of(3, 40, 50, offset=3, row_stride=53))


@pytest.mark.parametrize(("m", "layout"), [(1, Strided((40, 1, 1))), (3, Strided((120, 1, 3))), (3, Blocked(2))])
def test_any_layout_of_the_left_operand(m: int, layout: Layout) -> None:
    """Elements that are not contiguous along k are copied one by one."""
    check(kernel_of(m, 40, 32, a_layout=layout))
