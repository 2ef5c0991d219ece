"""The criterion itself tells a mistake from rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.training import CASES
from tests.training import curves


def _wrong(model: nn.Module, factor: float) -> Callable[[torch.Tensor], object]:
    """Eager, with every gradient of the last matrix of weights off by `factor`."""
    weight = [parameter for parameter in model.parameters() if parameter.dim() > 1][-1]
    weight.register_hook(lambda gradient: gradient * factor)
    return model


@pytest.mark.parametrize("name", ["torch_lstm", "encoder"])
def test_a_wrong_gradient_is_told_from_rounding(name: str) -> None:
    """A weight's gradient off by 1% fails the check; none off passes it."""
    torch.manual_seed(0)
    model = CASES[name].make("small").train()
    how = curves.recipe(CASES[name], "sgd", steps=10)
    reference = curves.in_float64(how, model)
    eager = curves.eager_distance(how, model, reference)
    for factor, right in ((1.0, True), (1.01, False)):
        trained = copy.deepcopy(model)
        run = curves.train(how, trained, _wrong(trained, factor))
        assert curves.is_same_training(run, reference, eager) is right
