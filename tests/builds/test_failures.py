"""Remembered failures of builds."""

from __future__ import annotations

from pathlib import Path

from torch_hybrid_backend.builds.failures import FAILURES, REMEMBERED_S, Failures
from torch_hybrid_backend.errors import AccuracyError, CompileError, CompilerCrashError, DeadlineError
from torch_hybrid_backend.storage.store import Store


class _TooWideError(CompileError):
    """An error class of an engine."""


def test_failures(tmp_path: Path) -> None:
    """Each build has its own failure, with its class. The last one counts. Failures expire after a day, or if they lie in the future."""
    now = [1_000_000.0]
    failures = Failures(Store(tmp_path), lambda: now[0])
    failures.put("engines", "a", CompileError("before"))
    failures.put("engines", "a", DeadlineError("too late"))
    now[0] += 60
    failures.put("engines", "b", CompilerCrashError("it died"))
    failures.put("engines", "c", _TooWideError("too wide"))
    failures.put("engines", "d", AccuracyError("too far off"))
    errors = {}
    for key in "abcd":
        found = failures.get("engines", key)
        assert found is not None
        errors[key] = found.as_exception()
        assert "tried again a day later" in str(errors[key])
    assert [type(error) for error in errors.values()] == [
        DeadlineError,
        CompilerCrashError,
        CompileError,
        AccuracyError,
    ]
    assert "too late" in str(errors["a"])
    assert failures.get("others", "a") is None
    assert {failure.key for failure in failures.all()} == set("abcd")
    now[0] += REMEMBERED_S - 60
    assert {failure.key for failure in failures.all()} == set("bcd")
    assert failures.get("engines", "a") is None
    now[0] = 10.0  # the failure lies in the future
    assert failures.all() == []
    assert failures.get("engines", "b") is None
    now[0] += 1_000_000
    failures.forget()
    assert [usage.kind for usage in Store(tmp_path).usage()] == []


def test_what_is_not_remembered(tmp_path: Path) -> None:
    """Failures from outside are not remembered, nor deadlines missed for lack of a processor. A missed deadline counts only for deadlines that
    are not longer; other failures count for all."""
    failures = Failures(Store(tmp_path))
    failures.put("engines", "full", CompileError("no space left on device", recurs=False), 60)
    failures.put("engines", "late", DeadlineError("too late"), 60)
    failures.put("engines", "wide", CompileError("too wide"), 60)
    failures.put("engines", "waited", DeadlineError("too late", had_s=20.0), 60)
    failures.put("engines", "worked", DeadlineError("too late", had_s=40.0), 60)
    assert failures.get("engines", "waited", 60) is None
    assert failures.get("engines", "worked", 60) is not None
    failures.remove("engines", "worked")
    assert failures.get("engines", "full", 60) is None
    assert failures.get("engines", "late", 60.1) is None
    assert failures.get("engines", "late", 60) is not None
    assert failures.get("engines", "late", 1) is not None
    assert failures.get("engines", "wide", 600) is not None
    failures.remove("engines", "late")
    failures.remove("engines", "late")
    assert [failure.key for failure in failures.all()] == ["wide"]


def test_damaged_failures_count_as_none(tmp_path: Path) -> None:
    """A damaged entry under a failure's name counts as none."""
    store = Store(tmp_path)
    failures = Failures(store)
    failures.put("engines", "a", CompileError("it failed"))
    (entry,) = store.keys(FAILURES)
    for damaged in (
        b"",
        b"[]",
        b'{"kind": "engines"}',
        b'{"kind": "engines", "key": "a", "at": "x", "error": "", "message": "", "limit_s": 60}',
    ):
        store.remove(FAILURES, entry)
        store.put(FAILURES, entry, damaged)
        assert failures.all() == []
        assert failures.get("engines", "a") is None
