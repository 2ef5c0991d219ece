"""Training through the backend follows eager's loss curve."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.networks import SmallCnn, SmallTransformer

_STEPS = 5
# Losses are about 2; float32 rounding differs between kernels by 1e-6 a step and grows by the optimiser's steps.
_TOLERANCE = 1e-4


def _cnn_inputs() -> torch.Tensor:
    return torch.randn(16, 3, 16, 16)


def _transformer_inputs() -> torch.Tensor:
    return torch.randint(0, 100, (16, 12))


def _train(
    model: nn.Module, step: Callable[..., torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
) -> list[float]:
    """Losses of `_STEPS` steps of SGD with momentum on one batch; `step` is `model`, possibly compiled."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(_STEPS):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(step(inputs), targets)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("make", "make_inputs"),
    [(SmallCnn, _cnn_inputs), (SmallTransformer, _transformer_inputs)],
    ids=["cnn", "transformer"],
)
def test_loss_curve_equals_eager(
    make: Callable[[], nn.Module], make_inputs: Callable[[], torch.Tensor], backend: str
) -> None:
    """Losses, trained parameters and running statistics agree within 1e-4, and the model learns."""
    torch.manual_seed(0)
    eager = make().train()
    trained = copy.deepcopy(eager)
    inputs, targets = make_inputs(), torch.randint(0, 10, (16,))

    expected = _train(eager, eager, inputs, targets)
    losses = _train(trained, torch.compile(trained, backend=backend), inputs, targets)

    assert losses == pytest.approx(expected, rel=_TOLERANCE, abs=_TOLERANCE)
    assert losses[-1] < losses[0]
    for (name, value), other in zip(eager.state_dict().items(), trained.state_dict().values(), strict=True):
        torch.testing.assert_close(other, value, rtol=_TOLERANCE, atol=_TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_of_inputs_equal_eager(backend: str) -> None:
    """Gradients flow to inputs as well as to parameters."""
    torch.manual_seed(0)
    model = SmallCnn().eval()
    inputs = _cnn_inputs()[:2]
    plain, compiled = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()

    model(plain).square().sum().backward()
    torch.compile(model, backend=backend)(compiled).square().sum().backward()

    assert plain.grad is not None
    torch.testing.assert_close(compiled.grad, plain.grad, rtol=_TOLERANCE, atol=_TOLERANCE)
