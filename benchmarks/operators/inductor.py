"""Inductor's generated code for one operator, without Dynamo's guards: we are timed without them too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from torch._inductor.compile_fx import compile_fx

from benchmarks.operators.ours import Problem

# Its own C++ template for products, which it takes only where the weight is a constant.
_TEMPLATE = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}


def generated(problem: Problem) -> Callable[[], Any] | None:
    """The compiled operator with its epilogue; None for those that inductor hands to oneDNN or ATen, and where it has no template."""
    match problem.case.kind:
        case "conv" | "grouped" | "depthwise" | "bmm" | "attention":
            return None
        case "linear":
            return _linear(problem)
    return _inner(problem.eager(), (), {})


class _Linear(nn.Module):
    """A linear layer as a model has it, weight (in, out); so that freezing sees a constant."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.activation = activation

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        product = torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        added = product if residual is None else product + residual
        return torch.relu(added) if self.activation else added


def _linear(problem: Problem) -> Callable[[], Any] | None:
    arguments = problem.arguments()[0]
    bias, x, weight = arguments if problem.case.op.startswith("aten.addmm") else (None, *arguments)
    if not problem.case.tensors[-1].constant or x.dim() != 2 or (bias is not None and bias.dim() != 1):
        return None
    model = _Linear(weight, bias, problem.epilogue != "none").eval()
    try:
        return _inner(model, (x, problem.residual), _TEMPLATE)
    except torch._dynamo.exc.BackendCompilerFailed:  # no tile of the template fits the shape
        return None


def _inner(function: Callable[..., Any], arguments: Sequence[Any], patches: dict[str, Any]) -> Callable[[], Any]:
    held: list[Callable[[], Any]] = []

    def backend(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        compiled = compile_fx(graph, examples)  # type: ignore[arg-type]

        def first(*inputs: Any) -> Any:
            held.append(functools.partial(compiled, *inputs))
            return compiled(*inputs)

        return first

    torch._dynamo.reset()  # all operators share the code of one function: its recompilations are limited
    # Around Dynamo's part too: it is Dynamo that notes which inputs freezing may take as constants; with gradients it takes none.
    with torch._inductor.config.patch(patches), torch.no_grad():
        torch.compile(function, backend=backend, dynamic=False)(*arguments)
    (call,) = held
    return lambda: call()[0]
