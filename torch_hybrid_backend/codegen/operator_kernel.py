"""An operator of PyTorch's as one of a region's kernels: what a library computes in place of generated code."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Kernel


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A tensor in a buffer's memory, from its first element on; without strides a constant that lies as the library wants it."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class OperatorKernel(Kernel):
    """An operator of PyTorch's on whole tensors, for which nothing is compiled; it has no domain.

    `name`: "namespace::operator". `arguments`: those of its schema. It writes one new tensor, `result`. `title`: for people.
    """

    name: str
    arguments: tuple[Operand | int | tuple[int, ...] | str | None, ...]
    result: Operand
    title: str
