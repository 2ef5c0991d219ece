"""Errors: one base class, few children. A message says what was wrong, what is legal and what to do."""

from __future__ import annotations

import contextlib
import difflib
import dis
import errno
import itertools
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class HybridError(RuntimeError):
    """Base of every error this package raises on purpose."""


class ConfigError(HybridError, ValueError):
    """A setting or option is unknown or has an illegal value."""


class ArgumentError(HybridError, ValueError):
    """A function of this package was given an argument that it cannot use."""


class QuantizationError(HybridError, ValueError):
    """A model cannot be quantized as asked: its calibration data, an exclusion, or a file of ranges is at fault."""


class CompileError(HybridError):
    """An engine could not compile a region. `recurs`: whether the same compilation would fail again, so that it is remembered
    (`builds.failures`); not where what stopped it lies elsewhere: an interrupt, a full disk, a program that is not installed."""

    def __init__(self, why: str, *, recurs: bool = True) -> None:
        super().__init__(why)
        self.recurs = recurs


class CompilerCrashError(CompileError):
    """The kernel compiler's process died (LLVM can crash on a bad kernel)."""


class DeadlineError(CompileError):
    """Compilation exceeded its deadline. `had_s`: how many seconds of a processor it was given; None: as many as it was to have."""

    def __init__(self, why: str, *, had_s: float | None = None) -> None:
        super().__init__(why)
        self.had_s = had_s


class AccuracyError(CompileError):
    """An engine computes a region too far from eager: it is not built again."""


class BuildCancelledError(CompileError):
    """Nobody wanted a build any more before it was done."""


class CacheError(HybridError):
    """The on-disk cache cannot be used: not writable, not private, or not ours."""


class CompressedFileError(HybridError, ValueError):
    """A file of compressed weights is damaged, or is none."""


class NotExportableError(HybridError, ValueError):
    """A model cannot be written to a `.hybrid` file; the message names what stands in the way."""


class ArtifactError(HybridError, ValueError):
    """A `.hybrid` file cannot be used: it is damaged or none, no given key signed it, it is for another machine or version of PyTorch, its
    sample call has other results here, or others may write to it."""


class RequestError(HybridError, ValueError):
    """A server was sent a request that it does not answer. `status`: of HTTP. The message is cut at 2000 letters, as it quotes the request."""

    def __init__(self, why: str, status: int = 400) -> None:
        most = 2000
        super().__init__(why if len(why) <= most else f"{why[: most - 3]}...")
        self.status = status


class PassError(HybridError):
    """A graph pass broke an invariant; the message names the pass and those before it."""


class ScheduleError(CompileError):
    """A schedule was asked for a shape or layout it does not serve."""


class RegionError(HybridError):
    """Under HYBRID_STRICT=1: a region failed where it would otherwise have fallen back to eager."""


class RankError(HybridError):
    """A rank of a torch.distributed job no longer takes part, or under HYBRID_STRICT=1: the ranks cannot compute a graph alike."""


# What the C++ plan throws for such values.
REFUSED_VALUES = "a kernel met values that PyTorch's operators refuse: an index out of range, or a division by zero"


class RefusedValuesError(HybridError):
    """PyTorch raises for the values that a call was given (an index out of range, an integer divided by 0). Whoever catches it has PyTorch run
    the call: it knows what to raise."""


class DeviceError(HybridError):
    """A GPU's driver refused what a kernel asked for. `code` is its own, a CUresult."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


class OperatorRefusedError(HybridError):
    """PyTorch's `operator` raised `error` for the form of its inputs, not for their values, and has no decomposition that could stand in.
    `is_mistake`: nothing may stand in, as what was given does not go together."""

    def __init__(self, operator: str, error: Exception, *, is_mistake: bool = False) -> None:
        super().__init__(f"{operator} does not take these inputs, whatever values they hold: {error}")
        self.error = error
        self.is_mistake = is_mistake


def unreachable(option: str, error: BaseException) -> ArgumentError:
    """The error for an option with the address of a Ray cluster, for what `ray.init` raised, in one line."""
    why = " ".join(str(error).split()) or type(error).__name__
    if type(error).__name__ == "AuthenticationError":  # of Ray, which need not be installed; its text is a page
        why = f"{why.partition('. ')[0]}; set RAY_AUTH_TOKEN to the cluster's token"
    return ArgumentError(f"{option} is no Ray cluster that can be reached: {why}")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory could not be had: by Python, by an allocator of PyTorch's (which raises RuntimeError on CPU)."""
    import torch  # not above: processes that compile kernels import this module, and must stay small

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


# What PyTorch's allocator on the CPU says, our C++ runtime, what C++ throws where neither is asked, CUDA's runtime and driver, and libraries
# that allocate for themselves.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "could not allocate a tensor of",
    "could not allocate a plan's arena of",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_from_outside(error: BaseException) -> bool:
    """True if an error in a process that compiles tells of the machine, not of what is compiled: what is missing, full or forbidden there."""
    if isinstance(error, OSError | MemoryError | ImportError) or (isinstance(error, CompileError) and not error.recurs):
        return True
    return tells_of_shortage(str(error)) or (error.__cause__ is not None and is_from_outside(error.__cause__))


def tells_of_later(error: BaseException) -> bool:
    """True if what stopped a compilation would stop it in another process too: what is found without its result then holds there as well."""
    return not isinstance(error, DeadlineError | CacheError) and not is_from_outside(error)


def tells_of_shortage(text: str) -> bool:
    """True if what a program said at its end names something that the machine did not give it: memory, disk, a thread, a file, a right."""
    return any(said in text.lower() for said in _SHORTAGE)


# What the machine answers to a program that asks too much of it, or is not allowed to ask.
_REFUSALS = (
    errno.EACCES,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOENT,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
    errno.ETXTBSY,
)
# As the C library, C++, Python and LLVM (`report_bad_alloc_error`) put it.
_SHORTAGE = (
    *(os.strerror(number).lower() for number in _REFUSALS),
    "std::bad_alloc",
    "out of memory",
    "memoryerror",
    "can't start new thread",
)


def is_sticky(error: BaseException) -> bool:
    """True if an error says that the process can use a device no more: on CUDA an illegal address or a failed assertion of a kernel, after
    which every call fails. Nothing can be recovered from there, and what reports it may not be what caused it: it is the caller's.

    PyTorch raises `torch.AcceleratorError` for what a device's runtime says, plans raise DeviceError for what a driver says; where the code is
    told (CUDA's), those that leave the device usable are told apart. What is out of memory is not sticky.
    """
    import torch

    if isinstance(error, DeviceError):
        return error.code in STICKY
    if not isinstance(error, torch.AcceleratorError) or is_out_of_memory(error):
        return False
    return error.error_code in STICKY if hasattr(error, "error_code") else True


# cudaError_t and CUresult, which agree in these, by the descriptions of CUDA's documentation ("the process must be terminated and relaunched",
# or a context gone).
STICKY = frozenset(
    (
        214,  # ECC uncorrectable
        220,  # NVLink uncorrectable
        700,  # illegal address
        702,  # launch timeout
        709,  # context is destroyed
        710,  # assert
        714,  # hardware stack error
        715,  # illegal instruction
        716,  # misaligned address
        717,  # invalid address space
        718,  # invalid program counter
        719,  # launch failure
        721,  # tensor memory leak
        911,  # external device
    )
)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that `name` most likely misspells, or None."""
    by_lower = {each.lower(): each for each in known}
    longer = [each for each in by_lower if each.startswith(name.lower())]
    if len(longer) == 1:
        return by_lower[longer[0]]  # "int4" stands for "int4-weights", though "int8" has more letters in common
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.65)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'verify'? " for the nearest of `known`, or "" if none is near."""
    near = nearest(name, known)
    return f"Did you mean {near!r}? " if near else ""


def failures(*kinds: type[_Error]) -> tuple[type[_Error], ...]:
    """The kinds of error, for an `except` clause; no kind at all where the error at hand was delivered from outside (`delivered`).

    Every clause of this package that names Exception, RuntimeError or OSError is written with it: what a timeout of the program raises in
    the midst of our work is the program's to handle.

        try:
            compiled(inputs)
        except failures(Exception) as error:  # why: an engine may fail in any way
    """
    return () if delivered(sys.exc_info()[1]) is not None else kinds


@contextlib.contextmanager
def ignored(*kinds: type[BaseException]) -> Iterator[None]:
    """`contextlib.suppress` for what `failures` takes."""
    try:
        yield
    except failures(*kinds):
        pass


def delivered(error: BaseException | None) -> BaseException | None:
    """The error, or one that it was raised from, if no code at work raised it: a signal's handler did, or another thread sent it to this one.

    Libraries limit the time of jobs so. The classes of such errors tell nothing: they are the program's own, or TimeoutError. What tells is
    where they come from. The interpreter gives a handler the frame that it interrupts. What another thread sends (PyThreadState_SetAsyncExc) is
    raised where the interpreter looks for it: at instructions that raise nothing themselves, and behind calls, where only that it has no
    arguments sets it apart.
    """
    seen: list[BaseException] = []
    while error is not None and not any(error is each for each in seen):
        last = _innermost(error.__traceback__)
        if last is not None and (_passes_a_handler(error.__traceback__) or _is_sent(error, last)):
            return error
        seen.append(error)
        error = error.__cause__
    return None


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _passes_a_handler(trace: TracebackType | None) -> bool:
    """True if a function on the way was given the frame below it, as handlers of signals are, and functions that trace or profile."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return any(_was_given(inner, outer) for outer, inner in itertools.pairwise(frames))


def _was_given(frame: FrameType, other: FrameType) -> bool:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]  # `*arguments` come next
    values = (frame.f_locals.get(name) for name in names)
    return any(value is other or (type(value) is tuple and any(each is other for each in value)) for value in values)


def _is_sent(error: BaseException, last: TracebackType) -> bool:
    if isinstance(error, RecursionError | MemoryError | StopIteration):
        return False  # the interpreter raises these by itself
    at = last.tb_lasti
    operation = dis.opname[last.tb_frame.f_code.co_code[at]] if at >= 0 else "RESUME"
    return operation in ("RESUME", "JUMP_BACKWARD") or ("CALL" in operation and not error.args)
