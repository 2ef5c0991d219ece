"""Recurrent layers without gradients: traced at all, and as one operator.

Dynamo takes `nn.LSTM`, `nn.GRU` and `nn.RNN` for graph breaks unless its setting `allow_rnn` is on. It is on here while Dynamo compiles for
this backend where gradients are off; other backends, and training, see what they saw. Once traced, PyTorch's formulas would write out every
step: a layer over 256 steps becomes thousands of operators. Here ATen's operator stays whole, which eager runs by its library, and
engines as one kernel for each direction. Packed sequences stay with PyTorch's formulas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_hybrid_backend.torch_private import (
    DispatchKey,
    OpOverload,
    below_autograd,
    dynamo_config,
    meta_table,
    while_compiling_for,
)

aten = torch.ops.aten
_OPERATORS: tuple[OpOverload, ...] = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def trace_recurrent_layers(package: str) -> None:
    """Have Dynamo trace recurrent layers, from now on, where it compiles without gradients for a backend of a package."""

    def allowed() -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if torch.is_grad_enabled() else dynamo_config.patch(allow_rnn=True)

    while_compiling_for(package, allowed)


@contextlib.contextmanager
def whole_recurrent_layers() -> Iterator[None]:
    """Trace recurrent layers of tensors that need no gradient as one operator each.

    Dynamo compiles under one lock; what others trace meanwhile without gradients gets whole operators, too.
    """
    if any(operator in meta_table for operator in _OPERATORS):  # another trace, around this one
        yield
        return
    before = {operator: dict(operator.py_kernels) for operator in _OPERATORS}
    for operator in _OPERATORS:
        formula = operator.py_kernels[DispatchKey.CompositeImplicitAutograd]
        operator.py_kernels[DispatchKey.AutogradCPU] = _below_autograd(operator, formula)
        operator.py_kernels[DispatchKey.CompositeImplicitAutograd] = _kept(formula)
        operator.py_kernels[DispatchKey.Meta] = _results
        meta_table[operator] = _results
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernels in before.items():
            del meta_table[operator]
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _needs_gradient(x: torch.Tensor, hx: torch.Tensor | Sequence[torch.Tensor], params: Sequence[torch.Tensor]) -> bool:
    states = (hx,) if isinstance(hx, torch.Tensor) else hx
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *states, *params))


def _kept(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula for gradients alone; NotImplemented, by which tracing keeps the operator, without."""

    def decomposed(x: torch.Tensor, hx: Any, params: Sequence[torch.Tensor], *settings: Any) -> Any:
        return formula(x, hx, params, *settings) if _needs_gradient(x, hx, params) else NotImplemented

    return decomposed


def _below_autograd(operator: OpOverload, formula: Callable[..., Any]) -> Callable[..., Any]:
    def called(x: torch.Tensor, hx: Any, params: Sequence[torch.Tensor], *settings: Any) -> Any:
        if _needs_gradient(x, hx, params):
            return formula(x, hx, params, *settings)
        with below_autograd():
            return operator(x, hx, params, *settings)

    return called


def _results(
    x: torch.Tensor,
    hx: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Tensors of the operators' results without their values: the output by time, transposed where `batch_first`, then states and cells."""
    states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    out = x.new_empty((steps, batch, states[0].shape[2] * (2 if bidirectional else 1)))
    return (out.transpose(0, 1) if batch_first else out, *(state.new_empty(state.shape) for state in states))
