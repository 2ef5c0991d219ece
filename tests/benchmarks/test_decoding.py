"""The benchmark of decoding runs, and its figures hang together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import decoding

pytestmark = pytest.mark.full


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side has a row, each in a process of its own; packed weights take the share of float32's bytes that the goal allows."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "decoding.json"
    sides = ["eager float32", "hybrid int8", "aten int4"]
    arguments = ["--layers", "1", "--cache", "64", "--budget-s", "0.2", "--out", str(out), "--sides", *sides]
    assert decoding.main(arguments) == 0
    eager, ours, aten = rows = json.loads(out.read_text())["results"]
    assert [row["side"] for row in rows] == sides
    assert all(row["ms"] > 0 and row["share_of_bandwidth"] > 0 for row in rows)
    assert eager["error"] < 1e-4
    assert ours["error"] < 0.1
    assert aten["error"] < 0.5
    assert 0.25 < ours["kept_over_float32"] <= 0.27
    assert eager["weights_mb"] == pytest.approx(
        4 * 1e-6 * (2048 * (2 * 2048 + 2 * 256 + 3 * 5632) + 2048 * 32000), abs=0.1
    )
