"""Errors told apart by what they mean."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.errors import CompileError, is_out_of_memory, is_sticky


def accelerator_error(message: str, code: int | None) -> torch.AcceleratorError:
    """An error of a device's runtime as PyTorch raises it: `error_code` is an attribute, which not every device's has."""
    error = torch.AcceleratorError(message)
    if code is not None:
        error.error_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "sticks"),
    [
        (accelerator_error("CUDA error: an illegal memory access was encountered", 700), True),
        (accelerator_error("CUDA error: device-side assert triggered", 710), True),
        (accelerator_error("CUDA error: invalid configuration argument", 9), False),
        (accelerator_error("CUDA error: too many resources requested for launch", 701), False),
        (accelerator_error("XPU error", None), True),
        (accelerator_error("CUDA error: out of memory", 2), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: said by somebody else"), False),
        (ValueError("no"), False),
    ],
)
def test_what_leaves_a_device_unusable(error: Exception, sticks: bool) -> None:
    """Told by PyTorch's type and CUDA's code; without a code the worst is assumed."""
    assert is_sticky(error) == sticks


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (accelerator_error("CUDA error: out of memory", 2), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (CompileError("std::bad_alloc"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_what_is_out_of_memory(error: Exception, is_memory: bool) -> None:
    """Whoever could not have the memory: Python, PyTorch's allocators, the CUDA runtime, or a library."""
    assert is_out_of_memory(error) == is_memory
