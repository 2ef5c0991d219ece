"""Whole models trained through the backend follow eager's loss curves."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks.training import CASES, OPTIMISERS
from tests.training import curves

_compile = functools.partial(torch.compile, backend="hybrid")


_full = pytest.mark.full
_RUNS = [
    pytest.param(
        name, optimiser, id=f"{name}-{optimiser}", marks=() if (name, optimiser) == ("torch_lstm", "sgd") else _full
    )
    for name in CASES
    for optimiser in OPTIMISERS
]


@pytest.mark.parametrize(("name", "optimiser"), _RUNS)
def test_fifty_steps_follow_eager(name: str, optimiser: str) -> None:
    """ResNet-18, GPT-2, both LSTMs and BERT, 50 steps of SGD with momentum and of AdamW. `torch.nn.LSTM` is a graph break."""
    torch.manual_seed(0)
    curves.compare(curves.recipe(CASES[name], optimiser), CASES[name].make("small").train(), _compile)


@pytest.mark.full
def test_torch_lstm_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.nn.LSTM` seen by the backend (`allow_rnn`), not run by eager around a graph break."""
    monkeypatch.setattr(torch._dynamo.config, "allow_rnn", True)
    torch.manual_seed(0)
    curves.compare(curves.recipe(CASES["torch_lstm"]), CASES["torch_lstm"].make("small").train(), _compile)


@pytest.mark.full
def test_dynamic_sizes() -> None:
    """Batches of varying size and length through one symbolic compilation."""
    torch.manual_seed(0)
    case = CASES["encoder"]
    how = curves.recipe(case)
    (tokens, targets), (others, labels) = how.batches
    varied = ((tokens, targets), (others[:5, :11], labels[:5]), (tokens[:3, :7], targets[:3]))
    compiled = functools.partial(torch.compile, backend="hybrid", dynamic=True)
    curves.compare(curves.Recipe(case, varied, how.optimiser, 30), case.make("small").train(), compiled)
