"""AMD's plugin beside eager, where it is installed."""

from __future__ import annotations

from pathlib import Path

from tests.bench.work_for_tests import measured


def test_a_model_with_named_arguments_and_outputs(tmp_path: Path) -> None:
    """Results equal eager's up to rounding, and the peer is timed."""
    result = measured("zentorch", tmp_path)
    assert "gap" not in result, result
    assert result["rms_error"] < 1e-5
    assert result["median_ms"] > 0
