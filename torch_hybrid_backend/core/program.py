"""Program: what an engine's kernels do for one region, as data the runtime can lay out and run without Python.

A program is a list of kernel calls over numbered buffers. The runtime decides where buffers live (graph inputs, packed
constants, the arena, fresh outputs); the program only says how large they are and who reads and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.sizes.size import Dim, evaluate


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call. `arguments` are buffer numbers: those the kernel reads first, then those it writes."""

    library: str  # path of the kernel library (.so)
    symbol: str  # the kernel's name in it, without the "__tvm_ffi_" prefix
    arguments: tuple[int, ...]
    writes: int  # how many of the last arguments are written
    sizes: tuple[Dim, ...] = ()  # further arguments, after the buffers: sizes known only at run time


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A buffer as an operator takes it: with the sizes and strides of `spec`, or where that is None as the constant that it is."""

    buffer: int
    spec: TensorSpec | None


OperatorArgument = TensorArgument | int | tuple[int, ...] | str | None


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator of PyTorch's where else kernels would be. Its result is a new tensor in each call.

    `name`: "namespace::operator", its default overload. `title`: what it stands for, for people.
    """

    name: str
    arguments: tuple[OperatorArgument, ...]  # in the order of its schema
    result: int  # a buffer that nothing else writes
    title: str

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        """The tensors among its arguments, in order."""
        return tuple(argument for argument in self.arguments if isinstance(argument, TensorArgument))


@dataclass(frozen=True, slots=True)
class PackedConstant:
    """A buffer computed from constant region inputs whenever they change, outside the hot path.

    `pack` takes the tensors of `sources` (region input positions) and returns a contiguous tensor for the buffer, or for one that only
    operators read oneDNN's own.
    """

    buffer: int
    sources: tuple[int, ...]
    pack: Callable[..., torch.Tensor] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Program:
    """KernelCall calls over buffers.

    `buffers[i]` is the physical form of buffer i: kernels see it as a 1-D array of `span` elements of its dtype.
    `inputs[k]` is the buffer of the region's k-th input (its spec has the strides the kernels were built for), or -1
    where no kernel reads it directly; `outputs[k]` is the buffer of the k-th output. An output may be an input's
    buffer, and two outputs may share one.
    """

    buffers: tuple[TensorSpec, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[PackedConstant, ...]
    steps: tuple[KernelCall | OperatorCall, ...]
    # Of a program with sizes known only at run time: what they are read from, the region's inputs as tensors or sizes.
    signature: tuple[TensorSpec | Dim | None, ...] = ()

    def at(self, values: Mapping[str, int]) -> Program:
        """The program for values of the size symbols, by name; KeyError for one that is missing."""
        buffers = tuple(buffer.at(values) for buffer in self.buffers)
        steps = tuple(
            replace(step, sizes=tuple(evaluate(size, values) for size in step.sizes))
            if isinstance(step, KernelCall) and step.sizes
            else step
            for step in self.steps
        )
        return replace(self, buffers=buffers, steps=steps)

    def reading(self, inputs: Sequence[int]) -> Program:
        """The program with only those of the region's inputs, by position; the others are read by no kernel and no packing."""
        new = {old: position for position, old in enumerate(inputs)}
        constants = tuple(replace(c, sources=tuple(new[source] for source in c.sources)) for c in self.constants)
        signature = tuple(self.signature[old] for old in inputs) if self.signature else ()
        return replace(self, inputs=tuple(self.inputs[old] for old in inputs), constants=constants, signature=signature)
