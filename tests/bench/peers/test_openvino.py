"""OpenVINO beside eager, where it is installed."""

from __future__ import annotations

from pathlib import Path

from tests.bench.work_for_tests import measured


def test_a_model_with_named_arguments_and_outputs(tmp_path: Path) -> None:
    """Results equal eager's up to rounding, and the peer is timed."""
    result = measured("openvino", tmp_path)
    assert "gap" not in result, result
    assert result["rms_error"] < 1e-5
    assert result["median_ms"] > 0


def test_a_quantized_model(tmp_path: Path) -> None:
    """NNCF's quantizer, calibrated on other inputs, stays near eager."""
    result = measured("openvino", tmp_path, "int8")
    assert 1e-4 < result["rms_error"] < 0.1
