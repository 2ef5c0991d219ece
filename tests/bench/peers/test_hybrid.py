"""This package as a peer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bench.work_for_tests import rows, three_layers
from torch_hybrid_backend.bench.peers import Setting
from torch_hybrid_backend.bench.peers.hybrid import prepare
from torch_hybrid_backend.partition.deviation import relative_error


@pytest.mark.parametrize(
    ("precision", "executed", "tolerance"),
    [
        ("int8", {"int8": 3}, 0.05),
        ("int4-weights", {"int4": 2}, 0.2),  # a small layer gains nothing
    ],
)
@torch.no_grad()
def test_a_precision_is_what_runs(precision: str, executed: dict[str, int], tolerance: float, tmp_path: Path) -> None:
    """Each precision is used, also if arguments are given by name. The peer reports the converted operators and the plan's coverage."""
    model, inputs = three_layers(), rows()
    expected = inputs.call(model)["logits"]
    calibration = [rows(seed) for seed in range(1, 5)]
    prepared = prepare(model, inputs, Setting(1, tmp_path, precision, calibration, precision_tolerance=1.0))
    error = relative_error(expected, prepared.call()["logits"])
    assert error is not None
    assert 1e-4 < error < tolerance
    report = prepared.report()
    assert report["executed"] == executed
    assert report["graphs"] == 1
