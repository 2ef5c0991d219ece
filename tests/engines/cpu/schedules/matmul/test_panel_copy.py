"""A weight laid out (K, N), copied panel by panel, against float64 eager."""

from __future__ import annotations

import platform
import re

import pytest

from tests.engines.cpu.schedule_runner import HOST, NARROW, compile_kernel
from tests.engines.cpu.schedules.matmul.unpacked_for_tests import check, kernel_of
from torch_hybrid_backend.engines.cpu.schedules.matmul import unpacked
from torch_hybrid_backend.engines.cpu.target import Target


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 16, 32),
        (13, 5, 64),  # less than a chunk of k
        (29, 67, 32),  # ragged rows, and steps of k beyond the last chunk
        (197, 96, 96),  # tasks have different numbers of panels
        (300, 2051, 96),  # several blocks of rows, several parts of k, the last of which is shorter
    ],
)
def test_columns_match_eager(m: int, k: int, n: int, target: Target) -> None:
    """A weight laid out (K, N), dense or inside a larger one, is copied by the kernel, panel by panel."""
    check(kernel_of(m, k, n, k_stride=n), target)
    check(kernel_of(m, k, n, k_stride=n + 5, offset=3), target)


def test_copying_leaves_accumulators_in_registers() -> None:
    """Multiply-adds read no sums from memory while rows of the next panel are copied between them."""
    if platform.machine().lower() not in ("x86_64", "amd64") or HOST.lanes < 8:
        pytest.skip("looks for x86's multiply-adds in vectors")
    assembly = compile_kernel(kernel_of(96, 256, 64, k_stride=64), unpacked.emit).inspect_source("asm")
    multiply_adds = re.findall(r"vfmadd\w*ps\s+(.*)", assembly)
    assert len(multiply_adds) >= 20
    assert not [line for line in multiply_adds if "%rsp" in line]
    assert "prefetch" in assembly
