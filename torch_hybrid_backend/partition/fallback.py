"""Fallback when an engine fails: the region goes to eager with one WARNING; under `strict` RegionError is raised.

Only this module decides so. There is no fallback from an error that leaves a device unusable: it is raised to the caller.
"""

from __future__ import annotations

import logging

from torch_hybrid_backend.core.plan import Refusal
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.errors import (
    AccuracyError,
    CompileError,
    CompilerCrashError,
    DeadlineError,
    RegionError,
    delivered,
    is_out_of_memory,
    is_sticky,
)

_log = logging.getLogger(__name__)


def compile_refusal(error: Exception) -> Refused:
    """The refusal that an exception from `Engine.compile` stands for."""
    if is_out_of_memory(error):
        code = Reason.OUT_OF_MEMORY
    elif isinstance(error, AccuracyError):
        code = Reason.ACCURACY
    elif isinstance(error, DeadlineError):
        code = Reason.DEADLINE
    elif isinstance(error, CompilerCrashError):
        code = Reason.COMPILER_CRASHED
    else:
        code = Reason.COMPILE_FAILED
    return Refused(code, _sentence(error))


def run_refusal(error: Exception) -> Refused:
    """The refusal that an exception from running a region stands for. CompileError: the engine compiled something only then."""
    if isinstance(error, CompileError):
        return compile_refusal(error)
    code = Reason.OUT_OF_MEMORY if is_out_of_memory(error) else Reason.RUNTIME_ERROR
    return Refused(code, _sentence(error))


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())  # one line: it becomes part of a log line
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def report_unchecked(region: Region, engine: str, unable: Refused) -> None:
    """Log one WARNING that `engine` runs the region unchecked, because eager cannot run it. `unable`: the reason."""
    _log.warning(
        "%s runs %s unchecked, as eager cannot run it: %s: %s", engine, _region_title(region), unable.code, unable.why
    )


def _region_title(region: Region) -> str:
    return f"region {region.name} ({region.source})" if region.source else f"region {region.name}"


def demote(region: Region, engine: str, refused: Refused, *, strict: bool, cause: Exception | None = None) -> Refusal:
    """Take `region` from `engine`, which failed for the reason `refused`. Returns the refusal for the plan.

    Logs one WARNING that names the region, the reason code and the user's line. Under `strict` raises RegionError with the same text.
    A cause that leaves the device unusable is raised unchanged: eager could not run the region either. A cause that was delivered from outside
    (`errors.delivered`) belongs to the program, and is raised unchanged too.
    """
    if cause is not None and (is_sticky(cause) or delivered(cause) is not None):
        raise cause
    line = f"{_region_title(region)} cannot run on {engine}: {refused.code}: {refused.why}"
    if strict:
        raise RegionError(f"{line}. With HYBRID_STRICT=0 it falls back to eager") from cause
    _log.warning("%s. It falls back to eager unless another engine takes it", line)
    return Refusal.of(engine, refused)
