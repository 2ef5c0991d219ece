"""Figures of compressed models: they add up, and files are as small as they should be."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import compression


def test_the_record_has_a_row_for_each_setting(tmp_path: Path) -> None:
    """With 16 clusters a file takes an eighth, with 90% of zeros far less; a model as it is loses nothing."""
    compression.main(["--models", "gpt2", "--size", "small", "--out", str(tmp_path / "record")])
    rows = json.loads((tmp_path / "record").read_text())["results"]
    assert [row["setting"] for row in rows] == list(compression.SETTINGS)
    shares = [row["share"] for row in rows]
    assert rows[0]["output_difference"] == 0
    assert shares[0] > shares[1] > shares[2] > shares[3]
    assert shares[1] < 0.2
