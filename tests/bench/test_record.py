"""Verdicts and notes about figures."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from torch_hybrid_backend.bench.record import Group, Record, milliseconds
from torch_hybrid_backend.bench.worker import Facts

MACHINE = {"cpu": "EPYC", "threads": 2, "capability": "AVX2", "versions": {"torch": "2.13"}, "day": "2026-11-28"}


def result(peer: str, median_ms: float, **more: Any) -> dict[str, Any]:
    """A result with figures."""
    figures = {
        "spread_ms": 0.1,
        "rounds": 5,
        "first_call_s": 1.5,
        "preparing_mib": 300.0,
        "running_mib": 200.0,
        "other_load": 0.0,
    }
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
    """The verdict names the faster runtime, also if hybrid is slower."""
    assert group(*(result(peer, ms) for peer, ms in times.items())).verdicts == expected


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [
        (
            (19.9, 14.5),
            (14.1, 3.97),
            "not decided: hybrid against OpenVINO: 5.80 ms apart, with spreads of 14.5 and 3.97 ms.",
        ),
        (
            (10.0, 0.4),
            (10.1, 0.4),
            "not decided: hybrid against OpenVINO: 0.100 ms apart, with spreads of 0.400 and 0.400 ms.",
        ),
        ((8.5, 9.98), (624.0, 12.0), "hybrid is fastest: at least 45.81x OpenVINO."),
        ((624.0, 12.0), (8.5, 9.98), "OpenVINO is faster: hybrid has at most 0.022x its speed."),
        ((10.0, 0.2), (12.0, 0.2), "hybrid is fastest: 1.20x OpenVINO."),
    ],
)
def test_who_is_faster_is_decided_by_more_than_the_spreads(
    ours: tuple[float, float], other: tuple[float, float], expected: str
) -> None:
    """A runtime is faster only beyond the sum of the spreads. Ratios that spreads may change are shown by their bound."""
    both = (result(peer, ms, spread_ms=spread) for peer, (ms, spread) in (("hybrid", ours), ("openvino", other)))
    assert group(*both).verdicts == [expected]


def test_one_round_decides_nothing() -> None:
    """With one round there is no spread, so nothing is decided."""
    found = group(result("hybrid", 1.0, rounds=1), result("eager", 2.0, rounds=1)).verdicts
    assert found == ["not decided: one round tells nothing of the spread; leave --rounds at 5."]


def test_other_load_stands_with_the_verdict() -> None:
    """The verdict itself says that other load disturbed the figures."""
    found = group(result("hybrid", 1.0), result("eager", 4.0, other_load=0.5)).verdicts
    assert found == ["hybrid is fastest: 4.00x eager, measured beside other load."]


def test_milliseconds() -> None:
    """Short times have more digits."""
    assert [milliseconds(value) for value in (0.12345, 1.2345, 123.45)] == ["0.123", "1.23", "123.5"]


def test_notes() -> None:
    """Notes tell of other load, training mode and random numbers."""
    facts = Facts(0, 8, was_training=True, is_random=True)
    noted = group(result("hybrid", 1.0, other_load=0.5), result("eager", 2.0), facts=facts).notes
    assert any(note.startswith("hybrid: measured beside other load, so it may be far off.") for note in noted)
    assert any("training mode" in note for note in noted)
    assert any("random numbers" in note for note in noted)
    assert group(result("hybrid", 1.0)).notes == []


def test_json_has_rows_of_figures_and_reasons() -> None:
    """Each row is a dict. NaN, which JSON lacks, becomes null."""
    gap = {"peer": "zentorch", "batch": 8, "gap": "not installed: pip install zentorch"}
    found = group(result("hybrid", 10.0, max_error=math.nan), result("eager", 20.0), gap)
    record = Record("m:f", False, MACHINE, {"rounds": 5}, [found])
    written = json.loads(json.dumps(record.as_json(), allow_nan=False))
    ours, eager, missing = written["results"]
    assert (ours["speedup"], ours["max_error"], ours["precision"], ours["batch"]) == (2.0, None, "as-written", 8)
    assert eager["speedup"] == 1.0
    assert missing["gap"] == "not installed: pip install zentorch"
    assert written["groups"][0]["verdicts"] == ["hybrid is fastest: 2.00x eager."]
