"""Errors: one base class, few children. A message says what was wrong, what is legal and what to do."""

from __future__ import annotations


class HybridError(RuntimeError):
    """Base of every error this package raises on purpose."""


class ConfigError(HybridError, ValueError):
    """A setting or option is unknown or has an illegal value."""


class CompileError(HybridError):
    """An engine could not compile a region."""


class CompilerCrashError(CompileError):
    """The kernel compiler's process died (LLVM can crash on a bad kernel)."""


class DeadlineError(CompileError):
    """Compilation exceeded its deadline."""


class CacheError(HybridError):
    """The on-disk cache cannot be used: not writable, not private, or not ours."""


class PassError(HybridError):
    """A graph pass broke an invariant; the message names the pass and those before it."""


class ScheduleError(CompileError):
    """A schedule was asked for a shape or layout it does not serve."""


class RegionError(HybridError):
    """Under HYBRID_STRICT=1: a region failed where it would otherwise have fallen back to eager."""


class OperatorRefusedError(HybridError):
    """PyTorch's `operator` raised `error` for the form of its inputs, not for their values, and has no decomposition that could stand in."""

    def __init__(self, operator: str, error: Exception) -> None:
        super().__init__(f"{operator} does not take these inputs, whatever values they hold: {error}")
        self.error = error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had: by Python, by an allocator of PyTorch's (which raises RuntimeError on CPU)."""
    import torch  # not above: processes that compile kernels import this module, and must stay small

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # "DefaultCPUAllocator: can't allocate memory: ...", and what C++ throws where PyTorch's allocator is not asked.
    return isinstance(error, RuntimeError) and any(s in str(error) for s in ("DefaultCPUAllocator", "std::bad_alloc"))
