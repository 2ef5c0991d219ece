"""Kernels survive the way through JSON."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.engines.cpu.kernels_for_tests import attention_kernel, conv_kernel, row_sum_kernel, scale_kernel
from tests.interpreter.wire import decode, encode
from torch_hybrid_backend.codegen.kernel_key import canonical_text
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.ir import Call
from torch_hybrid_backend.loops.kernels import Kernel


@pytest.mark.parametrize(
    "kernel",
    [
        scale_kernel(),
        scale_kernel(factor=math.inf),
        scale_kernel(factor=math.nan),
        scale_kernel(factor=-0.0),
        row_sum_kernel(),
        attention_kernel(),
    ],
)
def test_a_kernel_comes_back(kernel: Kernel) -> None:
    """A kernel comes back with the same canonical text, non-finite constants and signs of zeros included."""
    assert canonical_text(decode(encode(kernel))) == canonical_text(kernel)


def test_what_is_unknown_is_refused() -> None:
    """A kernel of another backend, and an operation that the language does not have."""
    with pytest.raises(ScheduleError, match="CpuConvKernel"):
        encode(conv_kernel())
    kernel = scale_kernel()
    wrong = Call("float32", "no such", (kernel.stores[0].value,))
    with pytest.raises(ScheduleError, match="'no such'"):
        encode(dataclasses.replace(kernel, stores=(dataclasses.replace(kernel.stores[0], value=wrong),)))
