"""Training steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.bench.work_for_tests import measured
from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import Setting
from torch_hybrid_backend.bench.peers.training import prepared

_SETTING = Setting(1, Path(), training=True)


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.norm(self.layer(x)).square().sum())


def _same(model: nn.Module) -> nn.Module:
    return model


def test_a_step_gives_loss_and_gradients_and_can_be_taken_back() -> None:
    """Loss and gradients equal those of plain autograd, also under no_grad. `reset` restores parameters and running statistics."""
    torch.manual_seed(0)
    model, x = _WithLoss(), torch.randn(4, 3)
    expected = model(x).loss
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        step = prepared(model, Inputs((x,)), _SETTING, _same)
        found = step.call()
        assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])
        assert not torch.equal(model.layer.weight, before["layer.weight"])
        step.reset()
    torch.testing.assert_close(found, [expected.detach(), *gradients])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_outputs_without_a_loss_have_a_gradient_that_is_not_zero() -> None:
    """The loss of a softmax is no constant, as a plain sum would be."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
    _, weight, _ = prepared(model, Inputs((torch.randn(2, 3),)), _SETTING, _same).call()
    assert weight.abs().max() > 1e-3


def test_a_model_that_cannot_be_trained_is_refused() -> None:
    """A model without anything to train raises an error with the reason."""
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        prepared(nn.ReLU(), Inputs((torch.ones(2),)), _SETTING, _same)
    constant = nn.Linear(2, 2)
    constant.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no output of the model depends on a parameter"):
        prepared(constant, Inputs((torch.ones(2),)), _SETTING, _same).call()


@pytest.mark.full  # tests/bench/test_command.py has steps of training in `make test`; steps that differ from eager's have no figures there
def test_hybrid_trains_as_eager_does(tmp_path: Path) -> None:
    """Loss and gradients are compared with eager's before steps are timed."""
    result = measured("hybrid", tmp_path, training=True)
    assert result["rms_error"] < 1e-4
    assert result["median_ms"] > 0
