"""Models in reduced precision for PyTorch's compilers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.bench.work_for_tests import rows, three_layers
from torch_hybrid_backend.bench.peers import Setting, add_peers_folder, by_name
from torch_hybrid_backend.bench.peers.pytorch import prepared, pt2e
from torch_hybrid_backend.partition.deviation import relative_error


@torch.no_grad()
def test_half_precision_is_autocast() -> None:
    """Autocast surrounds the call, so the compiler traces under it."""
    call = prepared(three_layers(), rows(), Setting(1, Path(), "bf16"), lambda model: model).call
    assert call()["logits"].dtype == torch.bfloat16


@torch.no_grad()
def test_a_quantized_graph_takes_arguments_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PT2E graph of torchao takes arguments by name. torchao may lie where workers alone look for it."""
    if why := by_name()["inductor"].missing("int8"):
        pytest.skip(why)
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_peers_folder()
    inputs = rows()
    found = inputs.call(pt2e(three_layers(), inputs, [rows(1)]))["logits"]
    error = relative_error(inputs.call(three_layers())["logits"], found)
    assert error is not None
    assert 1e-4 < error < 0.1
