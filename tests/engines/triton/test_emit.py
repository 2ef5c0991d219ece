"""Kernels as the text of Triton programs."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from tests.engines.cpu.kernels_for_tests import argument, conv_kernel, row_sum_kernel, scale_kernel
from torch_hybrid_backend.engines.triton.emit import emit_kernel, row_sizes
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, var
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, MapKernel, Store
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import symbol


def test_a_pointwise_program() -> None:
    """A reader sees what it computes."""
    program = emit_kernel(scale_kernel(100), "scale", Target(90, 132))
    assert_expected_inline(
        program.text,
        """\
\"\"\"A MapKernel over ('100',).\"\"\"

import triton
import triton.language as tl
from triton.language.extra import libdevice

@triton.jit
def larger(a, b):
    \"\"\"The larger one; NaN where one is NaN.\"\"\"
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale(in0, out0, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i_in = i < 100
    t1 = tl.load(in0 + (i), i_in, other=0)
    t2 = tl.full([], 0.0, tl.float32)
    t3 = larger(t1, t2)
    t4 = tl.full([], 2.0, tl.float32)
    t5 = t3 * t4
    tl.store(out0 + (i), t5, i_in)
""",
    )
    assert program.signature == {"in0": "*fp32", "out0": "*fp32"}


def test_a_row_program() -> None:
    """Rows and columns; what is not there counts as nothing."""
    program = emit_kernel(row_sum_kernel(4, 9), "rows", Target(90, 132))
    assert_expected_inline(
        program.text,
        """\
\"\"\"A RowKernel over ('4', '9').\"\"\"

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def rows(in0, out0, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    j = 0 + tl.arange(0, COLUMNS)[None, :]
    j_in = j < 9
    t1 = tl.load(in0 + (i * 9 + j), j_in, other=0)
    t2 = t1 + t1
    t4 = tl.where(j_in, t2, tl.full([], 0.0, tl.float32))
    t5 = tl.sum(t4, 1, keep_dims=True).to(tl.float32)
    tl.store(out0 + (i), t5)
""",
    )


def test_numbers_from_the_host_are_parameters() -> None:
    """Numbers from the host are no pointers, and nothing is loaded."""
    x, out = argument(8), argument(8)
    factor = Buffer((), "float32", "factor", by_value=True)
    i = var("i", 8)
    value = ops.mul(x.buffer.at((i,)), factor.at(()))
    kernel = MapKernel(
        (x, Argument(factor, contiguous(()))), (out,), (LoopVar("i", 8),), (Store(out.buffer, (i,), value),)
    )
    program = emit_kernel(kernel, "scaled", Target(90, 132))
    assert program.signature == {"in0": "*fp32", "in1": "fp32", "out0": "*fp32"}
    assert "tl.load(in1" not in program.text


def test_kernels_of_other_backends_are_refused() -> None:
    with pytest.raises(ScheduleError, match="CpuConvKernel"):
        emit_kernel(conv_kernel(), "kernel", Target(90, 132))


def test_both_ways_where_a_size_decides() -> None:
    """The program tests at run time where rows begin. Only the size of the dimension that runs through memory counts."""
    n, m = symbol("s0"), symbol("s1")
    kernels = scale_kernel(n), scale_kernel(16 * n), row_sum_kernel(n, m), row_sum_kernel(n, 9)
    assert [[size.name for size in row_sizes(kernel)] for kernel in kernels] == [["s0"], [], ["s1"], []]
    program = emit_kernel(scale_kernel(n), "scale", Target(90, 132))
    assert program.text.endswith(
        """
    if n0 % 16 == 0:
        scale_body(in0, out0, n0 // 16 * 16, BLOCK)
    else:
        scale_body(in0, out0, n0, BLOCK)
"""
    )
