"""The ways of computing a kernel that a processor has. Plain data: nothing here imports TVM.

A new way is one function that `_ways` names:

    def schedule_ranks(kernel: Kernel, packed: Packed | None, target: Target) -> list[Variant]:
        return [Variant(f"choice {n}", (dataclasses.replace(kernel, schedule_rank=n),)) for n in range(1, 8)]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel, FusedConvKernel, with_weight
from torch_hybrid_backend.engines.cpu.operands.packing import (
    pack_b,
    pack_conv_weight,
    pack_winograd_weight,
    packed_conv_shape,
    winograd_weight_kernel,
)
from torch_hybrid_backend.engines.cpu.operands.winograd_cost import winograd_gains
from torch_hybrid_backend.engines.cpu.operands.winograd_transform import packed_winograd_shape
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.variants.amx import tile_convolutions, tile_dequantized_products, tile_products
from torch_hybrid_backend.engines.cpu.variants.attention import low_precision_attention
from torch_hybrid_backend.engines.cpu.variants.onednn import onednn_convolution, onednn_linear
from torch_hybrid_backend.engines.cpu.weights import InPlace, Panels, Quantized, Taps, Weight, Winograd
from torch_hybrid_backend.loops.index import index_of
from torch_hybrid_backend.loops.ir import Buffer, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, AttentionKernel, Kernel, MapKernel, Store, kernel_sizes
from torch_hybrid_backend.loops.layout import Blocked, Strided
from torch_hybrid_backend.loops.quantized import NARROW
from torch_hybrid_backend.sizes.size import Dim, known_int

Ways = Callable[..., Sequence[Variant]]


def alternatives(kernel: Kernel, constants: Mapping[Buffer, Packed], target: Target) -> list[Variant]:
    """The other ways of computing a kernel. `constants`: what is packed ahead, by its buffer."""
    packed = constants.get(kernel.weight.buffer) if isinstance(kernel, CpuConvKernel | CpuMatMulKernel) else None
    if isinstance(kernel, CpuConvKernel) and packed is not None and _sums_integers_in_floats(kernel, packed):
        return schedule_ranks(kernel, packed, target)
    return [variant for way in _ways(kernel) for variant in way(kernel, packed, target)]


def _ways(kernel: Kernel) -> tuple[Ways, ...]:
    """The functions that find other ways of computing a kernel, in the order of their variants. oneDNN's come last: the others are ours."""
    match kernel:
        case CpuConvKernel():
            return winograd, tile_convolutions, schedule_ranks, widened, onednn
        case FusedConvKernel():
            return (apart,)
        case CpuMatMulKernel(weight=Panels()):
            return tile_products, schedule_ranks, widened, onednn
        case CpuMatMulKernel(weight=InPlace()):
            return tile_products, onednn
        case CpuMatMulKernel(weight=Quantized()):
            return (tile_dequantized_products,)
        case AttentionKernel():
            return (low_precision_attention,)
    return ()


def _sums_integers_in_floats(kernel: CpuConvKernel[Weight], packed: Packed) -> bool:
    """True if floats are whole numbers here, with sums that are exact: other ways of computing them (Winograd's) would round."""
    return kernel.accumulator.dtype == "float32" and packed.source.dtype in NARROW


def schedule_ranks(kernel: Kernel, packed: Packed | None, target: Target) -> list[Variant]:
    """The kernel with the second choice of its schedule, the third, and so on; a schedule with fewer choices refuses the kernel."""
    return [Variant(f"choice {n}", (dataclasses.replace(kernel, schedule_rank=n),)) for n in range(1, _RANKS)]


def winograd(kernel: CpuConvKernel[Panels | Taps], packed: Packed | None, target: Target) -> list[Variant]:
    """F(2x2, 3x3) and F(4x4, 3x3), where arithmetic does not rule them out; a weight known only at run time is not worth its transform."""
    weight = kernel.weight
    if (
        kernel.kernel != (3, 3)
        or {*kernel.stride, *kernel.dilation} != {1}
        or {kernel.accumulator.dtype, compute_dtype(weight.buffer.dtype)} != {"float32"}
        or (packed is None and (kernel.groups != 1 or not isinstance(weight, Panels) or weight.dot is not None))
    ):
        return []
    images, all_outputs, *size = (variable.extent for variable in kernel.domain)
    rows, columns = ([1, *size])[-2:]
    groups, outputs = kernel.groups, known_int(all_outputs)
    inputs = known_int(kernel.x_vars[1].extent) // groups
    gains = winograd_gains(
        images, outputs // groups, inputs, (rows, columns), target, groups, transforms_weight=packed is None
    )
    best = next(iter(gains), 0)
    found = []
    for m, gain in gains.items():
        if gain < _CONCEIVABLE_GAIN:
            continue
        shape = packed_winograd_shape((outputs, inputs, 3, 3), m, target.lanes, groups)
        buffer = Buffer(shape, "float32", "transformed", constant=packed is not None)
        other, copies = _through_blocks(with_weight(kernel, Winograd(buffer=buffer, width=weight.width, outputs=m)))
        is_preferred = m == best and gain > _CERTAIN_GAIN
        name = f"winograd {m}"
        if packed is None:
            kernels = winograd_weight_kernel(weight.buffer, buffer, m), other, *copies
            found.append(Variant(name, kernels, (), False, is_preferred, 1 / gain))
        else:
            pack = partial(pack_winograd_weight, m=m, lanes=target.lanes, groups=groups)
            kernels = other, *copies
            found.append(Variant(name, kernels, (packed.repacked(buffer, pack),), False, is_preferred, 1 / gain))
    return found


def _through_blocks(kernel: CpuConvKernel[Winograd]) -> tuple[CpuConvKernel[Winograd], tuple[MapKernel, ...]]:
    """The kernel with results in blocks of channels in place of row-major ones whose channels share a cache set, and kernels that copy these
    to where they belong.

    A tile is written pixel by pixel, and a pixel's channels are then in as many lines of one set: 32 channels of 128 x 128 take three times as
    long as in blocks. Sums over a large image are what training saves for its backward graph.
    """
    if kernel_sizes(kernel):
        return kernel, ()
    point = tuple(map(index_of, kernel.domain))
    block = Blocked(kernel.weight.width)
    copies, writes, stores = [], list(kernel.writes), list(kernel.stores)
    for k, argument in enumerate(kernel.writes):
        out, layout = argument.buffer, argument.layout
        at = [n for n, store in enumerate(stores) if store.buffer is out and store.index == point]
        if not isinstance(layout, Strided) or len(at) != 1 or len(layout.strides) != 4:
            continue
        if layout.strides[3] != 1 or out.dtype != "float32" or known_int(layout.strides[1]) % _PAGE:
            continue
        blocked = Buffer(out.shape, out.dtype, "blocked")
        writes[k] = Argument(blocked, block)
        stores[at[0]] = dataclasses.replace(stores[at[0]], buffer=blocked)
        copy = Store(out, point, blocked.at(point))
        copies.append(MapKernel((writes[k],), (argument,), kernel.domain, stores=(copy,)))
    return dataclasses.replace(kernel, writes=tuple(writes), stores=tuple(stores)), tuple(copies)


def widened(
    kernel: CpuMatMulKernel[Panels] | CpuConvKernel[Panels | Taps], packed: Packed | None, target: Target
) -> list[Variant]:
    """Products of bfloat16 widened to float32, as processors do them whose dot products of it are slow (Intel's without AMX)."""
    own = kernel.weight
    if packed is None or isinstance(own, Taps) or own.dot is None or own.buffer.dtype != "bfloat16":
        return []
    shape: tuple[Dim, ...]
    ahead: Callable[[torch.Tensor], torch.Tensor]
    if isinstance(kernel, CpuMatMulKernel):
        shape = (*own.buffer.shape[:2], kernel.k.extent, own.width)
        ahead = partial(pack_b, tile_n=own.width)
    else:
        shape = packed_conv_shape(tuple(map(known_int, packed.view.shape)), kernel.groups, own.width)
        ahead = partial(pack_conv_weight, groups=kernel.groups, block=own.width)
    wide = packed.repacked(Buffer(shape, own.buffer.dtype, "packed", constant=True), ahead)
    weight = dataclasses.replace(own, buffer=wide.buffer, dot=None)
    return [Variant("widened", (with_weight(kernel, weight),), (wide,), is_exact=False)]


def apart(kernel: FusedConvKernel, packed: Packed | None, target: Target) -> list[Variant]:
    """The convolutions of a chain one after the other, with the tensors between them in memory."""
    return [Variant("apart", kernel.stages)]


def onednn(
    kernel: CpuConvKernel[Weight] | CpuMatMulKernel[Weight], packed: Packed | None, target: Target
) -> list[Variant]:
    """oneDNN's own, where PyTorch has it and may use it."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[no-untyped-call]
        return []
    found = onednn_convolution(kernel, packed) if isinstance(kernel, CpuConvKernel) else onednn_linear(kernel, packed)
    return [Variant("onednn", found.kernels, (found.packed,), is_exact=False, is_probed=True)] if found else []


# The estimates of `winograd_gains` are right within a quarter for most layers (docs/performance.md).
_CONCEIVABLE_GAIN, _CERTAIN_GAIN = 0.8, 1.15
# Elements of float32 so far apart are in one set of a first-level cache.
_PAGE = 1024
_RANKS = 8  # beyond the eighth best by estimate nothing has won
