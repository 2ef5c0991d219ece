"""Fusion of convolutions: a chain of them whose tensors in between are too large for the caches becomes one kernel, which never writes them.

Enters: a region's kernels in execution order. Leaves: the same with some runs of convolutions as `FusedConvKernel`s. Example, the first
blocks of MobileNetV2 at 224 x 224, where 96 channels of 112 x 112 are 4.8 MB:

    conv 16 -> 96, 1x1    depthwise 96, 3x3, stride 2    conv 96 -> 24, 1x1     is one chain

Nothing here imports TVM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeGuard

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, FusedConvKernel
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import strips
from torch_hybrid_backend.engines.cpu.weights import Panels
from torch_hybrid_backend.loops.index import index_of
from torch_hybrid_backend.loops.ir import Buffer, Load, buffers_of_expr
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.loops.layout import Blocked
from torch_hybrid_backend.sizes.size import known_int, size_hint

# Computed twice, at most, of the first convolution's rows: strips overlap by what the window covers beyond its stride.
_MAX_OVERLAP = 0.1


def fuse_convolutions(kernels: Sequence[Kernel], outputs: Collection[Buffer], target: Target) -> tuple[Kernel, ...]:
    """The kernels with one in place of each chain of convolutions, where the last of these was. `outputs`: the region's."""
    shown = set(outputs)
    readers = Counter(argument.buffer for kernel in kernels for argument in kernel.reads)
    ends: dict[Buffer, list[CpuConvKernel[Panels]]] = {}  # what a chain, or a convolution alone, writes -> its stages
    found: list[Kernel] = []
    for kernel in kernels:
        if _is_summed_directly(kernel) and isinstance(kernel.x, Load):
            between = kernel.x.buffer
            before = ends.get(between)
            if before and readers[between] == 1 and between not in shown and _joins(before, kernel, target):
                found = [k for k in found if k is not before[0] and not _is_chain_of(k, before)]
                stages = [*before, kernel]
                ends[kernel.writes[0].buffer] = stages
                found.append(fused_kernel(stages))
                continue
            ends[kernel.writes[0].buffer] = [kernel]
        found.append(kernel)
    return tuple(found)


def _is_summed_directly(kernel: Kernel) -> TypeGuard[CpuConvKernel[Panels]]:
    return isinstance(kernel, CpuConvKernel) and isinstance(kernel.weight, Panels)


def fused_kernel(stages: Sequence[CpuConvKernel[Panels]]) -> FusedConvKernel:
    """Join convolutions, each of which reads the result of the one before it, into one kernel."""
    inner = {stage.writes[0].buffer for stage in stages[:-1]}
    reads = {a.buffer: a for stage in stages for a in stage.reads if a.buffer not in inner}
    last = stages[-1]
    return FusedConvKernel(reads=tuple(reads.values()), writes=last.writes, domain=last.domain, stages=tuple(stages))


def _is_chain_of(kernel: Kernel, stages: Sequence[CpuConvKernel[Panels]]) -> bool:
    return isinstance(kernel, FusedConvKernel) and kernel.stages[-1] is stages[-1]


def _joins(before: Sequence[CpuConvKernel[Panels]], second: CpuConvKernel[Panels], target: Target) -> bool:
    """True if `second` may, and should, read rows of the chain `before` as they are made."""
    first, stages = before[-1], [*before, second]
    if not all(map(_has_rows, stages)) or not _passes_on(first, second):
        return False
    if _is_depthwise(second):
        # Others with a window may gain more from Winograd's algorithm; an image with few channels does not.
        of_image = known_int(first.x_vars[1].extent) < target.lanes
        if not (_is_depthwise(first) or _is_pointwise(first) or of_image) or second.kernel[0] < second.stride[0]:
            return False
    elif not (_is_depthwise(first) and _is_pointwise(second)):
        return False
    images, channels, rows, columns = first.writes[0].buffer.shape
    if (
        4 * size_hint(images) * math.prod(map(known_int, (channels, rows, columns)))
        < target.cores * target.l2_bytes // 2
    ):
        return False
    if sum(4 * math.prod(map(known_int, stage.weight.buffer.shape)) for stage in stages) > target.l2_bytes // 8:
        return False
    return _overlap(stages, target) <= _MAX_OVERLAP


def _has_rows(kernel: CpuConvKernel[Panels]) -> bool:
    """Two spatial dimensions of known size, float32, summed directly, one result in blocked channels, the input as it lies in memory."""
    return (
        len(kernel.domain) == 4
        and all(isinstance(variable.extent, int) for variable in (*kernel.domain[1:], *kernel.x_vars[1:]))
        and len(kernel.stores) == len(kernel.writes) == 1
        and isinstance(kernel.x, Load)
        and {kernel.accumulator.dtype, kernel.writes[0].buffer.dtype, kernel.weight.buffer.dtype} == {"float32"}
        and (kernel.groups == 1 or _is_depthwise(kernel))
    )


def _is_depthwise(kernel: CpuConvKernel[Panels]) -> bool:
    return len(kernel.weight.buffer.shape) == 4


def _is_pointwise(kernel: CpuConvKernel[Panels]) -> bool:
    return kernel.groups == 1 and {*kernel.kernel, *kernel.stride} == {1} and not any(kernel.padding)


def _passes_on(first: CpuConvKernel[Panels], second: CpuConvKernel[Panels]) -> bool:
    """True if the first one's result, element by element in blocked channels, is the second one's input and nothing else of it."""
    (store,), (argument,), x = first.stores, first.writes, second.x
    assert isinstance(x, Load)
    return (
        isinstance(argument.layout, Blocked)
        and x.buffer is store.buffer
        and store.index == tuple(map(index_of, first.domain))
        and x.index == tuple(map(index_of, second.x_vars))
        and all(store.buffer not in buffers_of_expr(s.value) for s in second.stores)
    )


def _overlap(stages: Sequence[CpuConvKernel[Panels]], target: Target) -> float:
    """Rows that two neighbouring strips both compute, as a share of a strip's, at the stage with most of them."""
    images, _, out, _ = stages[-1].domain
    count = strips(images.extent, known_int(out.extent), target)
    if count == 1:
        return 0.0
    extra, worst = 0.0, 0.0
    for first, second in zip(reversed(stages[:-1]), reversed(stages[1:]), strict=True):
        window = (second.kernel[0] - 1) * second.dilation[0] + 1
        extra = extra * second.stride[0] + window - second.stride[0]
        worst = max(worst, extra * count / known_int(first.domain[2].extent))
    return worst
