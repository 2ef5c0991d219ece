"""The picture of a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import picture

_MACHINE = {"cpu": "A CPU", "threads": 2, "capability": "AVX512"}


def _record(*results: tuple[str, int, str, float]) -> dict[str, Any]:
    keys = ("model", "batch", "peer", "median_ms")
    return {"machine": _MACHINE, "results": [dict(zip(keys, result, strict=True)) for result in results]}


def test_a_panel_for_each_batch(tmp_path: Path) -> None:
    """Models are named at the side, batch sizes above, peers below; a peer without a result of a model has no mark there."""
    pytest.importorskip("matplotlib")
    record = _record(
        ("lstm", 1, "eager", 2.0), ("lstm", 1, "hybrid", 1.0), ("unet", 8, "eager", 4.0), ("unet", 8, "other", 1.0)
    )
    assert picture.draw(record, tmp_path / "below" / "zoo.svg") == ""
    drawn = (tmp_path / "below" / "zoo.svg").read_text()
    picture.draw(record, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn
    for text in ("LSTM classifier", "U-Net", "batch 1", "batch 8", "hybrid", "other", "A CPU"):
        assert f"<!-- {text}" in drawn  # how the library notes what the outlines spell


def test_every_record_has_its_picture_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command draws all machines' records; one without figures is an error."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(picture, "RESULTS", tmp_path)
    for machine in "ab":
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "zoo.json").write_text(json.dumps(_record(("lstm", 1, "eager", 2.0))))
    assert picture.main() == 0
    assert all((tmp_path / machine / "zoo.svg").exists() for machine in "ab")
    (tmp_path / "b" / "zoo.json").write_text(json.dumps(_record(("lstm", 1, "hybrid", 2.0))))
    assert picture.main() == 1


def test_without_eager_there_is_nothing_to_draw(tmp_path: Path) -> None:
    """Speeds are shown over eager's: a run without it has no picture, and says so."""
    pytest.importorskip("matplotlib")
    assert "nothing to draw" in picture.draw(_record(("lstm", 1, "hybrid", 1.0)), tmp_path / "zoo.svg")
    assert not (tmp_path / "zoo.svg").exists()


def test_speeds_below_float32_are_over_eager_in_float32() -> None:
    """Eager in another precision is often slower than in float32: nobody wants it as a measure."""
    record = _record(("lstm", 1, "eager_float32", 2.0), ("lstm", 1, "eager", 8.0), ("lstm", 1, "hybrid", 1.0))
    assert picture._speeds(record, 1) == {"lstm": {"eager_float32": 1.0, "eager": 0.25, "hybrid": 2.0}}
