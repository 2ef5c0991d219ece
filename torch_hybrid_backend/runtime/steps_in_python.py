"""Steps of a program that the C++ plan cannot run, as functions that it calls back.

    OperatorCall("aten::add.Tensor", (x, y, 2))   ->  a function of [x, y] that calls torch.ops.aten.add.Tensor
    ExternalCall of a runner without a C function ->  a function that calls the runner

Each takes the step's `tensors` and returns the tensors that the step `returned`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_hybrid_backend.core.operator_schema import operator_schema
from torch_hybrid_backend.core.program import (
    ExternalCall,
    ExternalRunner,
    OperatorArgument,
    OperatorCall,
    Step,
    TensorArgument,
)

InPython = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def in_python(step: Step) -> InPython:
    """Function that runs a step, of those that `runs_in_python`."""
    if isinstance(step, OperatorCall):
        return functools.partial(call_operator, step)
    assert isinstance(step, ExternalCall), step
    return functools.partial(_run, step.runner)


def call_operator(call: OperatorCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Call the operator on its tensors, in order; return its results that are read. Raises what the operator does."""
    left = iter(tensors)

    def argument(item: OperatorArgument) -> Any:
        if isinstance(item, TensorArgument):
            return next(left)
        return [argument(each) for each in item] if isinstance(item, tuple) else item

    schema = operator_schema(call.name, call.overload)
    values = [argument(item) for item in call.arguments]
    positional = [value for value, known in zip(values, schema.arguments, strict=True) if not known.kwarg_only]
    named = {known.name: value for value, known in zip(values, schema.arguments, strict=True) if known.kwarg_only}
    namespace, _, name = call.name.partition("::")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), call.overload or "default")
    returned = operator(*positional, **named)
    results = returned if len(call.results) != 1 else (returned,)
    read: list[torch.Tensor] = []
    for result, kept in zip(results or (), call.results, strict=True):
        pairs = zip(result, kept, strict=True) if isinstance(kept, tuple) else [(result, kept)]
        read += [tensor for tensor, buffer in pairs if buffer is not None]
    return read


def _run(runner: ExternalRunner, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    runner(tensors)
    return []
