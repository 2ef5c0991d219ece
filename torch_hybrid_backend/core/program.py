"""Program: what an engine's kernels do for one region, as data the runtime can lay out and run without Python.

A program is a list of kernel calls over numbered buffers. The runtime decides where buffers live (graph inputs, packed
constants, the arena, fresh outputs); the program only says how large they are and who reads and writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torch_hybrid_backend.core.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel call. `arguments` are buffer numbers: those the kernel reads first, then those it writes."""

    library: str  # path of the kernel library (.so)
    symbol: str  # the kernel's name in it, without the "__tvm_ffi_" prefix
    arguments: tuple[int, ...]
    writes: int  # how many of the last arguments are written


@dataclass(frozen=True, slots=True)
class PackedConstant:
    """A buffer computed from constant region inputs whenever they change, outside the hot path.

    `pack` takes the tensors of `sources` (region input positions) and returns a contiguous tensor for the buffer.
    """

    buffer: int
    sources: tuple[int, ...]
    pack: Callable[..., torch.Tensor] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Program:
    """Kernel calls over buffers.

    `buffers[i]` is the physical form of buffer i: kernels see it as a 1-D array of `span` elements of its dtype.
    `inputs[k]` is the buffer of the region's k-th input (its spec has the strides the kernels were built for), or -1
    where no kernel reads it directly; `outputs[k]` is the buffer of the k-th output. An output may be an input's
    buffer, and two outputs may share one.
    """

    buffers: tuple[TensorSpec, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[PackedConstant, ...]
    kernels: tuple[Kernel, ...]
