"""Variants: the ways of computing what one kernel computes, best estimate first. Plain data: nothing here imports TVM.

The first variant is always the kernel itself. Which is fastest the engine finds out on the region's first call (`search`), unless the
placement is by estimate. A new way is one function in `ALTERNATIVES`:

    def winograd(kernel: ConvKernel, weight: Packed | None, target: Target) -> list[Variant]:
        if weight is None or kernel.kernel != (3, 3):   # a weight packed in every call, another window
            return []
        transformed = weight.repacked(Buffer(shape, dtype, "winograd", constant=True), partial(pack_winograd, tile=4))
        other = with_weight(replace(kernel, algorithm="winograd"), transformed)
        return [Variant("winograd 4x4", (other,), (transformed,), is_exact=False)]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch_hybrid_backend.core.size import typical
from torch_hybrid_backend.engines.tvm.prepare import Packed
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.kernels import Argument, ConvKernel, Kernel, MatMulKernel, kernel_sizes
from torch_hybrid_backend.loops.layout import contiguous


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """`kernels`, run one after the other, write what the kernel they stand for writes.

    `name` is unique among a kernel's variants and stable: verdicts are kept under it. `packed`: constants that only this variant reads.
    Between its kernels it may use buffers of its own. `is_exact`: it rounds as the kernel itself does; a region with one that is not
    falls back to those that are, where its results are too far from eager's.
    """

    name: str
    kernels: tuple[Kernel, ...]
    packed: tuple[Packed, ...] = ()
    is_exact: bool = True


Alternatives = Callable[..., Sequence[Variant]]


def variants(kernel: Kernel, constants: Mapping[int, Packed], target: Target, most: int) -> tuple[Variant, ...]:
    """At most `most` variants of a kernel. `constants`: what is packed ahead, by the identity of its buffer."""
    found = [Variant("", (kernel,))]
    if most <= 1 or kernel_sizes(kernel):  # sizes of the call that is timed say little of those to come
        return tuple(found)
    weight = constants.get(id(kernel.packed)) if isinstance(kernel, ConvKernel | MatMulKernel) else None
    for kind, alternatives in ALTERNATIVES:
        if isinstance(kernel, kind):
            found += alternatives(kernel, weight, target)
    return tuple(found[:most])


def with_weight(kernel: ConvKernel | MatMulKernel, weight: Packed) -> ConvKernel | MatMulKernel:
    """The kernel with another packed weight in place of its own."""
    own = kernel.packed
    argument = Argument(weight.buffer, contiguous(weight.buffer.shape))
    reads = tuple(argument if read.buffer is own else read for read in kernel.reads)
    return dataclasses.replace(kernel, reads=reads, packed=weight.buffer)


def other_choices(kernel: Kernel, weight: Packed | None, target: Target) -> list[Variant]:
    """What the kernel's schedule thinks second best and so on; one that does not have so many choices refuses the kernel."""
    return [Variant(f"choice {n}", (dataclasses.replace(kernel, choice=n),)) for n in range(1, _CHOICES)]


_CHOICES = 8  # beyond the eighth best by estimate nothing has won
ALTERNATIVES: tuple[tuple[type[Kernel], Alternatives], ...] = (
    (ConvKernel, other_choices),
    (MatMulKernel, other_choices),
)


def work(kernel: Kernel) -> float:
    """Multiply-adds of a convolution or matmul in one call, at typical sizes; 0 for other kernels."""
    points = math.prod(float(typical(variable.extent)) for variable in kernel.domain)
    match kernel:
        case MatMulKernel():
            return points * typical(kernel.k.extent)
        case ConvKernel():
            return points * typical(kernel.x_vars[1].extent) / kernel.groups * math.prod(kernel.kernel)
    return 0.0
