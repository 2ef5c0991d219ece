"""The page of the catalogue: what counts as slower, wrong and unexplained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ecosystem import report


def _entry(**changed: Any) -> dict[str, Any]:
    right = {
        "name": "recommender/dlrm",
        "wrong": "",
        "faults": [],
        "parameters": 1_400_000,
        "graphs": 1,
        "operators": 40,
        "in_regions": 30,
        "compile_s": 2.5,
        "eager_ms": 3.0,
        "hybrid_ms": 1.5,
        "day": "2026-11-22",
        "revision": "abc",
    }
    return {**right, **changed}


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "right"),
        ({"hybrid_ms": 3.05}, "right"),  # within what two timings of one function differ
        ({"hybrid_ms": 3.5}, "slower"),
        ({"wrong": "seed 1: output 0", "hybrid_ms": 3.5}, "wrong"),
        ({"raises": "ValueError: no"}, "raises"),
        ({"eager_ms": None, "hybrid_ms": None}, "right"),
    ],
)
def test_the_worst_is_the_verdict(changed: dict[str, Any], verdict: str) -> None:
    """A model that raises or is wrong is not merely slow; one that was not timed is not slow."""
    entry = _entry(**changed)
    assert report.verdict(entry) == verdict
    assert report.unexplained(entry) == (verdict != "right")


def test_a_warning_needs_a_reason() -> None:
    """A model that is right although a region failed does not go unnoticed."""
    assert report.unexplained(_entry(faults=["region r0 cannot run on tvm: runtime_error"]))


def test_the_table_has_a_row_for_each_model() -> None:
    """Figures of one that ran, the error of one that raised, and what all come to."""
    lines = report.table([_entry(), _entry(name="recommender/deep_fm", raises="ValueError: a | b")]).splitlines()
    assert lines[2] == "| recommender/dlrm | 1.4 | right | 2.00 | 3 | 2.5 | 1 | 75% |  |"
    assert lines[3].endswith("| ValueError: a \\| b |")
    assert lines[-1] == "2 models: 1 right, 1 raises. Geometric mean of the speed over eager: 2.00."
