"""Regions that an engine loses: which reason is given, what is logged, and what strict raises."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Refusal
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.errors import (
    CompileError,
    CompilerCrashError,
    DeadlineError,
    HybridError,
    RegionError,
    ScheduleError,
)
from torch_hybrid_backend.partition.fallback import compile_refusal, demote, report_unchecked, run_refusal
from torch_hybrid_backend.partition.regions import partition_graph


@pytest.fixture
def region() -> Region:
    (segment,) = partition_graph(trace(lambda x: x @ x + 1, torch.ones(3, 3)), [FakeEngine()], Config()).graph.segments
    return dataclasses.replace(segment.region, source="model.py:12 in forward")


COMPILING = [
    (DeadlineError("it took over 3 s"), Reason.DEADLINE),
    (CompilerCrashError("signal 11"), Reason.COMPILER_CRASHED),
    (ScheduleError("no such tile"), Reason.COMPILE_FAILED),
    (CompileError("no"), Reason.COMPILE_FAILED),
    (KeyError("missing"), Reason.COMPILE_FAILED),
]


@pytest.mark.parametrize(("error", "code"), COMPILING, ids=repr)
def test_what_stopped_a_compilation(error: Exception, code: Reason) -> None:
    """The narrowest reason counts, whatever an engine raises; the sentence names the error and says its text."""
    refused = compile_refusal(error)
    assert refused.code is code
    assert refused.why == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *[(error, code) for error, code in COMPILING if isinstance(error, CompileError)],  # compiled only by a call
        (MemoryError(), Reason.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate"), Reason.OUT_OF_MEMORY),
        (HybridError("kernel conv_3 failed"), Reason.RUNTIME_ERROR),
        (ZeroDivisionError("division by zero"), Reason.RUNTIME_ERROR),
    ],
    ids=repr,
)
def test_what_stopped_a_run(error: Exception, code: Reason) -> None:
    """Missing memory is told apart from faults, and what an engine compiles in the first call from what it runs."""
    assert run_refusal(error).code is code


@pytest.mark.parametrize(
    ("text", "why"), [("a\n  b\tc ", "ValueError: a b c"), ("", "ValueError"), (" \n", "ValueError")]
)
def test_a_reason_is_one_line(text: str, why: str) -> None:
    """A reason becomes part of a log line: line breaks and runs of spaces go, and an error without text is named alone."""
    assert compile_refusal(ValueError(text)).why == run_refusal(ValueError(text)).why == why


def test_a_lost_region_is_warned_of_once(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the region, the user's line, the engine, code and sentence; the refusal for the plan says the same."""
    refusal = demote(region, "tvm", Refused(Reason.DEADLINE, "DeadlineError: it took over 3 s"), strict=False)
    assert refusal == Refusal("tvm", Reason.DEADLINE, "DeadlineError: it took over 3 s")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in (region.name, "model.py:12 in forward", "tvm", "deadline", "it took over 3 s", "falls back to eager"):
        assert part in record.getMessage()


@pytest.mark.parametrize("cause", [None, ValueError("inner")])
def test_strict_raises_instead(region: Region, caplog: pytest.LogCaptureFixture, cause: Exception | None) -> None:
    """The same words, with what to do; the engine's own error is the cause. Nothing is logged besides."""
    with pytest.raises(RegionError, match=r"cannot run on tvm: accuracy: off by 3.*HYBRID_STRICT=0") as caught:
        demote(region, "tvm", Refused(Reason.ACCURACY, "off by 3"), strict=True, cause=cause)
    assert caught.value.__cause__ is cause
    assert "model.py:12 in forward" in str(caught.value)
    assert not caplog.records


def test_an_unchecked_region_is_warned_of(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says who runs a region that eager cannot run, and why nothing checks the result; a region of no line is named alone."""
    unable = Refused(Reason.OUT_OF_MEMORY, "MemoryError")
    report_unchecked(region, "tvm", unable)
    report_unchecked(dataclasses.replace(region, source=""), "tvm", unable)
    first, second = caplog.messages
    for part in ("tvm", "unchecked", region.name, "out_of_memory: MemoryError"):
        assert part in first
        assert part in second
    assert "(model.py:12 in forward)" in first
    assert "(" not in second
