"""A model of a library that users combine with the backend: how it is made, with what it is called, what of it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.models import tensors
from benchmarks.weights import disturb, randomise

Inputs = tuple[Any, ...] | dict[str, Any]  # positional, or by name
Compile = Callable[[Any], Any]  # torch.compile with its settings; the identity for eager
Call = Callable[[Inputs], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is used. Its weights are the same on every call, its inputs for every seed.

    name: "library/model". make: the model as its author initialises it. example: inputs, drawn from torch's generator.
    part: what is compiled, in place: an attribute of the model ("forward", "unet"); "" stands for the model itself.
    method: what is called of the model, compiled. train: one step without an optimiser; results are the loss, all gradients and the buffers.
    dynamo: settings of `torch._dynamo.config` under which it runs, all others as they are.
    keep_weights: only disturb the author's weights: some (decay rates, codebooks) mean nothing when they are drawn at random.
    quick: small enough for every run of the tests. reason: why the table says that it is wrong, raises or is slower than eager.
    faults: pieces of the backend's warnings that `reason` explains; any other warning fails the test.
    not_exported: a piece of the text with which an export of it is refused; "" if it has a file.
    """

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Inputs]
    part: str = ""
    method: str = "__call__"
    train: bool = False
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    keep_weights: bool = False
    quick: bool = False
    reason: str = ""
    ill_conditioned: bool = (
        False  # eager's own result is far from float64: being wrong says nothing, and `reason` says so
    )
    faults: tuple[str, ...] = ()
    not_exported: str = ""

    @property
    def library(self) -> str:
        """The package that defines the model, or its kind where it is written here."""
        return self.name.partition("/")[0]

    def unexplained(self, warnings: Sequence[str]) -> list[str]:
        """The backend's warnings that `faults` does not name."""
        return [warning for warning in warnings if not any(known in warning for known in self.faults)]

    def inputs(self, seed: int) -> Inputs:
        """Fresh inputs: a model may write into them."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.example()

    def build(self) -> nn.Module:
        """The model with weights of order one, in evaluation mode unless it is trained."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make()
        if self.keep_weights:
            disturb(model)
        else:
            randomise(model, lambda: _call(getattr(model, self.method), self.inputs(0)))
        return model.train(self.train)

    def function(self, model: nn.Module, compiled: Compile) -> Call:
        """`model`, or its part in place, put through `compiled`, then used as the case says; returns all tensors of the result."""
        whole: Any = model
        if self.part:
            setattr(model, self.part, compiled(getattr(model, self.part)))
        else:
            whole = compiled(model)
        if self.train:
            return lambda inputs: _step(model, whole, inputs)
        return lambda inputs: tensors(_call(getattr(whole, self.method), inputs))


def _call(function: Callable[..., Any], inputs: Inputs) -> Any:
    return function(**inputs) if isinstance(inputs, dict) else function(*inputs)


def _step(model: nn.Module, forward: Callable[..., Any], inputs: Inputs) -> list[torch.Tensor]:
    """Forward and backward of a smooth loss; the loss, the gradients and what the model keeps besides parameters."""
    model.zero_grad()
    with torch.enable_grad():
        outputs = [value for value in tensors(_call(forward, inputs)) if value.is_floating_point()]
        loss = torch.stack([value.square().mean() for value in outputs]).sum()
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def in_double(inputs: Inputs) -> Inputs:
    """The inputs with every floating-point tensor in float64."""

    def widened(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    doubled: Inputs = torch.utils._pytree.tree_map(widened, inputs)
    return doubled
