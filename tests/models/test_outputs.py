"""Every model of the zoo gives eager's results through the backend.

Small configurations (same operators, few layers). The judge is `torch._dynamo.utils.same`, as in PyTorch's own benchmarks:
within 1e-4 of eager, or no further from a float64 run than twice (small outputs: three times) what eager is.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import same

from benchmarks.models import ZOO, tensors


def _assert_same(compiled: nn.Module, model: nn.Module, exact: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """`compiled(*inputs)` is as close to `exact` (`model` in float64) as `model` is, and has its type and dtypes."""
    reference = model(*inputs)
    result = compiled(*inputs)
    double = exact(*(value.double() if value.is_floating_point() else value for value in inputs))
    assert type(result) is type(reference)
    assert same(tensors(reference), tensors(result), tensors(double))


# By default batches of several for a model of each kind alone: attention, recurrent, convolutions. Their kernels are others, and compiled anew;
# those of batch 1 are shared with other tests of models.
_SEVERAL = ("vit_b16", "lstm", "unet")
_CASES = [
    pytest.param(name, batch, marks=() if batch == 1 or name in _SEVERAL else pytest.mark.full)
    for name in ZOO
    for batch in (1, 8)
]


@pytest.mark.parametrize(("name", "batch"), _CASES)
def test_outputs_equal_eager(name: str, batch: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No region falls back, and the first call (checked, in Python) and the second (the swapped-in plan) equal eager's.

    The calls have different inputs, so that nothing computed in the first may be left in the second.
    """
    monkeypatch.setenv("HYBRID_STRICT", "1")
    entry = ZOO[name]
    model = entry.build("small")
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for seed in (1, 2):
            _assert_same(compiled, model, exact, entry.inputs("small", batch, seed=seed))


# Convolutions are timed by the first programs of README.md and of the tutorial, too.
@pytest.mark.parametrize("name", [pytest.param("mobilenet_v2", marks=pytest.mark.full), "minilm"])
def test_measured_placement_equals_eager(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever mixture of engines the timings choose, results are eager's."""
    monkeypatch.setenv("HYBRID_PLACEMENT", "measure")
    monkeypatch.setenv("HYBRID_MEASURE_BUDGET_S", "0.02")
    entry = ZOO[name]
    model = entry.build("small")
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for seed in (1, 2):
            _assert_same(compiled, model, exact, entry.inputs("small", batch=2, seed=seed))


@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
def test_updated_weights_are_seen(name: str, backend: str) -> None:
    """Weights loaded into a compiled model count from the next call on, folded batch norms and packed matrices included."""
    entry = ZOO[name]
    model = entry.build("small", seed=0)
    other = entry.build("small", seed=7)
    inputs = entry.inputs("small", batch=2)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(*inputs)
        compiled(*inputs)
        model.load_state_dict(other.state_dict())
        _assert_same(compiled, other, copy.deepcopy(other).double(), inputs)


@pytest.mark.parametrize("allow_rnn", [False, True], ids=["skipped_by_dynamo", "traced"])
def test_torch_lstm_equals_eager(allow_rnn: bool, backend: str) -> None:
    """A model around `torch.nn.LSTM`, which dynamo runs outside any graph by default, gives eager's results."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(8, 16, num_layers=2, batch_first=True), "head": nn.Linear(16, 3)})

    def classify(x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model["head"](model["lstm"](x)[0][:, -1])
        return logits

    x = torch.randn(4, 6, 8)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=allow_rnn):
        torch.testing.assert_close(torch.compile(classify, backend=backend)(x), classify(x))
