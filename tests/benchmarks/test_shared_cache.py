"""The second user of a shared cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import shared_cache


def test_ratios_are_over_the_warm_start_of_the_same_model() -> None:
    """Figures are medians; of compilations the most counts, as there must be none."""

    def row(model: str, cache: str, *calls: float, compiled: int = 0) -> dict[str, object]:
        return {
            "model": model,
            "cache": cache,
            "runs": [{"call_s": call, "process_s": 4 * call, "compiled": compiled} for call in calls],
        }

    rows = [row("a", "warm start", 1.0, 9.0, 2.0), row("a", "signed URL", 3.0, compiled=1), row("b", "warm start", 4.0)]
    lines = shared_cache.report({"results": rows}).splitlines()
    assert lines[2:] == [
        "| a | warm start | 0 | 2.000 | 1.00 | 8.00 | 1.00 |",
        "| a | signed URL | 1 | 3.000 | 1.50 | 12.00 | 1.50 |",
        "| b | warm start | 0 | 4.000 | 1.00 | 16.00 | 1.00 |",
    ]


@pytest.mark.full
def test_nothing_is_compiled(tmp_path: Path) -> None:
    """Neither in a warm start, nor with a cache of any kind behind an empty one."""
    out = tmp_path / "found.json"
    assert shared_cache.main(["--models", "bert_base", "--size", "small", "--processes", "1", "--out", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert len(results) == 4
    assert all(run["compiled"] == 0 for result in results for run in result["runs"])
