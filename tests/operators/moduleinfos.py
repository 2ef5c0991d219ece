"""PyTorch's module table (`module_db`) as calls on samples: forward in eval and train, outputs, buffers and gradients."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from tests.operators.execution import Sample, Subject
from tests.operators.tasks import Task
from tests.operators.values import copied, seed

# Modules whose training draws random numbers by another operator than eager's.
RANDOM_IN_TRAINING = frozenset({"nn.RReLU"})


@functools.cache
def table() -> dict[str, Any]:
    """Every ModuleInfo by its name ("nn.Linear")."""
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


def supported(task: Task) -> bool:
    """True if the module takes the task's dtype."""
    return task.dtype in table()[task.subject].dtypes


def samples(task: Task) -> list[Sample]:
    """The samples of a task, those whose module cannot be made left out."""
    info, training = table()[task.subject], task.variant == "train"
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=task.dtype, requires_grad=training, training=training
        )
        made = []
        for sample in inputs:
            if sample.forward_input is None:
                continue
            arguments = (sample.forward_input.args, sample.forward_input.kwargs)
            try:
                module = _make(info, sample, task.dtype, training, arguments)
            except (RuntimeError, TypeError, ValueError):  # a sample for a device that is not here
                continue
            is_random = training and task.subject in RANDOM_IN_TRAINING
            made.append(Sample(Subject.of_module(module), arguments, training, is_random, direct=False))
    return made


class _Unpacked(torch.nn.Module):
    """A module called with its positional and keyword arguments as two trees."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _make(info: Any, sample: Any, dtype: torch.dtype, training: bool, arguments: Any) -> torch.nn.Module:
    constructor = sample.constructor_input
    seed()
    module = info.module_cls(*constructor.args, **constructor.kwargs).to(dtype)
    unpacked = _Unpacked(module).train(training)
    if any(isinstance(m, torch.nn.modules.lazy.LazyModuleMixin) for m in module.modules()):
        with torch.no_grad():
            unpacked(*copied(arguments))  # a lazy module has its parameters from the first call on
    return unpacked
