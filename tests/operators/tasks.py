"""Tasks: all samples of one operator or module of PyTorch's own tables, of one kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = {
    name: getattr(torch, name) for name in "float32 float64 float16 bfloat16 int64 bool complex64 complex128".split()
}

# What there is to run, the most telling first. "backward": gradients too; "strided": inputs whose elements do not lie side by side; "lazy":
# inputs that are conjugated views, or negated ones of real numbers; "eval" and "train": modules, the latter with gradients.
KINDS = (
    "float32",
    "float32 backward",
    "float32 eval",
    "float32 train",
    "float64",
    "bfloat16",
    "float16",
    "int64",
    "bool",
    "float32 strided",
    "int64 strided",
    "float64 backward",
    "float64 eval",
    "float64 train",
    "complex64",
    "complex64 backward",
    "complex64 lazy",
    "float32 lazy",
    "complex128",
    "complex128 backward",
)

# Hundreds of samples each: they come last.
LONG = frozenset(
    "nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.max_pool3d max_pool2d_with_indices_backward logspace "
    "logspace.tensor_overload linspace.tensor_overload unique unique_consecutive searchsorted masked.norm "
    "nn.functional.gaussian_nll_loss nn.functional.max_unpool2d".split()
)


@dataclass(frozen=True, slots=True)
class Task:
    """All samples of `subject`, an operator or a module, of one of the `KINDS`."""

    subject: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.subject} {self.kind}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind.split()[0]]

    @property
    def variant(self) -> str:
        return self.kind.partition(" ")[2]

    @property
    def is_module(self) -> bool:
        return self.variant in ("eval", "train")

    @property
    def backward(self) -> bool:
        return self.variant in ("backward", "train")


def spread(count: int, limit: int | None) -> list[int]:
    """Up to `limit` of the numbers below `count`, spread over all of them."""
    if limit is None or limit >= count:
        return list(range(count))
    return [(2 * k + 1) * count // (2 * limit) for k in range(limit)]


def tasks(pattern: str, kinds: Sequence[str] = KINDS) -> list[Task]:
    """Operators and modules whose name matches `pattern` entirely, of each kind that they support."""
    from tests.operators import moduleinfos, opinfos

    found: list[Task] = []
    for kind in kinds:
        table = moduleinfos if Task("", kind).is_module else opinfos
        candidates = [Task(name, kind) for name in table.table() if re.fullmatch(pattern, name)]
        found += [task for task in candidates if table.supported(task)]
    return sorted(found, key=lambda task: task.subject in LONG)
