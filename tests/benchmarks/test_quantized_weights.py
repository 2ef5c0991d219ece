"""The benchmark of weights in 8 and 4 bits runs, and compares what it times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import quantized_weights

pytestmark = pytest.mark.full


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side has a record, whose outputs were about those of float64."""
    monkeypatch.setattr(quantized_weights, "_BYTES", 2 * 128 * 256 // 2)
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "records.json"
    arguments = ["--layers", "128x256", "--rows", "1", "5", "--budget-s", "0.1", "--out", str(out)]
    assert quantized_weights.main(arguments) == 0
    records = json.loads(out.read_text())["records"]
    assert [record["side"] for record in records[:5]] == [
        "hybrid float32",
        "hybrid int8",
        "hybrid int4",
        "hybrid clusters",
        "eager float32",
    ]
    assert len(records) == 2 * 9
    assert all(record["us"] > 0 and record["gain"] > 0 for record in records)
