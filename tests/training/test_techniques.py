"""Techniques of training loops around the model: each follows eager's loss curve on a small model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.networks import SmallCnn, SmallTransformer
from benchmarks.training import OPTIMISERS, Batch, Forward, TrainingCase
from tests.training import curves
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan

_compile = functools.partial(torch.compile, backend="hybrid")
_STEPS = 12


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


def _classify(forward: Forward, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(forward(inputs).float(), targets)


def _recipe(model: nn.Module, **changes: object) -> curves.Recipe:
    torch.manual_seed(1)
    inputs: Callable[[], torch.Tensor] = (
        (lambda: torch.randn(8, 3, 16, 16)) if isinstance(model, SmallCnn) else lambda: torch.randint(0, 100, (8, 12))
    )
    batches = tuple((inputs(), torch.randint(0, 10, (8,))) for _ in range(2))
    case = TrainingCase("small", "small", lambda size: model, lambda size: batches[0], _classify)
    how = curves.Recipe(case, batches, _sgd, _STEPS)
    return dataclasses.replace(how, **changes)  # type: ignore[arg-type]


@pytest.fixture(params=[SmallCnn, SmallTransformer], ids=["cnn", "transformer"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """A small model of each kind, in training mode."""
    torch.manual_seed(0)
    made: nn.Module = request.param()
    return made.train()


def test_gradient_accumulation(model: nn.Module) -> None:
    """Two backward passes for each step add up."""
    curves.compare(_recipe(model, accumulate=2), model, _compile)


def test_frozen_layers(model: nn.Module) -> None:
    """Parameters that need no gradient stay as they are, to the bit; the others learn."""
    head = {"head.weight", "head.bias"}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in head)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    run = curves.compare(_recipe(model), model, _compile)
    for name, value in before.items():
        assert torch.equal(run.state[name], value) is (name not in head), name


@pytest.mark.full
def test_thawed_layers() -> None:
    """Layers that are frozen at first and thawed between calls are trained from then on."""
    torch.manual_seed(0)
    model, plain = SmallTransformer().train(), SmallTransformer().train()
    plain.load_state_dict(model.state_dict())
    how = _recipe(model, steps=5)
    for each, forward in ((model, _compile(model)), (plain, plain)):
        each.layer.requires_grad_(False)
        curves.train(how, each, forward)
        each.layer.requires_grad_(True)
        curves.train(how, each, forward)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


class _Checkpointed(nn.Module):
    """A model whose layer is recomputed in the backward pass."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = SmallTransformer()
        self.reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.inner.embedding(tokens) + self.inner.position[: tokens.shape[1]]
        x = checkpoint(self.inner.layer, x, use_reentrant=self.reentrant)
        logits: torch.Tensor = self.inner.head(x.mean(dim=1))
        return logits


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    """Activations recomputed in the backward pass give the same gradients."""
    torch.manual_seed(0)
    model = _Checkpointed(use_reentrant=use_reentrant).train()
    curves.compare(_recipe(model), model, _compile)


@pytest.mark.full
def test_autocast_bfloat16(model: nn.Module) -> None:
    """Under autocast to bfloat16 ours is as far from float64 as eager under autocast is."""
    curves.compare(_recipe(model, autocast=torch.bfloat16), model, _compile)


class _Tied(nn.Module):
    """An embedding whose matrix is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.body = nn.Linear(32, 32)
        self.out = nn.Linear(32, 10, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(torch.relu(self.body(self.embedding(tokens % 10).mean(dim=1))))
        return logits


def test_tied_weights() -> None:
    """A weight used twice gets both gradients, and stays one tensor."""
    torch.manual_seed(0)
    model = _Tied().train()
    run = curves.compare(_recipe(model), model, _compile)
    assert torch.equal(run.state["embedding.weight"], run.state["out.weight"])


@pytest.mark.full
def test_compiled_optimiser_step(model: nn.Module) -> None:
    """The optimiser's step, compiled by the same backend, beside the compiled model."""
    how = _recipe(model)
    reference = curves.in_float64(how, model)
    eager = curves.eager_distance(how, model, reference)
    ours = curves.train(how, model, _compile(model), lambda optimiser: _compile(optimiser.step))
    curves.check(ours, reference, eager)


def _loop(forward: Forward, model: nn.Module, batch: Batch) -> list[float]:
    """Losses of a few calls, with the weights changed in every way there is between them."""
    torch.manual_seed(2)
    losses: list[float] = []

    def call() -> None:
        model.zero_grad()
        loss = _classify(forward, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())

    call()
    _sgd(model).step()
    call()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    call()
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5 + 0.01
    call()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    call()
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})
    call()
    with torch.no_grad():
        for factor in (1.1, 0.5):
            for parameter in model.parameters():
                parameter.data.mul_(factor)
            losses.append(_classify(forward, batch).item())
    return losses


def test_changed_weights_are_seen(model: nn.Module) -> None:
    """Weights changed by an optimiser, in place, through `.data`, by replaced storage and by `load_state_dict`, count in the
    next call, with gradients and without."""
    twin = type(model)().train()
    twin.load_state_dict(model.state_dict())
    batch = _recipe(model).batches[0]
    expected = _loop(twin, twin, batch)
    assert _loop(_compile(model), model, batch) == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == len(expected), "each change must show in the loss"
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_compiled_optimiser_steps(name: str) -> None:
    """A step of the optimiser is one graph of kernels, and does what eager's does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4))
    twin, plans = copy.deepcopy(model), list[Plan]()
    eager, own = (OPTIMISERS[name](module) for module in (model, twin))
    backend = functools.partial(compile_graph, config=Config.from_env(os.environ), on_plan=plans.append)
    compiled = torch.compile(own.step, backend=backend)
    for _ in range(4):
        x = torch.randn(16, 12)
        for module in (model, twin):
            module.zero_grad()
            module(x).square().sum().backward()
        eager.step()
        compiled()
    torch.testing.assert_close(twin.state_dict(), model.state_dict(), atol=1e-4, rtol=1e-4)
    assert plans
    assert {node.engine for plan in plans for node in plan.nodes} == {"tvm"}
