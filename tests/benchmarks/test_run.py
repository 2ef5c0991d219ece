"""The benchmark runner, on the smallest model and for very short rounds."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.worker import Task


def test_backends_are_compared_in_processes_of_their_own() -> None:
    """A result per task, in order; a backend that cannot run is reported and does not stop the others."""
    tasks = [Task("lstm", "small", 1, backend) for backend in ("eager", "no_such_backend")]
    eager, failed = run.compare(tasks, rounds=3, round_s=0.01, threads=1)
    assert eager["backend"] == "eager"
    assert eager["rounds"] == 3
    assert eager["max_error"] == 0.0
    assert isinstance(eager["median_ms"], float)
    assert eager["median_ms"] > 0
    assert "no_such_backend" in str(failed["error"])
    assert "median_ms" not in failed


def test_results_are_written_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file holds the machine beside the figures; the table goes to standard output; a failure shows in the exit code."""

    def compare(tasks: Sequence[Task], *_: object) -> list[dict[str, object]]:
        results: list[dict[str, object]] = [
            dataclasses.asdict(task) | {"median_ms": 2.0, "compile_s": 1.0} for task in tasks
        ]
        return [*results[:-1], dataclasses.asdict(tasks[-1]) | {"error": "it broke"}]

    monkeypatch.setattr(run, "compare", compare)
    out = tmp_path / "below" / "results.json"
    assert run.main(["--models", "lstm", "--backends", "eager,hybrid,inductor", "--batch", "1", "--out", str(out)]) == 1
    record = json.loads(out.read_text())
    assert record["machine"]["versions"]["torch"]
    assert [result["backend"] for result in record["results"]] == ["eager", "hybrid", "inductor"]
    printed = capsys.readouterr()
    assert "| LSTM classifier | 1 | 2.00 | 2.00 | - | 1.00 | - | 1.0 s |" in printed.out
    assert "lstm, batch 1, inductor: it broke" in printed.err


@pytest.mark.parametrize("text", ["resnet51", ""])
def test_unknown_names_are_refused_with_the_legal_ones(text: str) -> None:
    """A misspelt model is an error, not an empty benchmark."""
    with pytest.raises(argparse.ArgumentTypeError, match="legal: resnet50, bert_base"):
        run._listed(["resnet50", "bert_base"])(text)
