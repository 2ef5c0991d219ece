"""Complex numbers: conjugated and negated views, which copy nothing, keep their meaning between calls, graphs, and forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_hybrid_backend.core.lazy_bits import LazyBits

fault = pytest.mark.fault

Function = Callable[..., Any]

WRONG_BEFORE = "the same gradients as eager's"


def _compiled(function: Function, **options: object) -> Function:
    return torch.compile(function, backend="hybrid", options=options or None)


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _gradients(function: Function, *arguments: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the squares of all results, with regard to the arguments."""
    own = [argument.detach().clone().requires_grad_() for argument in arguments]
    loss = torch.stack([result.abs().square().sum() for result in _tensors(function(*own))]).sum()
    return list(torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True))


def _close(got: Any, want: Any) -> None:
    """Equal numbers and bits: `assert_close` sees no bits."""
    for a, b in zip(_tensors(got), _tensors(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert LazyBits.of(a) == LazyBits.of(b)


def _power_spectrum(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    spectrum = torch.fft.rfft(x)
    return (spectrum * spectrum.conj()).real, spectrum.abs()


def _of_conjugate(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = torch.complex(x, x.sin())
    return z.sqrt() * z.conj(), z.conj().imag * z.real, z.mH @ z


def _solved(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = torch.complex(x, x.cos())
    definite = z @ z.mH + 8 * torch.eye(6)
    return torch.linalg.cholesky(definite), torch.linalg.solve(definite, z), torch.linalg.inv(definite).mH


def _beside_kernels(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.softmax(x @ x, -1)
    z = torch.complex(y, torch.relu(x))  # small: the exponential below is squared
    return torch.tanh(z.conj().imag * 3) + 1, (z * z.conj()).real.exp()


@fault("a complex value is conjugated in training, by the model or by the derivative of an operator", WRONG_BEFORE)
@pytest.mark.parametrize("options", [{"engines": "eager"}, {}], ids=["eager", "all engines"])
@pytest.mark.parametrize("function", [_power_spectrum, _of_conjugate, _solved, _beside_kernels])
def test_gradients_of_complex_values(function: Function, options: dict[str, object]) -> None:
    """A value saved for backward keeps its conjugate and negative bits, with and without kernels, in the first call and later ones."""
    compiled = _compiled(function, **options)
    for _ in range(2):
        x = torch.randn(6, 6)
        _close(_gradients(compiled, x), _gradients(function, x))


@fault("a complex model is trained by an optimiser", "the same weights as eager's after each step")
def test_a_training_loop_of_a_complex_model() -> None:
    """Complex parameters, conjugated in forward, follow eager's through several steps of Adam."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = torch.fft.rfft(x) @ self.weight.mH
            return torch.fft.irfft(z * z.conj() * z.abs() + self.weight.conj().sum(), n=8)

    torch.manual_seed(0)
    plain, other = Filter(), Filter()
    other.load_state_dict(plain.state_dict())
    x = torch.randn(4, 8, dtype=torch.float64)
    losses: list[list[float]] = []
    for model, call in ((plain, plain), (other, _compiled(other))):
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        losses.append([])
        for _ in range(3):
            optimiser.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0])
    torch.testing.assert_close(other.weight, plain.weight)


@fault("a graph break or a checkpoint lies between a conjugation and its use", WRONG_BEFORE)
@pytest.mark.parametrize("between", ["break", "checkpoint"])
def test_borders_between_graphs(between: str) -> None:
    """A conjugated and a negated view cross from one graph to the next, and their gradients back."""

    def first(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.complex(x.sin(), x)
        power = z * z.conj() * z.abs()
        return z.mH * power.sum(), power.conj().imag

    def function(x: torch.Tensor) -> torch.Tensor:
        z, y = checkpoint(first, x, use_reentrant=False) if between == "checkpoint" else first(x)
        if between == "break":
            torch._dynamo.graph_break()
        return (z * z.conj()).real * z.abs() + z.imag * torch.tanh(y.mT)

    compiled = _compiled(function)
    for _ in range(2):
        x = torch.randn(4, 5)
        _close(compiled(x), function(x))
        _close(_gradients(compiled, x), _gradients(function, x))


@fault("the gradient that a compiled graph gets is a negated or conjugated view", WRONG_BEFORE)
def test_gradients_that_come_in_as_views() -> None:
    """Eager code after a compiled model may hand back such a gradient of plain results: the graph gets its numbers, not its memory."""

    def part(x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x) * 2 + x.tanh())[..., 1]

    def pairs(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(torch.relu(x) * 2 + x.tanh())

    def plainly(call: Function) -> Function:
        return call

    def conjugated(call: Function) -> Function:
        def run(x: torch.Tensor) -> torch.Tensor:
            found = call(x)
            z = found if found.is_complex() else torch.complex(x[..., 0], found)
            return z.conj() * torch.view_as_complex(x)

        return run

    for model in (part, pairs):
        compiled = _compiled(model)
        for follow in (plainly, conjugated, plainly, conjugated):
            x = torch.randn(400, 400, 2)
            _close(_gradients(follow(compiled), x), _gradients(follow(model), x))


@fault("what is saved for backward is moved away meanwhile, `torch.autograd.graph.save_on_cpu`", WRONG_BEFORE)
def test_saved_tensors_that_come_back_resolved() -> None:
    """A hook copies a conjugated value, which comes back without its bit: the backward graph gets it as it was traced."""

    def function(z: torch.Tensor) -> torch.Tensor:
        parts = torch.view_as_real(z.conj())
        return parts.square() * parts.sin()

    compiled = _compiled(function)
    for _ in range(2):
        z = torch.randn(4, 5, dtype=torch.complex64).conj().requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            got = compiled(z)
        _close(torch.autograd.grad(got.sum(), z), torch.autograd.grad(function(z).sum(), z))


@fault("a model conjugates its parameters, in inference", "the same results as eager's")
def test_conjugated_parameters_in_inference() -> None:
    """Views of parameters that are made ahead keep their bits, also when the parameters change."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
            self.register_buffer("shift", torch.randn(4, 4, dtype=torch.complex64).conj())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x @ self.weight.conj(), x * self.weight.mH.imag, x + self.shift.conj(), self.weight.conj()

    model = Model()
    compiled = _compiled(model)
    with torch.no_grad():
        for x in (torch.randn(4, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64).conj()):
            for _ in range(3):
                _close(compiled(x), model(x))
            model.weight.mul_(2j)
        model.weight.data = model.weight.data.conj()
        for _ in range(2):
            _close(compiled(x), model(x))


@fault("an input is a conjugated or negated view", "the same results as eager's, in every call")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugated_inputs(dtype: torch.dtype) -> None:
    """From the first call to later ones, beside plain inputs, with operators that want plain memory, and writes to the input."""

    def function(z: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = z.imag * 2, torch.view_as_real(z.conj().resolve_conj()) + 1, torch.relu(x) * 2 + x.exp(), z.mH
        z[0] = z[1] * 1j
        return made

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.linspace(0, 1, 12).to(dtype).view(3, 4) * (2 + 1j)
        return z, z.real.clone()

    def lazy() -> tuple[torch.Tensor, torch.Tensor]:
        z, _ = plain()
        return z.conj(), z.clone().conj().imag

    compiled = _compiled(function)
    for make in (plain, lazy, lazy, plain, lazy):
        own, others = make(), make()
        _close(compiled(*own), function(*others))
        _close(own, others)


@fault(
    "a result is a conjugated view of another result or of an input",
    "a write to one is seen through the other, as in eager",
)
def test_results_that_are_conjugated_views() -> None:
    """Results that are views have their bit and lie in the other's memory."""

    def function(z: torch.Tensor) -> list[torch.Tensor]:
        y = z * 2
        return [y, y.conj(), y.mH[1:], y.conj().imag, z.conj()]

    compiled = _compiled(function)
    for _ in range(2):
        z = torch.randn(3, 4, dtype=torch.complex64)
        mine = z.clone()
        got, want = compiled(mine), function(z)
        _close(got, want)
        for result in (got, want):
            result[1].mul_(1j)
            result[4][0] = 2 + 3j
        _close((*got, mine), (*want, z))
