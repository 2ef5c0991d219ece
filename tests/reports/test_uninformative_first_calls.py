"""Reduced precision is judged on inputs that show its errors: not on zeros, padding or an empty prompt."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.driver import hybrid_graph, precision_accuracy_check


class _Outliers(nn.Module):
    """A layer that int8 gets wrong for inputs with one large channel, which it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.layer = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            self.embedding.weight[0] = 0.0
            self.layer.weight[:, 7] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            x = self.embedding(x)
        return self.layer(x)


def _real(rows: int = 32) -> torch.Tensor:
    x = torch.randn(rows, 64)
    x[:, 7] = 1e4
    return x


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return _Outliers().eval()


@pytest.fixture(params=["int8", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.fault(
    "a first call in reduced precision whose inputs show no error: zeros, one value everywhere, an empty batch",
    "the first later call whose inputs vary is compared with the model as written, as a first call would be",
)
@pytest.mark.parametrize("first", [torch.zeros(32, 64), torch.ones(32, 64), torch.zeros(32, 64)[:0]])
def test_real_data_after_a_first_call_that_shows_nothing(
    model: nn.Module, first: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """int8 is off by 0.9 on real data, which a first call on zeros cannot show: the layer returns in the call that does."""
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        compiled = torch.compile(model, backend="hybrid", dynamic=True, options={"precision": "int8"})
        compiled(first)
        assert "computed as written" not in caplog.text
        for _ in range(3):
            x = _real()
            assert _error(compiled(x), model(x)) < 0.05
    assert caplog.text.count("these layers are computed as written from now on") == 1


def test_padding_before_a_prompt(model: nn.Module) -> None:
    """Token 0 alone is padding; tokens that differ are judged."""
    model.embedding.weight.data[1:, 7] = 1e4
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", options={"precision": "int8"})
        compiled(torch.zeros(4, 16, dtype=torch.long))
        tokens = torch.randint(1, 50, (4, 16))
        assert _error(compiled(tokens), model(tokens)) < 0.05


def test_a_layer_that_only_later_inputs_reach(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch that the first call masks with zeros is judged when it is reached, and nothing is compared after that."""
    compared: list[object] = []
    deviation = precision_accuracy_check._deviation

    def counted(*args: object) -> object:
        compared.append(args)
        return deviation(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(precision_accuracy_check, "_deviation", counted)
    torch.manual_seed(0)
    one, other = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return one(x) + other(x.sigmoid() * weight)

    options = {"precision": precision}
    with torch.no_grad():
        compiled = torch.compile(function, backend="hybrid", options=options)
        x, weight = torch.randn(64, 64), torch.zeros(64, 64)
        compiled(x, weight)
        for _ in range(hybrid_graph._MAX_CHECKS * 2):
            compiled(x, weight)
        first = len(compared)
        assert first > 1  # a few later calls were looked at, in vain
        for _ in range(70):
            compiled(x, torch.ones(64, 64))
        assert len(compared) == first + 1


def test_explain_says_what_the_check_saw(model: nn.Module) -> None:
    """`explain` names the layers of which nothing is known yet."""
    with torch.no_grad():
        explained = torch_hybrid_backend.explain(model, torch.zeros(32, 64), options={"precision": "int8"})
        (plan,) = explained.plans
        assert plan.conversion is not None
        assert len(plan.conversion.unseen) == 1
        assert f"nothing is known yet of the error of {plan.conversion.unseen[0]}" in str(explained)
        seen = torch_hybrid_backend.explain(model, torch.randn(32, 64), options={"precision": "int8"})
        assert seen.plans[0].conversion is not None
        assert seen.plans[0].conversion.unseen == ()
        assert "nothing is known yet" not in str(seen)
