"""The left operand as tiles: read where its layout says, or computed."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest

from tests.engines.cpu.amx_for_tests import emulated
from tests.engines.cpu.schedules.amx.products_for_tests import (
    errors,
    kernel_of,
    operands_of,
    run,
)
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided

__all__ = ["emulated"]  # the fixture


@pytest.mark.parametrize("layout", [Strided((13 * 40, 1, 13)), Blocked(16)])
def test_any_layout(emulated: ctypes.CDLL, layout: Layout) -> None:
    """The stores go where the layout says, and A is read where its layout says."""
    shape = (1, 13, 40, 40)
    a, b = operands_of(shape, "float32")
    kernel = kernel_of(shape, "float32", a_layout=layout, out_layout=layout)
    assert errors(run(kernel, a, b), a, b).max() < 3e-7


def test_operands_that_are_computed(emulated: ctypes.CDLL) -> None:
    """An expression for A, as fusion leaves it, is computed while A is copied: in bfloat16 it is rounded then."""
    shape = (1, 20, 48, 40)
    kernel = kernel_of(shape, "bfloat16")
    kernel = dataclasses.replace(kernel, a=ops.mul(kernel.a, ops.const(1.1, "float32")))
    a, b = operands_of(shape, "bfloat16")
    rounded = (a.float() * 1.1).bfloat16()
    assert errors(run(kernel, a, b), rounded, b).max() < 3e-7
