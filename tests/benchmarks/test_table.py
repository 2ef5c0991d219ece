"""Benchmark results as Markdown."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import results, table

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
        {"model": "resnet50", "batch": 1, "peer": "eager", "median_ms": 30.0, "compile_cold_s": 0.0},
        {"model": "resnet50", "batch": 1, "peer": "hybrid", "median_ms": 20.0, "compile_cold_s": 4.25},
        {"model": "resnet50", "batch": 1, "peer": "inductor", "gap": "wrong answer"},
    ],
}


_INT8: dict[str, Any] = {
    "machine": _RECORD["machine"] | {"peak_gflops": 900.0},
    "settings": {"precision": "int8"},
    "results": [
        {"model": "resnet50", "batch": 1, "peer": peer, "median_ms": ms, "precision": precision, "gflop": 9.0, **more}
        for peer, ms, precision, more in (
            ("eager_float32", 60.0, "float32", {"rms_error": 0.0}),
            ("hybrid_float32", 8.0, "float32", {"rms_error": 1e-6}),
            ("hybrid", 10.0, "int8", {"rms_error": 0.0312}),
            ("openvino", 12.0, "int8", {"rms_error": 0.052, "executed": {"i8": 53, "f32": 1}}),
        )
    ],
}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_has_times_and_the_ratio_to_the_best() -> None:
    """A ratio is the other's time over ours; a gap is a dash."""
    rows = [_cells(line) for line in table.latency(_RECORD).splitlines() if line.startswith("| ResNet-50")]
    assert rows == [["ResNet-50", "1", "30.0", "20.0", "-", "1.50"]]


def test_standings() -> None:
    """Against each peer, and against the best: rows with both, geometric mean of the ratios, share ahead."""
    slower = [{**r, "batch": 8, "median_ms": ms} for r, ms in zip(_RECORD["results"], (30.0, 60.0), strict=False)]
    record = {**_RECORD, "results": _RECORD["results"] + slower}
    rows = [_cells(line) for line in table.standings(record).splitlines()[2:]]
    assert rows == [
        ["eager", "2", "0.87", "50%"],
        ["inductor", "0", "-", "-"],
        ["the best of each row", "2", "0.87", "50%"],
    ]


def test_columns_line_up() -> None:
    """The tables are read on terminals as well."""
    assert len({len(line) for line in table.details(_RECORD).splitlines()}) == 1


def test_details_have_a_row_for_every_result() -> None:
    """A dash stands for a value that was not measured; a gap has its reason instead of a row."""
    rows = [_cells(row)[2:6] for row in table.details(_RECORD).splitlines()[2:]]
    assert rows == [["eager", "30", "1.50", "-"], ["hybrid", "20", "1.00", "-"]]
    assert table.gaps(_RECORD) == "- inductor: wrong answer (ResNet-50 1)"


def test_the_caption_names_machine_and_versions() -> None:
    """Figures never stand without what they were taken on."""
    caption = table.latency(_RECORD).splitlines()[0]
    assert all(part in caption for part in ("A CPU", "2 cores", "AVX512", "torch 2.13.0", "2026-01-01"))


def test_the_summary_has_a_column_for_each_peer() -> None:
    """Hybrid stands first; the fastest other peer is never eager; a model that was not measured has no row."""
    quick = {"model": "resnet50", "batch": 1, "peer": "openvino", "median_ms": 25.0}
    slow = {"model": "resnet50", "batch": 1, "peer": "onnxruntime", "median_ms": 90.0}
    shown = table.summary({**_RECORD, "results": [*_RECORD["results"], quick, slow]})
    header, _, *rows = [_cells(line) for line in shown.splitlines() if line.startswith("|")]
    assert header[1:4] == ["hybrid", "eager", "inductor"]
    assert rows == [["ResNet-50", "20.0", "30.0", "-", "25.0", "90.0", "1.50", "1.25"]]
    assert "A CPU" in shown.splitlines()[-1]


def test_the_summary_is_of_one_record() -> None:
    """The record with the most cells of the summary is shown; of equals the newest."""
    whole = {**_RECORD, "machine": {**_RECORD["machine"], "cpu": "Old"}}
    newer = {**_RECORD, "machine": {**_RECORD["machine"], "cpu": "New", "day": "2026-03-01"}}
    newest = {
        **newer,
        "machine": {**newer["machine"], "cpu": "Newest", "day": "2026-04-01"},
        "results": _RECORD["results"][:1],
    }
    text = table.with_results("<!-- summary:start -->\nold\n<!-- summary:end -->\n", [whole, newer, newest])
    assert "New," in text
    assert "Old" not in text
    assert "Newest" not in text


def test_below_float32_a_row_has_errors_and_baselines() -> None:
    """A time stands with how far its results are off; float32 is a baseline, never the best of the others."""
    [row] = [_cells(line) for line in table.latency(_INT8).splitlines() if line.startswith("| ResNet-50")]
    assert row == ["ResNet-50", "1", "60.0", "8.00", "10.0 (3.1%)", "12.0 (5.2%)", "1.20"]
    caption = table.latency(_INT8).splitlines()[0]
    assert "peak 900 GFLOP/s measured; int8;" in caption
    assert "In brackets" in caption
    standings = [_cells(row) for row in table.standings(_INT8).splitlines()[2:]]
    assert [row[::2] for row in standings] == [
        ["eager, float32", "6.00"],
        ["hybrid, float32", "0.80"],
        ["OpenVINO", "1.20"],
        ["the best of each row", "1.20"],
    ]
    assert table.executed(_INT8) == "- OpenVINO ran 53 i8, 1 f32 (ResNet-50 1)"
    shares = [results.peak_share(_INT8, result) for result in _INT8["results"]]
    assert shares == [None, None, 1.0, pytest.approx(0.83, abs=0.01)]  # the peak is of integers


def test_precisions_have_a_place_of_their_own() -> None:
    """Tables of float32 and of the other precisions are never mixed; a place that nothing was measured for stays as it is."""
    text = "<!-- benchmarks:start -->\nold\n<!-- benchmarks:end -->\n<!-- precisions:start -->\nold\n<!-- precisions:end -->\n"
    both = table.with_results(text, [_RECORD, _INT8])
    assert both.index("; float32; ") < both.index("benchmarks:end") < both.index("; int8; ")
    assert both.count("| ResNet-50") == 2
    assert table.with_results(text, [_RECORD]).endswith("<!-- precisions:start -->\nold\n<!-- precisions:end -->\n")


@pytest.mark.parametrize("name", ["summary", "benchmarks"])
def test_only_what_stands_between_the_markers_is_replaced(name: str) -> None:
    """Rewriting twice is rewriting once."""
    text = f"before\n<!-- {name}:start -->\nold\n<!-- {name}:end -->\nafter\n"
    once = table.with_results(text, [_RECORD])
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert table.with_results(once, [_RECORD]) == once


def test_a_file_without_markers_is_refused() -> None:
    """Nothing is written where the table has no place."""
    with pytest.raises(ValueError, match="markers"):
        table.with_results("no markers", [_RECORD])


def test_the_caption_says_when_each_row_was_measured() -> None:
    """Rows measured later carry their own day and revision; what an older file does not tell is unknown."""
    [eager, *rest] = _RECORD["results"]
    record = {**_RECORD, "results": [{**eager, "day": "2026-02-03", "revision": "abc"}, *rest]}
    assert "; 2026-01-01 to 2026-02-03, revision abc, unknown. Median" in table.latency(record)
