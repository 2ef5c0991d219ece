"""Variants: the ways of computing what one kernel computes, best estimate first. Plain data: nothing here imports TVM.

The first variant is always the kernel itself. Which is fastest the engine finds out on the region's first call (`search`), unless the
placement is by estimate. A new way is one function in `ALTERNATIVES`:

    def other_choices(kernel: Kernel, weight: Packed | None, target: Target) -> list[Variant]:
        return [Variant(f"choice {n}", (dataclasses.replace(kernel, choice=n),)) for n in range(1, 8)]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from torch_hybrid_backend.engines.tvm.cpu.onednn import onednn_convolution, onednn_linear
from torch_hybrid_backend.engines.tvm.cpu.operands import Packed
from torch_hybrid_backend.engines.tvm.cpu.packing import pack_winograd_weight
from torch_hybrid_backend.engines.tvm.cpu.winograd_cost import winograd_gains
from torch_hybrid_backend.engines.tvm.cpu.winograd_transform import packed_winograd_shape
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.ir import Buffer, compute_dtype
from torch_hybrid_backend.loops.kernels import (
    Argument,
    ConvChainKernel,
    ConvKernel,
    Kernel,
    MatMulKernel,
    PlainMatMulKernel,
    kernel_sizes,
)
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import known, typical


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """`kernels`, run one after the other, write what the kernel they stand for writes.

    `name` is unique among a kernel's variants and stable: verdicts are kept under it. `packed`: constants that only this variant reads.
    Between its kernels it may use buffers of its own. `is_exact`: it rounds as the kernel itself does; a region with one that is not
    falls back to those that are, where its results are too far from eager's. `is_preferred`: by estimate it is the fastest, and taken where
    nothing was timed. `cost`: its estimated time over the kernel's own. `is_operator`: it calls one of PyTorch's, and is tried only where the
    kernel is found slow (`screen`): kernels around it, which convert operands, are compiled for it.
    """

    name: str
    kernels: tuple[Kernel, ...]
    packed: tuple[Packed, ...] = ()
    is_exact: bool = True
    is_preferred: bool = False
    cost: float = 1.0
    is_operator: bool = False


Packable = TypeVar("Packable", ConvKernel, MatMulKernel)
Alternatives = Callable[..., Sequence[Variant]]


def variants(kernel: Kernel, constants: Mapping[Buffer, Packed], target: Target) -> tuple[Variant, ...]:
    """The variants of a kernel: itself first, then the preferred one. `constants`: what is packed ahead, by its buffer.

    None but these two where sizes are known only at run time: those of the call that is timed say little of those to come.
    """
    weight = constants.get(kernel.packed) if isinstance(kernel, ConvKernel | MatMulKernel) else None
    found: list[Variant] = []
    for kind, alternatives in ALTERNATIVES:
        if isinstance(kernel, kind):
            found += alternatives(kernel, weight, target)
    found.sort(key=lambda variant: not variant.is_preferred)
    preferred = [variant for variant in found if variant.is_preferred]
    return Variant("", (kernel,)), *(preferred if kernel_sizes(kernel) else found)


def with_weight(kernel: Packable, weight: Packed) -> Packable:
    """The kernel with another packed weight in place of its own."""
    own = kernel.packed
    argument = Argument(weight.buffer, contiguous(weight.buffer.shape))
    reads = tuple(argument if read.buffer is own else read for read in kernel.reads)
    return dataclasses.replace(kernel, reads=reads, packed=weight.buffer)


def other_choices(kernel: Kernel, weight: Packed | None, target: Target) -> list[Variant]:
    """What the kernel's schedule thinks second best and so on; one that does not have so many choices refuses the kernel."""
    return [Variant(f"choice {n}", (dataclasses.replace(kernel, choice=n),)) for n in range(1, _CHOICES)]


def winograd(kernel: ConvKernel, weight: Packed | None, target: Target) -> list[Variant]:
    """F(2x2, 3x3) and F(4x4, 3x3), where arithmetic does not rule them out; a weight known only at run time is not worth its transform."""
    if (
        weight is None
        or kernel.kernel != (3, 3)
        or {*kernel.stride, *kernel.dilation} != {1}
        or {kernel.accumulator.dtype, compute_dtype(kernel.packed.dtype)} != {"float32"}
    ):
        return []
    images, all_outputs, *size = (variable.extent for variable in kernel.domain)
    rows, columns = map(known, size)
    groups, outputs = kernel.groups, known(all_outputs)
    inputs = known(kernel.x_vars[1].extent) // groups
    gains = winograd_gains(images, outputs // groups, inputs, (rows, columns), target, groups)
    best = next(iter(gains), 0)
    found = []
    for m, gain in gains.items():
        if gain < _CONCEIVABLE_GAIN:
            continue
        shape = packed_winograd_shape((outputs, inputs, 3, 3), m, target.lanes, groups)
        buffer = Buffer(shape, "float32", "transformed", constant=True)
        transformed = weight.repacked(buffer, partial(pack_winograd_weight, m=m, lanes=target.lanes, groups=groups))
        other = dataclasses.replace(with_weight(kernel, transformed), winograd=m)
        is_preferred = m == best and gain > _CERTAIN_GAIN
        found.append(Variant(f"winograd {m}", (other,), (transformed,), False, is_preferred, 1 / gain))
    return found


def apart(kernel: ConvChainKernel, weight: Packed | None, target: Target) -> list[Variant]:
    """The convolutions of a chain one after the other, with the tensors between them in memory."""
    return [Variant("apart", kernel.stages)]


def onednn(
    kernel: ConvKernel | MatMulKernel | PlainMatMulKernel, weight: Packed | None, target: Target
) -> list[Variant]:
    """oneDNN's own, where PyTorch has it and may use it."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[no-untyped-call]
        return []
    found = onednn_convolution(kernel, weight) if isinstance(kernel, ConvKernel) else onednn_linear(kernel, weight)
    return [Variant("onednn", found.kernels, (found.packed,), is_exact=False, is_operator=True)] if found else []


# The estimates of `winograd_gains` are right within a quarter for most layers (docs/performance.md).
_CONCEIVABLE_GAIN, _CERTAIN_GAIN = 0.8, 1.15
_CHOICES = 8  # beyond the eighth best by estimate nothing has won
ALTERNATIVES: tuple[tuple[type[Kernel], Alternatives], ...] = (
    (ConvKernel, winograd),
    (ConvKernel, other_choices),
    (ConvChainKernel, apart),
    (MatMulKernel, other_choices),
    # Last: the others are kernels of ours.
    (ConvKernel, onednn),
    (MatMulKernel, onednn),
    (PlainMatMulKernel, onednn),
)


def work(kernel: Kernel) -> float:
    """Multiply-adds of a convolution or matmul in one call, at typical sizes; 0 for other kernels."""
    points = math.prod(float(typical(variable.extent)) for variable in kernel.domain)
    match kernel:
        case MatMulKernel() | PlainMatMulKernel():
            return points * typical(kernel.k.extent)
        case ConvChainKernel():
            return sum(map(work, kernel.stages))
        case ConvKernel():
            return points * typical(kernel.x_vars[1].extent) / kernel.groups * math.prod(kernel.kernel)
    return 0.0
