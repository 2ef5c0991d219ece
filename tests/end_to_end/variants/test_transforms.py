"""functorch's transforms inside and around compiled functions, custom autograd functions, checkpointing, hooks, higher derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.utils.checkpoint import checkpoint

from tests.end_to_end.variants.harness import assert_same_tensor, check, compiled, forced


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).square().sum()


INSIDE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "vmap": lambda w, x: vmap(lambda row: torch.softmax(row @ w, 0) * 2)(x),
    "vmap of two dimensions": lambda w, x: vmap(vmap(lambda a, b: a * b.sin() + 1, (0, None)), (0, 0))(x, x[:, 0]),
    "grad": grad(_loss),
    "grad and value": grad_and_value(_loss),
    "gradients per sample": vmap(grad(_loss), (None, 0)),
    "jvp": lambda w, x: jvp(lambda v: torch.tanh(x @ v), (w,), (w * 2,)),
    "vjp": lambda w, x: vjp(lambda v: torch.tanh(x @ v), w)[1](torch.ones(5, 3)),
    "jacrev": lambda w, x: jacrev(lambda v: torch.tanh(x[0] @ v))(w),
    "jacfwd": lambda w, x: jacfwd(lambda v: torch.tanh(x[0] @ v))(w),
    "hessian": lambda w, x: hessian(lambda v: (x @ v).sigmoid().sum())(w[:, 0]),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside(name: str) -> None:
    """A transform in the compiled function is traced through."""
    check(INSIDE[name], lambda: (_numbers(6, 3), _numbers(5, 6)))


AROUND: dict[str, Callable[[Callable[..., Any], torch.Tensor, torch.Tensor], object]] = {
    "vmap": lambda f, w, x: vmap(f, (None, 0))(w, x),
    "grad": lambda f, w, x: grad(lambda a, b: f(a, b).sum())(w, x),
    "jvp": lambda f, w, x: jvp(lambda a: f(a, x), (w,), (w,)),
    "vmap of grad": lambda f, w, x: vmap(grad(lambda a, b: f(a, b).sum()), (None, 0))(w, x),
}


@pytest.mark.parametrize("name", AROUND)
def test_around(name: str) -> None:
    """A transform around a compiled function: the answers are eager's, whoever computes them."""

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) * 2

    fast = compiled(function)
    w, x = _numbers(6, 3), _numbers(5, 6)
    with forced():
        for _ in range(3):
            # In this order: a frame that Dynamo first sees inside a transform it never compiles.
            assert_same_tensor(fast.call(w, x), function(w, x))
            got, want = AROUND[name](fast.call, w, x), AROUND[name](function, w, x)
            torch.testing.assert_close(got, want)
    assert fast.taken


def test_ensemble_of_models() -> None:
    """Stacked parameters of several models under vmap and functional_call."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]
    template = models[0]

    def function(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return vmap(lambda s: functional_call(template, (s, buffers), (x,)))(state)

    check(function, lambda: ({k: v.detach().clone() for k, v in parameters.items()}, _numbers(4, 6)))


class Clipped(torch.autograd.Function):
    """The identity of its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit) * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * torch.where(x.abs() < ctx.limit, 3.0, 0.1), None


def test_custom_autograd_function() -> None:
    """A torch.autograd.Function keeps its own backward."""
    check(lambda x: Clipped.apply(x.sin(), 0.5) + x, lambda: (_numbers(5, 6).requires_grad_(),), backward=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing(dropout: float) -> None:
    """Activations recomputed in backward, random numbers drawn again as they were."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8))

    def function(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return checkpoint(block, x, use_reentrant=False) + x

    fast = compiled(lambda x: checkpoint(block, x, use_reentrant=False) + x)
    with forced():
        for _ in range(3):
            found = []
            for call in (fast.call, function):
                x = _numbers(5, 8).requires_grad_()
                torch.manual_seed(7)
                y = call(x)
                found.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert fast.taken


def test_hooks() -> None:
    """Hooks on a result, on a parameter and on a module run once for each backward."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    seen: list[str] = []
    model.weight.register_hook(lambda g: seen.append("weight") or g * 2)
    fast = compiled(lambda x: torch.relu(model(x)) * 2)
    with forced():
        for _ in range(3):
            gradients = []
            for call in (fast.call, lambda x: torch.relu(model(x)) * 2):
                y = call(_numbers(4, 6))
                y.register_hook(lambda g: g + 1)
                model.zero_grad()
                y.sum().backward()
                assert model.weight.grad is not None
                gradients.append(model.weight.grad.clone())
            torch.testing.assert_close(*gradients)
    assert len(seen) == 6
    assert fast.taken


def test_several_backwards() -> None:
    """retain_graph, gradients of a part of the results, accumulation in .grad."""
    fast = compiled(lambda x, w: (torch.tanh(x @ w), (x * 2).sum(0)))
    with forced():
        for _ in range(3):
            found = []
            for call in (fast.call, lambda x, w: (torch.tanh(x @ w), (x * 2).sum(0))):
                x, w = _numbers(5, 6).requires_grad_(), _numbers(6, 3).requires_grad_()
                first, second = call(x, w)
                first.sum().backward(retain_graph=True)
                first.square().sum().backward(retain_graph=True)  # compiled, both results are of one node
                second.sum().backward()
                found.append((x.grad, w.grad))
            torch.testing.assert_close(*found)
    assert fast.taken
