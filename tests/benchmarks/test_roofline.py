"""The record of the machine's ceilings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import roofline


def test_kept_ceilings_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's file spares measuring."""
    file = tmp_path / "roofline.json"
    file.write_text(json.dumps({"peaks": [{"threads": 3, "gflops": 7.0, "gbytes": {"memory": {"read": 1.0}}}]}))
    monkeypatch.setattr(roofline, "path", lambda: file)
    assert roofline.known_peak(3).gflops == 7.0
