"""An operator of PyTorch's as one of a region's kernels: a library call in place of generated code."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.sizes.size import Dim


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A tensor in a buffer's memory, from the element `offset` on; without strides a constant that lies as the library wants it."""

    buffer: Buffer
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...] = ()
    offset: Dim = 0


@dataclass(frozen=True, slots=True, eq=False)
class OperatorKernel(Kernel):
    """An operator of PyTorch's on whole tensors, for which nothing is compiled; it has no domain.

    `name`: "namespace::operator". `arguments`: those of its schema. `results`: their number; only the first is read, a new tensor with the
    sizes and strides of `result`. `title`: for people.
    """

    name: str
    arguments: tuple[Operand | int | float | bool | tuple[int, ...] | str | None, ...]
    result: Operand
    title: str
    results: int = 1
