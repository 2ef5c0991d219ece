"""Operands of matmuls and convolutions, packed for the schedules.

A matmul's right operand and a convolution's weight are read from packed buffers. Where the operand is a constant of the region, packing
happens outside the hot path (`PackedConstant`); otherwise an elementwise operation packs it on every call. A linear layer's weight that is
read as fast where it lies (`reads_unpacked`) is not packed: no second copy of it exists. Each operation has its weight's form (`weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from torch_hybrid_backend.codegen.anchors import Anchor, neutral_kernel, over
from torch_hybrid_backend.codegen.operands import OperandPacker, Packed, Prepared, StridedView, strided_view
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.dot_product_operands import DotProductOperands
from torch_hybrid_backend.engines.cpu.operands.packing import (
    pack_b,
    pack_conv_weight,
    pack_gates,
    packed_b_value,
    packed_conv_weight_value,
    packed_gates_value,
)
from torch_hybrid_backend.engines.cpu.operands.quantized import dequantized_operand
from torch_hybrid_backend.engines.cpu.operands.tables import PackedTables
from torch_hybrid_backend.engines.cpu.operations import CpuConvOp, CpuMatMulOp, convolution_with
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import copies_panels, output_block, reads_unpacked, tile_n
from torch_hybrid_backend.engines.cpu.weights import InPlace, Panels, Weight
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.index import LoopVar, contiguous_strides, index_of
from torch_hybrid_backend.loops.ir import Buffer, ConvOp, IntegerConvOp, IntegerMatMulOp, MatMulOp, RecurrentOp
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.loops.layout import Layout, Strided
from torch_hybrid_backend.sizes.size import known_at_most, known_int


def packed_operands(graph: LoopGraph, layouts: Mapping[Buffer, Layout], target: Target) -> Prepared:
    """The graph with the operands of every matmul and convolution packed. `layouts`: how constants lie."""
    packer = OperandPacker()
    images = {op.x for op in graph.ops if isinstance(op, ConvOp) and isinstance(op.x, Buffer)}
    dots = DotProductOperands(packer, layouts, images, target)
    tables = PackedTables(graph, packer, target)
    for op in graph.ops:
        match op:
            case IntegerMatMulOp():
                dots.add_integer_matmul(op)
            case MatMulOp() if (quantized := dequantized_operand(op, packer, target)) is not None:
                packer.add(quantized)
            case MatMulOp() if dots.takes_matmul(op):
                pass
            case MatMulOp() if (weight := in_place(op, layouts, target)) is not None:
                packer.add(CpuMatMulOp(op.out, op.a, op.b, weight=weight))
            case MatMulOp():
                tile = tile_n(op.out.shape[2], target)
                each_call = partial(packed_b_value, tile_n=tile)
                b = packer.pack(op.b, partial(pack_b, tile_n=tile), each_call, ("b", tile))
                packer.add(CpuMatMulOp(op.out, op.a, op.b, weight=Panels(buffer=b, width=tile)))
            case IntegerConvOp():
                dots.add_integer_convolution(op)
            case ConvOp() if dots.takes_convolution(op):
                pass
            case ConvOp():
                block = output_block(known_int(op.out.shape[1]), op.groups, target)
                ahead = partial(pack_conv_weight, groups=op.groups, block=block)
                each_call = partial(packed_conv_weight_value, groups=op.groups, block=block)
                w = packer.pack(op.w, ahead, each_call, ("w", block, op.groups))
                packer.add(convolution_with(op, Panels(buffer=w, width=block)))
            case RecurrentOp(gates=gates):
                lanes = target.lanes
                each_call = partial(packed_gates_value, gates=gates, lanes=lanes)
                packed = packer.pack(
                    op.weight, partial(pack_gates, gates=gates, lanes=lanes), each_call, ("gates", gates, lanes)
                )
                packer.add(replace(op, weight=packed))
            case _:
                packer.add(tables.reading(op))
    return packer.prepared(graph)


def packed_kernel(anchor: Anchor) -> Kernel:
    """The kernel of a group around one of these operations, or around attention, which packs nothing."""
    op = anchor.op
    match op:
        case CpuMatMulOp():
            k = LoopVar("k", op.a.shape[2])
            a = op.a.at((*anchor.point[:2], index_of(k)))
            return CpuMatMulKernel(
                reads=anchor.reads([a], op.weight.reads),
                writes=anchor.writes,
                domain=anchor.domain,
                k=k,
                a=a,
                weight=op.weight,
                accumulator=anchor.accumulator,
                stores=anchor.stores,
            )
        case CpuConvOp():
            x_vars, x = over(op.x, "x")
            return CpuConvKernel(
                reads=anchor.reads([x], op.weight.reads),
                writes=anchor.writes,
                domain=anchor.domain,
                x_vars=x_vars,
                x=x,
                weight=op.weight,
                stride=op.stride,
                padding=op.padding,
                dilation=op.dilation,
                groups=op.groups,
                kernel=tuple(map(known_int, op.w.shape[2:])),
                accumulator=anchor.accumulator,
                stores=anchor.stores,
                border=op.border,
            )
    return neutral_kernel(anchor)


def in_place(op: MatMulOp, layouts: Mapping[Buffer, Layout], target: Target) -> InPlace | None:
    """A matmul's right operand, (1, k, n), in the memory it is read from, or None where it is to be packed."""
    logical = strided_view(op.b)
    layout = None if logical is None else layouts.get(logical.buffer)
    if logical is None or not logical.buffer.constant or not isinstance(layout, Strided):
        return None
    if op.b.dtype != "float32" or op.a.dtype != "float32" or op.a.shape[0] != 1:
        return None
    view = strided_view(op.b, layout)
    if view is None or not view.is_static:
        return None
    _, k, n = view.shape
    _, k_stride, n_stride = view.strides
    m = op.a.shape[1]
    is_rows = k_stride == 1 and isinstance(k, int) and known_at_most(k, n_stride)
    is_columns = n_stride == 1 and isinstance(n, int) and known_at_most(n, k_stride)
    if (is_rows and reads_unpacked(m, k, n, target)) or (is_columns and copies_panels(m, k, n, target)):
        offset, row_stride, depth_stride = map(known_int, (view.offset, n_stride, k_stride))
        return InPlace(buffer=view.buffer, offset=offset, row_stride=row_stride, k_stride=depth_stride)
    return None


def repacked(
    kernel: CpuMatMulKernel[Weight],
    packed: Packed | None,
    buffer: Buffer,
    ahead: Callable[[torch.Tensor], torch.Tensor],
) -> Packed | None:
    """A product's weight packed into `buffer` by `ahead`, which takes it as (1, K, N); None where it is known only at run time.

    `packed`: the weight as it is packed ahead for this kernel.
    """
    weight = kernel.weight
    if not isinstance(weight, InPlace):
        return None if packed is None else packed.repacked(buffer, ahead)
    source = weight.buffer
    layout = next(argument.layout for argument in kernel.reads if argument.buffer is source)
    assert isinstance(layout, Strided)
    pack = partial(
        _pack_in_place,
        memory=tuple(map(known_int, layout.strides)),
        shape=(known_int(kernel.domain[2].extent), known_int(kernel.k.extent)),
        strides=(weight.row_stride, weight.k_stride),
        offset=weight.offset,
        ahead=ahead,
    )
    view = StridedView(source, source.shape, contiguous_strides(source.shape), 0)
    return Packed(buffer, source, view, pack)


def _pack_in_place(
    weight: torch.Tensor,
    memory: tuple[int, ...],
    shape: tuple[int, int],
    strides: tuple[int, int],
    offset: int,
    ahead: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """weight: contiguous; in the graph it has the strides `memory`, and there (N, K) is a view of it."""
    laid_out = weight.new_empty_strided(tuple(weight.shape), memory).copy_(weight)
    return ahead(laid_out.as_strided(shape, strides, offset).t().unsqueeze(0))
