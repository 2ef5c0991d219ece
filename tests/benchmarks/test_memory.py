"""The benchmark of memory: what a process measures of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import memory
from benchmarks.catalogue import MODELS


def test_figures_of_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way runs in a process of its own; the peaks are no less than what is resident before, and ratios are to eager's."""
    monkeypatch.setattr(memory, "_WAYS", {"eager": ("", {}), "dynamo": ("aot_eager", {})})
    out = tmp_path / "memory.json"
    assert memory.main(["--models", "lstm", "--out", str(out), "--cache", str(tmp_path)]) == 0
    eager, dynamo = json.loads(out.read_text())["rows"]
    assert "lstm" in MODELS
    for row in (eager, dynamo):
        assert 0 < row["weights"] < row["built"] <= row["first"]
        assert row["steady"] > row["weights"]
    assert max(eager["first_ratio"], eager["steady_ratio"]) == 1
    assert dynamo["steady_ratio"] > 1
    assert "| lstm | dynamo |" in capsys.readouterr().out
