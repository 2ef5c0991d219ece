"""Inductor beside eager."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.work_for_tests import measured, rows, three_layers
from torch_hybrid_backend.bench.peers import LacksError, Setting
from torch_hybrid_backend.bench.peers.inductor import prepare


@pytest.mark.full
def test_a_model_with_named_arguments_and_outputs(tmp_path: Path) -> None:
    """Results equal eager's up to rounding, and the peer is timed."""
    result = measured("inductor", tmp_path)
    assert "gap" not in result, result
    assert result["rms_error"] < 1e-5
    assert result["median_ms"] > 0


def test_what_it_lacks_is_refused(tmp_path: Path) -> None:
    """A precision that the peer lacks raises LacksError: nothing is computed in another precision."""
    with pytest.raises(LacksError, match="see inductor, freezing"):
        prepare(three_layers(), rows(), Setting(1, tmp_path, "int8"))
