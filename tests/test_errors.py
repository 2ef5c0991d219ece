"""Errors: one family, and memory that could not be had told apart from every other fault."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from torch_hybrid_backend import errors
from torch_hybrid_backend.errors import (
    CompileError,
    CompilerCrashError,
    ConfigError,
    DeadlineError,
    HybridError,
    OperatorRefusedError,
    is_out_of_memory,
)


def test_one_class_catches_all_that_is_raised_on_purpose() -> None:
    """`except HybridError` is enough; what stopped a compilation is a CompileError, and a bad setting also a ValueError."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert len(kinds) > 5
    assert all(issubclass(kind, HybridError) for kind in kinds)
    assert issubclass(HybridError, RuntimeError)
    assert issubclass(CompilerCrashError, CompileError)
    assert issubclass(DeadlineError, CompileError)
    assert issubclass(ConfigError, ValueError)


def _allocate() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("allocate", [_allocate, lambda: bytearray(1 << 62)], ids=["PyTorch", "Python"])
def test_memory_that_is_not_there_is_recognised(allocate: Callable[[], object]) -> None:
    """Whichever allocator refuses it, and on whatever device."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the user's own text about memory"),
        HybridError("constant w is too large"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors_are_not_about_memory(error: BaseException) -> None:
    """Another fault, or another kind of error with such a text in it, is not excused as missing memory."""
    assert not is_out_of_memory(error)


def test_a_refused_operator_keeps_what_pytorch_raised() -> None:
    """The message names the operator and repeats PyTorch's; the error itself can be raised in its place."""
    told = NotImplementedError('"sort" not implemented for ComplexFloat')
    error = OperatorRefusedError("aten.sort.default", told)
    assert error.error is told
    assert "aten.sort.default" in str(error)
    assert str(told) in str(error)


def test_processes_that_compile_kernels_can_import_it() -> None:
    """The module needs no torch: those processes must stay small."""
    script = "import sys, torch_hybrid_backend.errors; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"
