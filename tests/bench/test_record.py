"""What is told of figures: who is faster, and what hinders a comparison."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from torch_hybrid_backend.bench.record import Group, Record
from torch_hybrid_backend.bench.worker import Facts

MACHINE = {"cpu": "EPYC", "threads": 2, "capability": "AVX2", "versions": {"torch": "2.13"}, "day": "2026-11-28"}


def result(peer: str, median_ms: float, **more: Any) -> dict[str, Any]:
    """A result with figures."""
    figures = {"spread_ms": 0.1, "first_call_s": 1.5, "preparing_mib": 300.0, "running_mib": 200.0, "other_load": 0.0}
    return {"peer": peer, "batch": 8, "median_ms": median_ms, "rms_error": 1e-7, "max_error": 0.0, **figures, **more}


def group(*results: dict[str, Any], facts: Facts | None = None) -> Group:
    """The results of batch 8."""
    return Group(8, "float32", facts or Facts(0, 8, was_training=False), results)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (
            {"eager": 20.0, "hybrid": 10.0, "openvino": 11.0},
            ["hybrid is fastest: 1.10x OpenVINO; 2.00x eager."],
        ),
        (
            {"eager": 20.0, "hybrid": 10.0, "openvino": 9.3},
            ["OpenVINO is faster: hybrid has 0.93x its speed.", "hybrid is faster than the others: 2.00x eager."],
        ),
        ({"hybrid": 10.0, "openvino": 10.1}, ["OpenVINO and hybrid are equally fast."]),
        ({"eager": 10.0}, ["hybrid has no result, so nothing can be compared with it."]),
        ({"hybrid": 10.0}, ["No other runtime has a result."]),
    ],
)
def test_who_is_faster_is_said_plainly(times: dict[str, float], expected: list[str]) -> None:
    """Also where it is another."""
    assert group(*(result(peer, ms) for peer, ms in times.items())).verdicts == expected


def test_notes() -> None:
    """Other load, training mode and random numbers."""
    facts = Facts(0, 8, was_training=True, is_random=True)
    noted = group(result("hybrid", 1.0, other_load=0.5), result("eager", 2.0), facts=facts).notes
    assert any(note.startswith("hybrid: measured beside other load, so it may be far off.") for note in noted)
    assert any("training mode" in note for note in noted)
    assert any("random numbers" in note for note in noted)
    assert group(result("hybrid", 1.0)).notes == []


def test_json_has_rows_of_figures_and_reasons() -> None:
    """One dict a row; no NaN, which JSON has not."""
    gap = {"peer": "zentorch", "batch": 8, "gap": "not installed: pip install zentorch"}
    found = group(result("hybrid", 10.0, max_error=math.nan), result("eager", 20.0), gap)
    record = Record("m:f", False, MACHINE, {"rounds": 5}, [found])
    written = json.loads(json.dumps(record.as_json(), allow_nan=False))
    ours, eager, missing = written["results"]
    assert (ours["speedup"], ours["max_error"], ours["precision"], ours["batch"]) == (2.0, None, "as-written", 8)
    assert eager["speedup"] == 1.0
    assert missing["gap"] == "not installed: pip install zentorch"
    assert written["groups"][0]["verdicts"] == ["hybrid is fastest: 2.00x eager."]
