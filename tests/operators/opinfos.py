"""PyTorch's operator table (`op_db`) as calls on samples."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.operators.execution import Outcome, Subject, compare, settings
from tests.operators.values import seed

DTYPES = {name: getattr(torch, name) for name in "float32 float64 float16 bfloat16 int64 bool".split()}

# Operators whose numbers are not eager's: they draw them by another operator or leave memory as it was. Only form counts.
RANDOM = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided bernoulli cauchy exponential geometric log_normal multinomial "
    "normal normal.number_mean normal.in_place rand_like randint randint_like randn randn_like rand randperm uniform "
    "nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.alpha_dropout "
    "nn.functional.feature_alpha_dropout.with_train nn.functional.feature_alpha_dropout.without_train "
    "nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.rrelu pca_lowrank svd_lowrank "
    "torch.ops.aten._flash_attention_forward torch.ops.aten._efficient_attention_forward".split()
)


@dataclass(frozen=True, slots=True)
class Task:
    """All samples of one operator in one dtype; `backward` compares gradients as well, `strided` spreads inputs in memory."""

    operator: str
    dtype: str
    backward: bool = False
    strided: bool = False

    @property
    def name(self) -> str:
        return f"{self.operator} {self.dtype}" + " backward" * self.backward + " strided" * self.strided


@functools.cache
def table() -> dict[str, Any]:
    """Every OpInfo of op_db by its full name; the import takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    named = {}
    for info in op_db:
        variant = info.variant_test_name
        named[f"{info.name}.{variant}" if variant else info.name] = info
    return named


def tasks(pattern: str, dtypes: list[str], *, backward: bool = False, strided: bool = False) -> list[Task]:
    """Operators whose name matches `pattern` entirely, in each dtype they support."""
    found = []
    for dtype, (name, info) in itertools.product(dtypes, table().items()):
        supported = info.supported_backward_dtypes("cpu") if backward else info.supported_dtypes("cpu")
        if re.fullmatch(pattern, name) and DTYPES[dtype] in supported and (info.supports_autograd or not backward):
            found.append(Task(name, dtype, backward, strided))
    return found


def samples(task: Task, limit: int | None) -> Iterator[tuple[Any, ...]]:
    """The arguments (input, positional, keyword) of up to `limit` samples of a task, spread over all of them."""
    info = table()[task.operator]
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(info.sample_inputs("cpu", DTYPES[task.dtype], requires_grad=task.backward))
    chosen = every if limit is None or limit >= len(every) else [every[i * len(every) // limit] for i in range(limit)]
    for sample in chosen:
        if task.strided:
            sample = sample.noncontiguous()  # noqa: PLW2901
        yield sample.input, sample.args, sample.kwargs


def run(task: Task, engine: str, limit: int | None, cache_dir: Path, threads: int) -> Iterator[Outcome]:
    """Compare every sample; stops at none."""
    config = settings(engine, cache_dir, threads)
    info = table()[task.operator]
    operator = info.op

    for arguments in samples(task, limit):

        def call(first: Any, rest: Any, named: Any) -> Any:
            return operator(first, *rest, **named)

        yield compare(
            Subject.of_function(call), arguments, config, backward=task.backward, is_random=task.operator in RANDOM
        )
