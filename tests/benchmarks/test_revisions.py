"""Two revisions side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import revisions
from torch_hybrid_backend.bench.process import ROOT


def test_a_ratio_above_one_means_that_the_new_revision_is_better() -> None:
    """Old over new for every figure; the ratio of calls is that of the rounds; the last row has the geometric means."""
    result = {
        "model": "resnet50",
        "batch": 1,
        "call_ms": [20.0, 10.0],
        "call": 1.9,
        "compile_cold_s": [4.0, 8.0],
        "compile_warm_s": [1.0, 1.0],
        "preparing_mib": [100.0, 50.0],
        "running_mib": [100.0, 400.0],
    }
    twice = {**result, "call": 0.475}
    lines = revisions.report({"results": [result, twice], "overhead_us": [12.0, 10.0]}).splitlines()
    assert lines[2] == "| ResNet-50 | 1 | 20.000 | 10.000 | 1.900 | 0.500 | 1.000 | 2.000 | 0.250 |"
    assert lines[4] == "| geometric mean | | | | 0.950 | 0.500 | 1.000 | 2.000 | 0.250 |"
    assert lines[-1] == "Ten operators on four numbers: 12.00 us, now 10.00 us (1.200)."


@pytest.mark.full
def test_a_revision_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both trees run the model, are checked against eager, and have all figures."""
    out = tmp_path / "found.json"
    wanted = ["--models", "unet", "--batch", "1", "--size", "small", "--seconds", "0.4", "--rounds", "2"]
    once = ["--compilations", "1", "--processes", "1", "--out", str(out)]
    assert revisions.main([str(ROOT), *wanted, *once]) == 0
    assert "| U-Net | 1 |" in capsys.readouterr().out
    assert all(ratio > 0 for ratio in revisions.ratios(json.loads(out.read_text())["results"][0]).values())
