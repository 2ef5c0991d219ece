"""Training steps for PyTorch's compilers: forward, backward, and SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs, tensors
from torch_hybrid_backend.bench.peers import Prepared, Setting
from torch_hybrid_backend.errors import ArgumentError

_RATE = 1e-6  # small, so that the weights stay finite over thousands of steps


def prepared(model: nn.Module, inputs: Inputs, setting: Setting, compiled: Callable[[nn.Module], Any]) -> Prepared:
    """The model in training mode, compiled by `compiled`. A call is one step, and returns the loss and the gradients; `reset` restores the
    parameters and buffers.

    Raises ArgumentError if no parameter requires a gradient.
    """
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ArgumentError("no parameter of the model requires a gradient, so there is nothing to train")
    optimiser = torch.optim.SGD(parameters, lr=_RATE)
    begun = {name: value.detach().clone() for name, value in _state(model).items()}
    call, loss_of = compiled(model), _Loss()

    def step() -> list[torch.Tensor]:
        optimiser.zero_grad()
        with torch.enable_grad():
            with setting.autocast():
                outputs = inputs.call(call)
            loss = loss_of(outputs)
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        optimiser.step()
        return [loss.detach(), *gradients]

    def reset() -> None:
        with torch.no_grad():
            for name, value in _state(model).items():
                value.copy_(begun[name])

    return Prepared(step, reset=reset)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


class _Loss:
    """Loss of a model's outputs: their attribute or entry `loss`, or their only element; otherwise the mean of their products with fixed random
    numbers. A plain sum would not do: behind a softmax its gradient is zero."""

    def __init__(self) -> None:
        self._weights: list[torch.Tensor] = []

    def __call__(self, outputs: Any) -> torch.Tensor:
        own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if isinstance(own, torch.Tensor):
            return own
        found = [value for value in tensors(outputs) if value.is_floating_point() and value.requires_grad]
        if not found:
            raise ArgumentError("no output of the model depends on a parameter, so there is nothing to train")
        if len(found) == 1 and found[0].numel() == 1:
            return found[0].reshape(())
        if not self._weights:
            generator = torch.Generator().manual_seed(0)
            self._weights = [torch.randn(value.shape, generator=generator).to(value.dtype) for value in found]
        return torch.stack([(a * b).mean() for a, b in zip(found, self._weights, strict=True)]).sum()
