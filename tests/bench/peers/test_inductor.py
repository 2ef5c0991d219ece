"""PyTorch's own compiler beside eager, where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.work_for_tests import measured, rows, three_layers
from torch_hybrid_backend.bench.peers import LacksError, Setting
from torch_hybrid_backend.bench.peers.inductor import prepare


def test_a_model_with_named_arguments_and_outputs(tmp_path: Path) -> None:
    """Its results are eager's but for rounding, and it is timed."""
    result = measured("inductor", tmp_path)
    assert "gap" not in result, result
    assert result["rms_error"] < 1e-5
    assert result["median_ms"] > 0


def test_what_it_lacks_is_refused(tmp_path: Path) -> None:
    """Never computed in another precision without a word."""
    with pytest.raises(LacksError, match="see inductor, freezing"):
        prepare(three_layers(), rows(), Setting(1, tmp_path, "int8"))
