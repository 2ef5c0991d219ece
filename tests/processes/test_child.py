"""A child process, as its parent sees it. More tests are in tests/codegen/workers/test_process.py."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from pathlib import Path

import pytest

from torch_hybrid_backend.errors import CompileError, ScheduleError
from torch_hybrid_backend.processes.child import Child, End, as_exception
from torch_hybrid_backend.processes.frames import frame
from torch_hybrid_backend.processes.inside import described

_MODULE = """
import os
from torch_hybrid_backend.processes.inside import answer, begin

def main(lifeline, *arguments):
    orders, answers = begin(lifeline)
    print("this goes to the errors", flush=True)
    answer(answers, {"arguments": arguments, "setting": os.environ["OF_TESTS"]})
    received = b""
    while chunk := os.read(orders, 100):
        received += chunk
    answer(answers, {"received": received.hex()})
"""

_WORKING = """
import subprocess, sys, time
from torch_hybrid_backend.processes.inside import answer, begin

def main(lifeline):
    orders, answers = begin(lifeline)
    subprocess.run([sys.executable, "-c", "while __import__('time').process_time() < 0.5: pass"], check=True)
    answer(answers, {})
    time.sleep(60)
"""


def test_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child gets its arguments, also empty ones, its environment, a lower priority and orders.
    The child answers, and its error output is kept."""
    (tmp_path / "child_of_tests.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    child = Child("child_of_tests", ["one", "", "three"], "the child", {"OF_TESTS": "set"})
    try:
        before = os.getpriority(os.PRIO_PROCESS, child.process.pid)
        child.lower_priority()
        assert os.getpriority(os.PRIO_PROCESS, child.process.pid) >= max(before, 10)
        child.outgoing += frame(b"order")
        while child.outgoing:
            child.write()
        child.close_orders()
        answers: list[dict[str, object]] = []
        while (arrived := child.read()) is not None:
            answers += arrived
            select.select([child.stdout], [], [], 30)
        assert answers == [
            {"arguments": ["one", "", "three"], "setting": "set"},
            {"received": frame(b"order").hex()},
        ]
        assert child.last_words() == "this goes to the errors"
        child.wait(30)
    finally:
        assert child.end() == 0


def test_errors_of_a_child() -> None:
    """An error of a child becomes this package's error, with the subject and the child's traceback. So does an answer that describes no
    error."""
    error = as_exception("the kernel", {"type": "ValueError", "message": "odd", "traceback": "in line 3"})
    assert (type(error), str(error), error.__notes__) == (CompileError, "the kernel: ValueError: odd", ["in line 3"])
    assert str(as_exception("the kernel", {"type": "CompileError", "message": "odd"})) == "the kernel: odd"
    assert isinstance(as_exception("the kernel", {"type": "ScheduleError", "message": "odd"}), ScheduleError)
    assert isinstance(as_exception("the kernel", None), CompileError)
    for raised, recurs in (
        (ValueError("odd"), True),
        (OSError("odd"), False),
        (RuntimeError("Out of memory"), False),
        (RuntimeError("can't start new thread"), False),
    ):
        assert as_exception("the kernel", described(raised)).recurs is recurs
    assert not as_exception("the kernel", described(CompileError("no linker", recurs=False))).recurs


def test_ends_of_a_child() -> None:
    """Messages say how the child ended, and its last words. A signal from outside, or lack of memory, is not the child's fault."""
    crashed = End(-signal.SIGSEGV, "bad kernel")
    assert (crashed.how, crashed.said) == ("was killed by SIGSEGV", "\nIts last words:\nbad kernel")
    assert (End(3, "").how, End(3, "").said) == ("ended with status 3", "")
    assert crashed.recurs
    assert End(3, "").recurs
    assert not End(-signal.SIGKILL, "").recurs
    assert not End(-signal.SIGALRM, "").recurs
    assert not End(-signal.SIGABRT, "LLVM ERROR: out of memory").recurs
    assert not End(-signal.SIGABRT, "what():  Resource temporarily unavailable").recurs
    assert not End(1, "OSError: [Errno 24] Too many open files").recurs
    assert not End(-signal.SIGBUS, "").recurs  # a file that is mapped, on a full disk
    assert not End(-signal.SIGSYS, "").recurs  # a filter of system calls


def test_a_crash_under_a_limit_of_memory() -> None:
    """A crash under a memory limit is not the fault of the compiled code: not every library checks its allocations."""
    assert End(-signal.SIGSEGV, "").recurs
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 45, before[1]))
    try:
        assert not End(-signal.SIGSEGV, "").recurs
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_a_child_that_cannot_be_started() -> None:
    """The error is marked as one that need not recur, as the child's work did not cause it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, before[1]))
    try:
        with pytest.raises(CompileError, match="Too many open files") as raised:
            Child("child_of_tests", [], "the child")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not raised.value.recurs


def test_how_long_a_processor_worked_for_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time asleep does not count. Time of a program that the child waited for does."""
    (tmp_path / "child_of_tests.py").write_text(_WORKING)
    monkeypatch.syspath_prepend(str(tmp_path))
    child = Child("child_of_tests", [], "the child")
    try:
        select.select([child.stdout], [], [], 60)
        worked = child.processor_s()
        assert worked >= 0.5
        time.sleep(0.5)
        assert child.processor_s() < worked + 0.4
    finally:
        child.end()
