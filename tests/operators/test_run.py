"""The runner: what becomes of tasks that give no samples and of processes that give no answer, and how a run goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.operators.execution import ERROR, PASSED, Outcome
from tests.operators.rows import HUNG, Journal, Row
from tests.operators.run import Settings, Worker, is_done, main, run_tasks
from tests.operators.tasks import Task


def test_a_silent_process_counts_as_hanging() -> None:
    """A worker that says nothing in time is ended, and its task is a failure in each mode; the run goes on with the next."""
    settings = Settings(("tvm", "default"), limit=1, threads=1, compilers=1, silence_s=0.05)
    rows = [row for both in run_tasks([Task("add", "float32"), Task("mul", "float32")], settings) for row in both]
    assert [(row.name, row.mode) for row in rows] == [
        (f"{subject} float32", mode) for subject in ("add", "mul") for mode in ("tvm", "default")
    ]
    assert all(row.failures[0][1] == HUNG for row in rows)


def test_a_task_without_samples_is_an_error() -> None:
    """Making the samples failed: that is reported, and the worker serves the next task."""
    worker = Worker(Settings(("tvm",), limit=1, threads=1, compilers=1, silence_s=300))
    try:
        _, results = worker.run(Task("no such operator", "float32"))
        assert [outcome["tvm"].status for outcome in results.values()] == [ERROR]
        assert "no such operator" in results[-1]["tvm"].why
        _, results = worker.run(Task("add", "int64"))
        assert [outcome["tvm"].why for outcome in results.values()] == [""]
    finally:
        worker.stop()


@pytest.mark.full
def test_a_run_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks in the journal are not run again."""
    arguments = ["--out", str(tmp_path), "--ops", "neg", "--kinds", "int64", "--compilers", "1", "--limit", "1"]
    assert main([*arguments, "--budget-s", "0"]) == 0
    assert not Journal(tmp_path / "journal.jsonl").rows
    for _ in range(2):
        assert main(arguments) == 0
        assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 2  # one operator in two modes, once
    assert "0 surprises" in capsys.readouterr().out


def test_what_is_done() -> None:
    """A task is run again where a row is missing, where more of its samples are asked for, and where its verdict is asked for again."""
    row = Row.of(Task("some", "float32"), "tvm", 9, {0: Outcome(PASSED, taken=1), 4: Outcome(PASSED, taken=1)})
    assert is_done([row, row], 2, ())
    assert not is_done([row, None], 2, ())
    assert not is_done([row, row], 3, ())
    assert not is_done([row, row], None, ())
    assert not is_done([row, row], 2, ("taken",))
    assert is_done([dataclasses.replace(row, available=2)], None, ("wrong",))
