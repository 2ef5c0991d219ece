"""Operands of matmuls and convolutions, packed for the schedules.

A matmul's right operand and a convolution's weight are read from packed buffers. Where the operand is a constant of the region, packing
happens outside the hot path (`PackedConstant`); otherwise an elementwise operation packs it on every call. A linear layer's weight that is
read as fast where it lies (`reads_unpacked`) is not packed: no second copy of it exists. The operations say which it is by their class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch_hybrid_backend.codegen.anchors import Anchor, neutral_kernel, over
from torch_hybrid_backend.codegen.operands import OperandPacker, Prepared, StridedView, strided_view
from torch_hybrid_backend.engines.tvm.cpu.dequantized import DequantizedMatMulOp, dequantized_operand
from torch_hybrid_backend.engines.tvm.cpu.dot_products import (
    DotProduct,
    bf16_dot_product,
    column_sums,
    constant_words,
    integer_dot_product,
    left_words,
    pack_right,
    packed_right_value,
)
from torch_hybrid_backend.engines.tvm.cpu.kernels import (
    DequantizedMatMulKernel,
    PackedConvKernel,
    PackedMatMulKernel,
    UnpackedMatMulKernel,
)
from torch_hybrid_backend.engines.tvm.cpu.packing import (
    is_depthwise,
    pack_b,
    pack_conv_weight,
    packed_b_value,
    packed_conv_shape,
)
from torch_hybrid_backend.engines.tvm.cpu.tiles import copies_panels, output_block, reads_unpacked, tile_n
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops import ops as scalar
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import (
    Buffer,
    Const,
    ConvOp,
    Expr,
    IntegerMatMulOp,
    Map,
    MapOp,
    MatMulOp,
    ReduceOp,
    Value,
    compute_dtype,
    domain_vars,
)
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.loops.layout import Layout, Strided
from torch_hybrid_backend.sizes.size import Dim, known_at_most, known_int

# Products along fewer elements are not worth words.
_LEAST_DEPTH = 16


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatMulOp(MatMulOp):
    """A matmul whose `b` is packed in panels of `tile_n` columns (`packing.pack_b`).

    With a `dot`: `a` is what words are read from, (B, M, words * group), `b` is packed in words, and sums start at `start`.
    """

    b: Buffer
    tile_n: int
    dot: DotProduct | None = None
    start: Buffer | None = None

    def reads(self) -> list[Buffer]:
        return [*MatMulOp.reads(self), *([] if self.start is None else [self.start])]


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedMatMulOp(MatMulOp):
    """A matmul whose right operand, (1, k, n), is read where it lies: as the view `weight` of memory."""

    weight: StridedView


@dataclass(frozen=True, slots=True, eq=False)
class PackedConvOp(ConvOp):
    """A convolution whose `w` is packed in blocks of `block` output channels (`packing.pack_conv_weight`). `kernel`: its sizes before."""

    w: Buffer
    block: int
    kernel: tuple[int, ...]


def packed_operands(graph: LoopGraph, layouts: Mapping[Buffer, Layout], target: Target) -> Prepared:
    """The graph with the operands of every matmul and convolution packed. `layouts`: how constants lie."""
    packer = OperandPacker()
    for op in graph.ops:
        match op:
            case IntegerMatMulOp():
                add_integer_matmul(packer, op, layouts, target)
            case MatMulOp() if (quantized := dequantized_operand(op, packer, target)) is not None:
                packer.add(quantized)
            case MatMulOp() if multiplies_words(packer, op, layouts, target):
                pass
            case MatMulOp() if (weight := unpacked_view(op, layouts, target)) is not None:
                packer.add(UnpackedMatMulOp(op.out, op.a, op.b, weight))
            case MatMulOp():
                tile = tile_n(op.out.shape[2], target)
                each_call = partial(packed_b_value, tile_n=tile)
                b = packer.pack(op.b, partial(pack_b, tile_n=tile), each_call, ("b", tile))
                packer.add(PackedMatMulOp(op.out, op.a, b, tile))
            case ConvOp():
                block = output_block(known_int(op.out.shape[1]), op.groups, target)
                ahead = partial(pack_conv_weight, groups=op.groups, block=block)
                each_call = partial(packed_conv_weight_value, groups=op.groups, block=block)
                w = packer.pack(op.w, ahead, each_call, ("w", block, op.groups))
                kernel = tuple(map(known_int, op.w.shape[2:]))
                packer.add(PackedConvOp(op.out, op.x, w, op.stride, op.padding, op.dilation, op.groups, block, kernel))
            case _:
                packer.add(op)
    return packer.prepared(graph)


def packed_kernel(anchor: Anchor) -> Kernel:
    """The kernel of a group around one of these operations, or around attention, which packs nothing."""
    op = anchor.op
    match op:
        case PackedMatMulOp() | UnpackedMatMulOp():
            dot = op.dot if isinstance(op, PackedMatMulOp) else None
            group = 1 if dot is None else dot.group
            k = LoopVar("k", op.a.shape[2] // group)
            batch, m, _ = anchor.point
            a = op.a.at((batch, m, index_of(k) * group))
            if isinstance(op, PackedMatMulOp):
                operands = [op.b] if op.start is None else [op.b, op.start]
                reads, batched = anchor.reads([a], operands), op.b.shape[0] != 1
                return PackedMatMulKernel(
                    reads,
                    anchor.writes,
                    anchor.domain,
                    k,
                    a,
                    op.b,
                    op.tile_n,
                    batched,
                    anchor.accumulator,
                    anchor.stores,
                    dot,
                    op.start,
                )
            weight, offset = op.weight.buffer, known_int(op.weight.offset)
            _, k_stride, n_stride = map(known_int, op.weight.strides)
            return UnpackedMatMulKernel(
                anchor.reads([a], [weight]),
                anchor.writes,
                anchor.domain,
                k,
                a,
                weight,
                offset,
                n_stride,
                k_stride,
                anchor.accumulator,
                anchor.stores,
            )
        case DequantizedMatMulOp():
            k = LoopVar("k", op.a.shape[2])
            a = op.a.at((*anchor.point[:2], index_of(k)))
            operands = [op.b, op.scales, *([] if op.zeros is None else [op.zeros])]
            return DequantizedMatMulKernel(
                anchor.reads([a], operands),
                anchor.writes,
                anchor.domain,
                k,
                a,
                op.b,
                op.bits,
                op.scales,
                op.zeros,
                op.group,
                op.tile_n,
                anchor.accumulator,
                anchor.stores,
            )
        case PackedConvOp():
            x_vars, x = over(op.x, "x")
            return PackedConvKernel(
                anchor.reads([x], [op.w]),
                anchor.writes,
                anchor.domain,
                x_vars,
                x,
                op.w,
                op.stride,
                op.padding,
                op.dilation,
                op.groups,
                op.kernel,
                op.block,
                anchor.accumulator,
                anchor.stores,
            )
    return neutral_kernel(anchor)


def packed_conv_weight_value(w: Value, groups: int, block: int) -> Map:
    """`pack_conv_weight` as a value, for weights only known at run time (training)."""
    outputs, inputs, *kernel = map(known_int, w.shape)
    shape = packed_conv_shape((outputs, inputs, *kernel), groups, block)
    per_group = outputs // groups
    zero = scalar.const(0, compute_dtype(w.dtype))
    spatial = len(kernel)

    def at(index: tuple[Index, ...]) -> Expr:
        if is_depthwise(outputs, inputs, groups):
            (o_block, kh, kw, lane), group, channel = index, 0, 0
            within, limit = o_block * block + lane, outputs
        else:
            group_index, o_block, kh, channel_index, kw, lane = index
            group, channel = group_index * per_group, channel_index  # type: ignore[assignment]
            within, limit = o_block * block + lane, per_group
        position = (within + group, as_index(channel), *(kh, kw)[2 - spatial :])
        return scalar.guard(scalar.index_in(within, 0, limit), w.at(position), zero)

    return Map(shape, w.dtype, at)


def unpacked_view(op: MatMulOp, layouts: Mapping[Buffer, Layout], target: Target) -> StridedView | None:
    """A matmul's right operand, (1, k, n), as a view of the memory it is read from, or None where it is to be packed."""
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
    if is_rows and reads_unpacked(m, k, n, target):
        return view
    is_columns = n_stride == 1 and isinstance(n, int) and known_at_most(n, k_stride)
    return view if is_columns and copies_panels(m, k, n, target) else None


def multiplies_words(packer: OperandPacker, op: MatMulOp, layouts: Mapping[Buffer, Layout], target: Target) -> bool:
    """Adds a product of bfloat16 as one by the processor's dot products, where it has them; whether it did."""
    k, n, dot = op.a.shape[2], op.out.shape[2], bf16_dot_product(target)
    if dot is None or not op.a.dtype == op.b.dtype == "bfloat16":
        return False
    if not isinstance(k, int) or k < _LEAST_DEPTH or (isinstance(n, int) and n < target.lanes):
        return False
    b, tile = _packed_right(packer, op.b, dot, n, target)
    packer.add(PackedMatMulOp(op.out, _words(packer, op.a, dot, layouts), b, tile, dot))
    return True


def add_integer_matmul(
    packer: OperandPacker, op: IntegerMatMulOp, layouts: Mapping[Buffer, Layout], target: Target
) -> None:
    """Adds a product of integers: by dot products where the processor has them, else as one of int32.

    What moves the left operand, its zero point and what the instruction needs, is taken off as that much of the sums of columns: where they
    start if it is known ahead, else behind.
    """
    weight = strided_view(op.b)
    is_known = weight is not None and weight.is_constant
    dot = integer_dot_product(op.a.dtype, op.b.dtype, target, knows_right=is_known)
    if dot is None:
        dot = DotProduct("", 1, "int32", "int32", "int32")
    packed, tile = _packed_right(packer, op.b, dot, op.out.shape[2], target)
    form = packed.shape[0], packed.shape[1] * tile

    def column_sums_times(factor: int) -> Buffer:
        assert weight is not None
        return packer.made_ahead(weight, partial(column_sums, width=tile, factor=factor), Buffer(form, "int32"))

    moved = dot.shift
    zero = None if op.zero is None else op.zero(domain_vars(op.out.shape[:2]))
    if is_known and isinstance(zero, Const):
        moved, zero = moved + int(zero.value), None
    start = column_sums_times(-moved) if moved else None
    sums = op.out if zero is None else Buffer(op.out.shape, "int32", "sums")
    packer.add(PackedMatMulOp(sums, _words(packer, op.a, dot, layouts), packed, tile, dot, start))
    if zero is None:
        return
    if is_known:
        columns = column_sums_times(1)
    else:
        columns = Buffer((op.b.shape[0], op.b.shape[2]), "int32", "column sums")

        def element(index: tuple[Index, ...]) -> Expr:
            return scalar.cast(op.b.at(index), "int32")

        packer.add(ReduceOp(columns, op.b.shape, (1,), "sum", element))
    one_matrix = packed.shape[0] == 1

    def corrected(index: tuple[Index, ...]) -> Expr:
        batch, row, column = index
        assert op.zero is not None
        of_column = columns.at((as_index(0) if one_matrix else batch, column))
        return scalar.sub(sums.at(index), scalar.mul(op.zero((batch, row)), of_column))

    packer.add(MapOp(op.out, Map(op.out.shape, "int32", corrected, ((sums, lambda index: index),))))


def _packed_right(packer: OperandPacker, b: Value, dot: DotProduct, n: Dim, target: Target) -> tuple[Buffer, int]:
    """A product's right operand in words, and the width of its panels: whole vectors."""
    tile = max(tile_n(n, target), target.lanes)
    ahead, each_call = partial(pack_right, tile_n=tile, dot=dot), partial(packed_right_value, tile_n=tile, dot=dot)
    return packer.pack(b, ahead, each_call, ("b", tile, dot)), tile


def _words(packer: OperandPacker, a: Value, dot: DotProduct, layouts: Mapping[Buffer, Layout]) -> Value:
    """What a product's left operand is read from word by word: itself where its words lie together, else a copy."""
    view = strided_view(a)
    if view is not None and view.buffer in layouts:
        own = layouts[view.buffer]
        view = strided_view(a, own) if isinstance(own, Strided) else None
    if view is not None and a.dtype == dot.left and view.strides[2] == 1:
        places = (a.shape[2], view.offset, *view.strides[:2])
        if all(isinstance(place, int) and place % dot.group == 0 for place in places):
            if view.buffer not in layouts:
                packer.keep_row_major(view.buffer)
            return a
    return packer.pack(a, partial(constant_words, dot=dot), partial(left_words, dot=dot), ("a", dot))
