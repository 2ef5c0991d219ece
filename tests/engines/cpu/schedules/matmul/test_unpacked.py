"""Plain matmul schedule: every tile and edge against float64 eager."""

from __future__ import annotations

import platform
import re

import pytest

from tests.engines.cpu.schedule_runner import HOST, NARROW, compile_kernel
from tests.engines.cpu.schedules.matmul.unpacked_for_tests import check, kernel_of
from torch_hybrid_backend.engines.cpu.schedules.matmul import unpacked
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (16, 1, 16),  # one step of k
        (7, 5, 17),  # less than a vector of rows and of k; the last columns overlap
        (29, 67, 37),  # ragged everything
        (48, 64, 64),
        (197, 96, 80),  # panels of three and of two vectors, the last ragged
        (311, 300, 131),  # several groups of panels (narrow), several parts of k
    ],
)
def test_matches_eager(m: int, k: int, n: int, target: Target) -> None:
    """Every tile, pad and overlap."""
    check(kernel_of(m, k, n), target)


def test_deep() -> None:
    """k in several parts, the last of which is shorter and no whole number of cache lines."""
    check(kernel_of(50, 1619, 48))


def test_weight_inside_a_larger_one() -> None:
    """Rows lie apart, and begin inside the array."""
    check(kernel_of(33, 40, 50, offset=3, row_stride=53))


@pytest.mark.parametrize("layout", [Strided((33 * 40, 1, 33)), Blocked(4)])
def test_any_layout_of_the_left_operand(layout: Layout) -> None:
    """Elements that are not contiguous along k are packed, or copied, one by one."""
    check(kernel_of(33, 40, 32, a_layout=layout))


@pytest.mark.parametrize("layout", [Strided((13 * 40, 1, 13)), Blocked(4)])
def test_any_output_layout(layout: Layout) -> None:
    """The stores go where the layout says, vectorised or not."""
    check(kernel_of(13, 20, 40, out=layout))


def test_accumulators_stay_in_registers() -> None:
    """Multiply-adds read no sums from memory: each has registers only, or a broadcast element of W."""
    if platform.machine().lower() not in ("x86_64", "amd64") or HOST.lanes < 8:
        pytest.skip("looks for x86's multiply-adds in vectors")
    assembly = compile_kernel(kernel_of(96, 256, 64), unpacked.emit).inspect_source("asm")
    multiply_adds = re.findall(r"vfmadd\w*ps\s+(.*)", assembly)
    # Two tiles (one shape of panel), each with four steps of k in its innermost loop.
    assert len(multiply_adds) >= 4 * (HOST.lanes // 2) * 3
    assert not [line for line in multiply_adds if "%rsp" in line]
    assert "prefetch" in assembly
