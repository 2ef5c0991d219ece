"""Threads: the records of the benchmark on a small model, and that every instance is called and checked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import threads


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each backend: one record for each number of threads, and two models at once on one thread each."""
    out = tmp_path / "threads.json"
    arguments = ["--models", "lstm", "--size", "small", "--seconds", "0.1", "--out", str(out)]
    assert threads.main(arguments) == 0
    records = json.loads(out.read_text())["records"]
    assert len(capsys.readouterr().out.splitlines()) == len(records)
    for backend in threads.BACKENDS:
        scaling = [r for r in records if (r["kind"], r["backend"]) == ("scaling", backend)]
        assert scaling[0]["threads"] == 1
        assert scaling[0]["speedup"] == 1.0
        assert all(r["speedup"] == pytest.approx(scaling[0]["ms"] / r["ms"], abs=0.001) for r in scaling)
        together = [r for r in records if (r["kind"], r["backend"]) == ("together", backend)]
        assert together[0]["threads"] == 1
        assert all(r["alone_per_s"] > 0 and r["together_per_s"] > 0 and r["kept"] > 0 for r in together)


def test_calls_run_at_once_and_errors_reach_the_caller() -> None:
    """A call that waits for the other one ends only if both are called at the same time; an error in a thread is raised."""
    both = threading.Barrier(2, timeout=30)
    rates = threads._rates([both.wait, both.wait], 0.0)
    assert len(rates) == 2
    assert min(rates) > 0

    def fails() -> None:
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        threads._rates([fails], 0.0)


def test_a_wrong_answer_is_told() -> None:
    """Answers of two instances are compared with eager's."""
    with pytest.raises(AssertionError):
        threads._check((torch.ones(3),), (torch.ones(3) + 0.1,))


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names what is unknown and what there is."""
    with pytest.raises(SystemExit):
        threads.main(["--models", "alexnet"])
    error = capsys.readouterr().err
    assert "alexnet" in error
    assert "resnet50" in error
