"""Direct convolution against float64 eager, and its machine code."""

from __future__ import annotations

import re

import pytest

from tests.engines.tvm.schedule_runner import HOST, NARROW, compile_kernel
from tests.engines.tvm.schedules.convolution.convolutions_for_tests import Case, check, make
from torch_hybrid_backend.engines.tvm.schedules.convolution import rules
from torch_hybrid_backend.engines.tvm.target import Target


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 16, 8, 17), 32, (3, 3), padding=1),
        Case((2, 3, 15, 13), 20, (3, 3), 2, 1, blocked_x=False),
        Case((1, 37, 11, 19), 29, (5, 3), 2, (2, 0)),
        Case((1, 16, 9, 9), 16, (3, 3), padding=2, dilation=2, blocked_out=False),
        Case((1, 5, 3, 3), 7, (3, 3), padding=3),  # tiles that read nothing but padding
        Case((1, 1, 1, 1), 1, (1, 1)),
        Case((2, 24, 9, 7), 40, (1, 1)),
        Case((1, 8, 9, 7), 48, (1, 1), 2),
        Case((1, 8, 50), 12, (5,), 2, 2),
        Case((1, 8, 41), 8, (1,)),
    ],
)
def test_direct(case: Case, target: Target) -> None:
    """Strides, padding, dilation, ragged channels, one and two dimensions."""
    check(case, target)


@pytest.mark.parametrize("blocked_x", [True, False])
@pytest.mark.parametrize("blocked_out", [True, False])
def test_pointwise_in_any_layout(blocked_x: bool, blocked_out: bool) -> None:
    """A 1x1 kernel sees one long row wherever the input's layout allows it."""
    check(Case((2, 24, 5, 7), 40, (1, 1), blocked_x=blocked_x, blocked_out=blocked_out))


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 10, 10), 64, (3, 3), 1, 1, groups=4),
        Case((1, 6, 9, 9), 12, (3, 3), 1, 1, groups=3),
        Case((1, 10, 6, 6), 14, (3, 3), 1, 1, groups=2),  # seven channels a group: blocks of one
        Case((1, 6, 9, 9), 24, (3, 3), 1, 1, groups=6),  # one input channel a group, several outputs
        Case((1, 48, 9), 48, (3,), 1, 1, groups=2),
    ],
)
def test_grouped(case: Case) -> None:
    """Groups: no block of output channels straddles two."""
    check(case)


def test_wide_kernels_test_columns_as_they_run() -> None:
    """A kernel too wide to unroll gives the same values, padding included."""
    check(Case((1, 8, 40), 8, (32,), padding=16, groups=2))
    check(Case((1, 8, 3, 40), 8, (2, 17), padding=(1, 8)))


@pytest.mark.parametrize("o", [96, 100])
def test_weights_larger_than_the_cache_go_in_chunks(o: int) -> None:
    """Input channels in chunks, partial sums in a buffer; also with a padded last block."""
    check(Case((1, 128, 7, 7), o, (3, 3), padding=1), NARROW)


@pytest.mark.parametrize("o", [32, 27])
def test_long_epilogues_run_from_a_spilled_tile(o: int) -> None:
    """An epilogue of many operations gives the same values."""
    check(Case((1, 16, 6, 10), o, (3, 3), padding=1, long_epilogue=True))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    """Accumulation is in float64 for float64, in float32 for bfloat16."""
    check(Case((1, 16, 6, 10), 20, (3, 3), padding=1, dtype=dtype))


@pytest.mark.parametrize("blocked_x", [True, False])
def test_the_next_block_of_channels_is_prefetched(blocked_x: bool) -> None:
    """What lies far from what is being read is asked for ahead, where the input is in blocks of channels."""
    kernel, _, _ = make(Case((1, 48, 25, 25), 32, (3, 3), stride=2, padding=1, blocked_x=blocked_x), HOST)
    assembly = compile_kernel(kernel, rules.emit).inspect_source("asm")
    assert ("prefetch" in assembly) == blocked_x


def test_accumulators_stay_in_registers() -> None:
    """Columns of a row share input elements between taps, which LLVM keeps in registers: tiles leave room for them."""
    if HOST.lanes < 16:
        pytest.skip("register names of AVX-512")
    kernel, _, _ = make(Case((1, 128, 56, 56), 32, (3, 3), 1, 1), HOST)
    assembly = compile_kernel(kernel, rules.emit).inspect_source("asm")
    spills = re.findall(r"vmovup[sd]\s+(?:%zmm\d+, -?\d*\(%rsp\)|-?\d*\(%rsp\), %zmm)", assembly)
    multiply_adds = re.findall(r"vfmadd\w+\s+.*%zmm", assembly)
    assert len(multiply_adds) >= 54
    assert len(spills) <= len(multiply_adds) // 20
