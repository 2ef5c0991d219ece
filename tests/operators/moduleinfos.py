"""PyTorch's module table (`module_db`) as calls on samples: forward in eval and train, outputs, buffers and gradients."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.operators.execution import SKIPPED, Outcome, Subject, compare, settings
from tests.operators.values import copied, seed

# Modules whose training draws random numbers by another operator than eager's.
RANDOM_IN_TRAINING = frozenset({"nn.RReLU"})


@dataclass(frozen=True, slots=True)
class Task:
    """All samples of one module in one dtype, in train or eval mode; in train mode gradients are compared as well."""

    module: str
    dtype: str
    training: bool

    @property
    def name(self) -> str:
        return f"{self.module} {self.dtype} {'train' if self.training else 'eval'}"


@functools.cache
def table() -> dict[str, Any]:
    """Every ModuleInfo by its name ("nn.Linear")."""
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


def tasks(pattern: str, dtypes: list[str]) -> list[Task]:
    """Modules whose name matches `pattern` entirely, in each dtype they support, train and eval."""
    return [
        Task(name, dtype, training)
        for dtype in dtypes
        for name, info in table().items()
        if re.fullmatch(pattern, name) and getattr(torch, dtype) in info.dtypes
        for training in (False, True)
    ]


def run(task: Task, engine: str, limit: int | None, cache_dir: Path, threads: int) -> Iterator[Outcome]:
    """Compare every sample; stops at none."""
    config = settings(engine, cache_dir, threads)
    info, dtype = table()[task.module], getattr(torch, task.dtype)
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=task.training, training=task.training
        )
    for sample in inputs[:limit]:
        if sample.forward_input is None:
            continue
        arguments = (sample.forward_input.args, sample.forward_input.kwargs)
        try:
            module = _make(info, sample, task, arguments)
        except Exception as error:
            yield Outcome(SKIPPED, f"{type(error).__name__}: {error}"[:300])
            continue
        subject = Subject.of_module(module)
        is_random = task.training and task.module in RANDOM_IN_TRAINING
        yield compare(subject, arguments, config, backward=task.training, is_random=is_random)


class _Unpacked(torch.nn.Module):
    """A module called with its positional and keyword arguments as two trees."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _make(info: Any, sample: Any, task: Task, arguments: Any) -> torch.nn.Module:
    constructor = sample.constructor_input
    seed()
    module = info.module_cls(*constructor.args, **constructor.kwargs).to(getattr(torch, task.dtype))
    unpacked = _Unpacked(module).train(task.training)
    if any(isinstance(m, torch.nn.modules.lazy.LazyModuleMixin) for m in module.modules()):
        with torch.no_grad():
            unpacked(*copied(arguments))  # a lazy module has its parameters from the first call on
    return unpacked
