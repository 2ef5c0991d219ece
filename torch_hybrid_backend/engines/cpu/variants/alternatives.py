"""The ways of computing a kernel that a processor has. Plain data: nothing here imports TVM.

A new way is one function in `ALTERNATIVES`:

    def schedule_ranks(kernel: Kernel, weight: Packed | None, target: Target) -> list[Variant]:
        return [Variant(f"choice {n}", (dataclasses.replace(kernel, schedule_rank=n),)) for n in range(1, 8)]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.cpu.kernels import (
    DequantizedMatMulKernel,
    FusedConvKernel,
    PackedConvKernel,
    PackedMatMulKernel,
    UnpackedMatMulKernel,
)
from torch_hybrid_backend.engines.cpu.operands.packing import (
    pack_b,
    pack_conv_weight,
    pack_winograd_weight,
    packed_conv_shape,
)
from torch_hybrid_backend.engines.cpu.operands.winograd_cost import winograd_gains
from torch_hybrid_backend.engines.cpu.operands.winograd_transform import packed_winograd_shape
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.variants.amx import tile_convolutions, tile_dequantized_products, tile_products
from torch_hybrid_backend.engines.cpu.variants.attention import low_precision_attention
from torch_hybrid_backend.engines.cpu.variants.onednn import onednn_convolution, onednn_linear
from torch_hybrid_backend.loops.integer_products import NARROW
from torch_hybrid_backend.loops.ir import Buffer, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, AttentionKernel, Kernel
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import Dim, known_int

Packable = TypeVar("Packable", PackedConvKernel, PackedMatMulKernel)
Ways = Callable[..., Sequence[Variant]]


def alternatives(kernel: Kernel, constants: Mapping[Buffer, Packed], target: Target) -> list[Variant]:
    """The other ways of computing a kernel. `constants`: what is packed ahead, by its buffer."""
    weight = constants.get(kernel.packed) if isinstance(kernel, PackedConvKernel | PackedMatMulKernel) else None
    if isinstance(kernel, PackedConvKernel) and weight is not None and _sums_integers_in_floats(kernel, weight):
        return schedule_ranks(kernel, weight, target)
    found: list[Variant] = []
    for kind, ways in ALTERNATIVES:
        if isinstance(kernel, kind):
            found += ways(kernel, weight, target)
    return found


def _sums_integers_in_floats(kernel: PackedConvKernel, weight: Packed) -> bool:
    """True if floats are whole numbers here, with sums that are exact: other ways of computing them (Winograd's) would round."""
    return kernel.accumulator.dtype == "float32" and weight.source.dtype in NARROW


def with_weight(kernel: Packable, weight: Packed) -> Packable:
    """The kernel with another packed weight, of single elements, in place of its own."""
    own = kernel.packed
    argument = Argument(weight.buffer, contiguous(weight.buffer.shape))
    reads = tuple(argument if read.buffer is own else read for read in kernel.reads)
    return dataclasses.replace(kernel, reads=reads, packed=weight.buffer, dot=None)


def schedule_ranks(kernel: Kernel, weight: Packed | None, target: Target) -> list[Variant]:
    """The kernel with the second choice of its schedule, the third, and so on; a schedule with fewer choices refuses the kernel."""
    return [Variant(f"choice {n}", (dataclasses.replace(kernel, schedule_rank=n),)) for n in range(1, _RANKS)]


def winograd(kernel: PackedConvKernel, weight: Packed | None, target: Target) -> list[Variant]:
    """F(2x2, 3x3) and F(4x4, 3x3), where arithmetic does not rule them out; a weight known only at run time is not worth its transform."""
    if (
        weight is None
        or kernel.kernel != (3, 3)
        or {*kernel.stride, *kernel.dilation} != {1}
        or {kernel.accumulator.dtype, compute_dtype(kernel.packed.dtype)} != {"float32"}
    ):
        return []
    images, all_outputs, *size = (variable.extent for variable in kernel.domain)
    rows, columns = map(known_int, size)
    groups, outputs = kernel.groups, known_int(all_outputs)
    inputs = known_int(kernel.x_vars[1].extent) // groups
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


def widened(kernel: Packable, weight: Packed | None, target: Target) -> list[Variant]:
    """Products of bfloat16 widened to float32, as processors do them whose dot products of it are slow (Intel's without AMX)."""
    if weight is None or kernel.dot is None or kernel.packed.dtype != "bfloat16":
        return []
    shape: tuple[Dim, ...]
    ahead: Callable[[torch.Tensor], torch.Tensor]
    if isinstance(kernel, PackedMatMulKernel):
        shape = (*kernel.packed.shape[:2], kernel.k.extent, kernel.tile_n)
        ahead = partial(pack_b, tile_n=kernel.tile_n)
    else:
        shape = packed_conv_shape(tuple(map(known_int, weight.view.shape)), kernel.groups, kernel.block)
        ahead = partial(pack_conv_weight, groups=kernel.groups, block=kernel.block)
    packed = weight.repacked(Buffer(shape, kernel.packed.dtype, "packed", constant=True), ahead)
    return [Variant("widened", (with_weight(kernel, packed),), (packed,), is_exact=False)]


def apart(kernel: FusedConvKernel, weight: Packed | None, target: Target) -> list[Variant]:
    """The convolutions of a chain one after the other, with the tensors between them in memory."""
    return [Variant("apart", kernel.stages)]


def onednn(
    kernel: PackedConvKernel | PackedMatMulKernel | UnpackedMatMulKernel, weight: Packed | None, target: Target
) -> list[Variant]:
    """oneDNN's own, where PyTorch has it and may use it."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[no-untyped-call]
        return []
    found = (
        onednn_convolution(kernel, weight) if isinstance(kernel, PackedConvKernel) else onednn_linear(kernel, weight)
    )
    return [Variant("onednn", found.kernels, (found.packed,), is_exact=False, is_probed=True)] if found else []


# The estimates of `winograd_gains` are right within a quarter for most layers (docs/performance.md).
_CONCEIVABLE_GAIN, _CERTAIN_GAIN = 0.8, 1.15
_RANKS = 8  # beyond the eighth best by estimate nothing has won
ALTERNATIVES: tuple[tuple[type[Kernel], Ways], ...] = (
    (PackedConvKernel, winograd),
    (PackedConvKernel, tile_convolutions),
    (PackedConvKernel, schedule_ranks),
    (FusedConvKernel, apart),
    (PackedMatMulKernel, tile_products),
    (UnpackedMatMulKernel, tile_products),
    (DequantizedMatMulKernel, tile_dequantized_products),
    (PackedMatMulKernel, schedule_ranks),
    (PackedConvKernel, widened),
    (PackedMatMulKernel, widened),
    (AttentionKernel, low_precision_attention),
    # Last: the others are kernels of ours.
    (PackedConvKernel, onednn),
    (PackedMatMulKernel, onednn),
    (UnpackedMatMulKernel, onednn),
)
