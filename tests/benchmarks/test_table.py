"""Benchmark results as Markdown."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import table

_RECORD: dict[str, Any] = {
    "machine": {
        "cpu": "A CPU",
        "cores": 2,
        "threads": 2,
        "capability": "AVX512",
        "versions": {"torch": "2.13.0"},
        "day": "2026-01-01",
    },
    "results": [
        {"model": "resnet50", "batch": 1, "backend": "eager", "median_ms": 30.0, "compile_s": 0.0},
        {"model": "resnet50", "batch": 1, "backend": "hybrid", "median_ms": 20.0, "compile_s": 4.25},
        {"model": "resnet50", "batch": 1, "backend": "inductor", "error": "results differ from eager's"},
    ],
}


def test_a_row_has_times_ratios_and_compile_time() -> None:
    """A ratio is the other backend's time over ours; what failed is a dash in both places."""
    assert table.markdown(_RECORD).splitlines()[-1] == "| ResNet-50 | 1 | 30.0 | 20.0 | - | 1.50 | - | 4.2 s |"


def test_the_caption_names_machine_and_versions() -> None:
    """Figures never stand without what they were taken on."""
    caption = table.markdown(_RECORD).splitlines()[0]
    assert all(part in caption for part in ("A CPU", "2 cores", "AVX512", "torch 2.13.0", "2026-01-01"))


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    """Rewriting twice is rewriting once."""
    text = f"before\n{table.START}\nold\n{table.END}\nafter\n"
    once = table.with_results(text, [_RECORD])
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert table.with_results(once, [_RECORD]) == once


def test_a_file_without_markers_is_refused() -> None:
    """Nothing is written where the table has no place."""
    with pytest.raises(ValueError, match="markers"):
        table.with_results("no markers", [_RECORD])
