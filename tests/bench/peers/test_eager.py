"""Precisions of the eager peer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bench.work_for_tests import rows, three_layers
from torch_hybrid_backend.bench.peers import LacksError, Setting
from torch_hybrid_backend.bench.peers.eager import prepare
from torch_hybrid_backend.partition.deviation import relative_error


@pytest.mark.parametrize(
    ("precision", "executed", "tolerance"),
    [
        ("bf16", None, 0.01),
        ("fp16", None, 0.01),
        ("int8-weights", {"linear layers of 8 bits": 3}, 0.02),
        ("int4-weights", {"linear layers of 4 bits": 3}, 0.2),
    ],
)
@torch.no_grad()
def test_a_precision_is_what_runs(
    precision: str, executed: dict[str, int] | None, tolerance: float, tmp_path: Path
) -> None:
    """Errors against float32 show that the precision was used, and are no larger than it costs. The peer reports the converted layers."""
    model, inputs = three_layers(), rows()
    expected = inputs.call(model)["logits"]
    prepared = prepare(model, inputs, Setting(1, tmp_path, precision))
    error = relative_error(expected, prepared.call()["logits"])
    assert error is not None
    assert 1e-4 < error < tolerance
    assert prepared.report().get("executed") == executed


def test_what_it_lacks_is_refused(tmp_path: Path) -> None:
    """A precision that the peer lacks raises LacksError: nothing is computed in another precision."""
    with pytest.raises(LacksError, match="it has no int8 of its own; its times as written are shown"):
        prepare(three_layers(), rows(), Setting(1, tmp_path, "int8"))
