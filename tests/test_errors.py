"""Errors: one family, told apart by what they mean."""

from __future__ import annotations

import ctypes
import functools
import inspect
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from torch_hybrid_backend import errors
from torch_hybrid_backend.errors import (
    CacheError,
    CompileError,
    CompilerCrashError,
    ConfigError,
    DeadlineError,
    DeviceError,
    HybridError,
    OperatorRefusedError,
    delivered,
    did_you_mean,
    ignored,
    is_from_outside,
    is_out_of_memory,
    is_sticky,
    nearest,
    tells_of_later,
)


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
        (DeviceError("the kernel k: launching it failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)", 700), True),
        (DeviceError("loading the module of k failed: CUDA_ERROR_INVALID_IMAGE (200)", 200), False),
        (RuntimeError("CUDA error: said by somebody else"), False),
        (ValueError("no"), False),
    ],
)
def test_what_leaves_a_device_unusable(error: Exception, sticks: bool) -> None:
    """Told by PyTorch's type or ours and CUDA's code; without a code the worst is assumed."""
    assert is_sticky(error) == sticks


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (accelerator_error("CUDA error: out of memory", 2), True),
        (DeviceError("the kernel k: launching it failed: CUDA_ERROR_OUT_OF_MEMORY (2)", 2), True),
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


def _allocate() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("allocate", [_allocate, lambda: bytearray(1 << 62)], ids=["PyTorch", "Python"])
def test_memory_that_is_not_there_is_recognised(allocate: Callable[[], object]) -> None:
    """By what an allocator really raises, PyTorch's or Python's."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value)


def test_one_class_catches_all_that_is_raised_on_purpose() -> None:
    """`except HybridError` is enough; what stopped a compilation is a CompileError, and a bad setting also a ValueError."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert len(kinds) > 5
    assert all(issubclass(kind, HybridError) for kind in kinds)
    assert issubclass(HybridError, RuntimeError)
    assert issubclass(CompilerCrashError, CompileError)
    assert issubclass(DeadlineError, CompileError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("explainn", "explain"),
        ("EXPLAIN", "explain"),
        ("quantize", "quantize"),
        ("int4", "int4-weights"),
        ("zebra", None),
    ],
)
def test_the_nearest_name(name: str, found: str | None) -> None:
    """A misspelling, another case, or the beginning of one name alone; nothing where none is near."""
    known = ("explain", "quantize", "int4-weights", "int8", "int8-weights")
    assert nearest(name, known) == found
    assert did_you_mean(name, known) == (f"Did you mean {found!r}? " if found else "")


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


@pytest.mark.parametrize(
    ("error", "holds"),
    [
        (CompileError("too wide"), True),
        (ValueError("too wide"), True),
        (CompilerCrashError("killed by SIGSEGV"), True),
        (CompileError("no linker", recurs=False), False),
        (CompilerCrashError("what():  Resource temporarily unavailable"), False),
        (DeadlineError("late"), False),
        (CacheError("read-only"), False),
        (OSError(24, "Too many open files"), False),
        (MemoryError(), False),
    ],
)
def test_what_tells_of_later_processes(error: Exception, holds: bool) -> None:
    """Failures that lie in the compiled thing tell of later processes; not what the machine lacked, nor what came too late."""
    assert tells_of_later(error) is holds


def test_what_an_error_was_raised_from_counts() -> None:
    """A builder wraps what its library raised."""
    for cause, is_outside in ((MemoryError(), True), (ValueError("odd"), False)):
        error = CompileError("it cannot lower the region")
        error.__cause__ = cause
        assert is_from_outside(error) is is_outside


class _Late(Exception):
    """A time limit of a program's."""


class _Handler:
    def __call__(self, signum: int, frame: object) -> None:
        raise _Late

    def limit(self, signum: int, frame: object) -> None:
        self(signum, frame)


def _resets_itself(signum: int, frame: object) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise TimeoutError


def _without_names(*_: object) -> None:
    raise _Late("late")


@pytest.mark.parametrize(
    "handler",
    [_Handler(), _Handler().limit, _resets_itself, _without_names, functools.partial(_without_names)],
    ids=["object", "method", "function", "arguments", "partial"],
)
def test_what_a_handler_raises_was_delivered(handler: Callable[..., object]) -> None:
    """Whatever kind of callable handles the signal, of whatever class the error is, and through errors that are raised from it."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises((_Late, TimeoutError)) as raised:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert delivered(raised.value) is raised.value
    around = HybridError("it failed")
    around.__cause__ = raised.value
    assert delivered(around) is raised.value


def _busy() -> None:
    while True:
        pass


def _calling() -> None:
    while True:
        time.sleep(0)


def _called() -> None:
    while True:
        _nothing()


def _nothing() -> None:
    """Called again and again."""


@pytest.mark.parametrize("work", [_busy, _calling, _called])
def test_what_another_thread_sends_was_delivered(work: Callable[[], None]) -> None:
    """Wherever the interpreter raises it: in a loop, in a call of C, at the beginning of a function."""
    send = functools.partial(
        ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_Late)
    )

    def limited() -> None:
        threading.Timer(0.002, send).start()
        work()

    for _ in range(20):
        with pytest.raises(_Late) as raised:
            limited()
        assert delivered(raised.value) is raised.value


def _endless() -> None:
    _endless()


def _asserts() -> None:
    raise AssertionError


@pytest.mark.parametrize(
    "work",
    [
        _asserts,
        _endless,
        lambda: next(iter([])),
        lambda: {}[0],
        lambda: int("x"),
        lambda: torch.zeros(2).view(3),
        lambda: torch.mm(torch.zeros(2, 3), torch.zeros(2, 3)),
    ],
)
def test_what_code_raises_was_not_delivered(work: Callable[[], object]) -> None:
    """Errors of functions in Python, of operators, of C, with a message and without one; nothing at all."""
    with pytest.raises(Exception) as raised:  # noqa: PT011
        work()
    assert delivered(raised.value) is None
    assert delivered(ValueError("never raised")) is None
    assert delivered(None) is None


def test_a_clause_takes_failures_only() -> None:
    """`failures`, in `ignored`, stops an error of the code, and none of a handler, which is raised on as it is."""
    with ignored(OSError):
        raise OSError
    before = signal.signal(signal.SIGUSR1, _resets_itself)
    try:
        with pytest.raises(TimeoutError), ignored(OSError):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with ignored(ValueError, Exception):
        raise _Late
