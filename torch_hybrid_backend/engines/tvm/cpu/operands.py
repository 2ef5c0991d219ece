"""Preparing a loop graph for the TVM schedules: operands of matmuls and convolutions are packed.

A matmul's right operand and a convolution's weight are read from packed buffers. Where the operand is a constant of the region, packing
happens outside the hot path (`PackedConstant`); otherwise an elementwise operation packs it on every call. A linear layer's weight that is
read as fast where it lies (`reads_plain`) is not packed: no second copy of it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from torch_hybrid_backend.engines.tvm.cpu.packing import (
    is_depthwise,
    pack_b,
    pack_conv_weight,
    packed_b_value,
    packed_conv_shape,
)
from torch_hybrid_backend.engines.tvm.cpu.tiles import copies_panels, output_block, reads_plain, tile_n
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops import ops as scalar
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, contiguous_strides, linear
from torch_hybrid_backend.loops.ir import (
    Buffer,
    ConvOp,
    Expr,
    Load,
    LoopOp,
    Map,
    MapOp,
    MatMulOp,
    Value,
    compute_dtype,
    domain_vars,
)
from torch_hybrid_backend.loops.layout import Layout, Strided
from torch_hybrid_backend.sizes.size import Dim, Size, at_most, known


@dataclass(frozen=True, slots=True)
class StridedView:
    """A value that is a strided view of a buffer's logical row-major elements."""

    buffer: Buffer
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim

    @property
    def is_static(self) -> bool:
        """Whether a tensor can be viewed so ahead of any call."""
        return not any(isinstance(n, Size) for n in (*self.shape, *self.strides, self.offset))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a tensor with the buffer's shape (any strides, beginning anywhere in its storage)."""
        sizes, strides = [int(n) for n in self.shape], [int(s) for s in self.strides]
        whole = tensor.contiguous()  # which may begin in the middle of its storage, as a piece of a parameter does
        return whole.as_strided(sizes, strides, whole.storage_offset() + int(self.offset))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A constant buffer made ahead from a constant region input or literal, `source`: a view of it, packed by `ahead`."""

    buffer: Buffer
    source: Buffer
    view: StridedView
    ahead: Callable[[torch.Tensor], torch.Tensor]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The buffer's tensor, of the source's."""
        return self.ahead(self.view.of(tensor))

    def repacked(self, buffer: Buffer, ahead: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        """The same operand packed another way, into another buffer."""
        return Packed(buffer, self.source, self.view, ahead)


@dataclass(slots=True, eq=False)
class Prepared:
    """A graph whose matmuls and convolutions read packed operands; `tiles` says how each was packed, operation by operation.

    `plain`: right operands that are read where they lie instead, operation by operation, as views of memory.
    """

    graph: LoopGraph
    packed: list[Packed] = field(default_factory=list)
    tiles: dict[LoopOp, int] = field(default_factory=dict)
    plain: dict[LoopOp, StridedView] = field(default_factory=dict)
    # Kernel sizes of convolutions, operation by operation: a packed weight no longer shows them.
    kernel_sizes: dict[LoopOp, tuple[int, ...]] = field(default_factory=dict)


def strided_view(value: Value, layout: Strided | None = None) -> StridedView | None:
    """`value` as a strided view of one buffer, or None where it is something else. With `layout`, the buffer's: as a view of its memory."""
    if isinstance(value, Buffer):
        strides = contiguous_strides(value.shape) if layout is None else layout.strides
        return StridedView(value, value.shape, strides, 0)
    index = domain_vars(value.shape)
    expr = value.at(index)
    if not isinstance(expr, Load):
        return None
    offset = linear(expr.index, contiguous_strides(expr.buffer.shape) if layout is None else layout.strides)
    by_var = dict(offset.terms)
    if not all(isinstance(atom, LoopVar) for atom in by_var):
        return None
    strides = tuple(by_var.get(i.terms[0][0], 0) if i.terms else 0 for i in index)
    if not all(at_most(0, s) for s in strides):
        return None  # a flip: torch has no negative strides
    return StridedView(expr.buffer, value.shape, strides, offset.const)


def packed_conv_weight_value(w: Value, groups: int, block: int) -> Map:
    """`pack_conv_weight` as a value, for weights only known at run time (training)."""
    outputs, inputs, *kernel = map(known, w.shape)
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


def plain_view(op: MatMulOp, layouts: Mapping[Buffer, Layout], target: Target) -> StridedView | None:
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
    is_rows = k_stride == 1 and isinstance(k, int) and at_most(k, n_stride)
    if is_rows and reads_plain(m, k, n, target):
        return view
    is_columns = n_stride == 1 and isinstance(n, int) and at_most(n, k_stride)
    return view if is_columns and copies_panels(m, k, n, target) else None


def prepare(graph: LoopGraph, target: Target, layouts: Mapping[Buffer, Layout]) -> Prepared:
    """The graph with the operands of every matmul and convolution packed.

    `layouts`: how constants lie.
    """
    prepared = Prepared(graph)
    packer = _Packer(prepared)
    for op in graph.ops:
        if isinstance(op, MatMulOp) and (plain := plain_view(op, layouts, target)) is not None:
            prepared.plain[op] = plain
        elif isinstance(op, MatMulOp):
            tile = tile_n(op.out.shape[2], target)
            b = packer.pack(op.b, partial(pack_b, tile_n=tile), partial(packed_b_value, tile_n=tile), ("b", tile))
            op = replace(op, b=b)
            prepared.tiles[op] = tile
        elif isinstance(op, ConvOp):
            block = output_block(known(op.out.shape[1]), op.groups, target)
            kernel_size = tuple(map(known, op.w.shape[2:]))
            ahead = partial(pack_conv_weight, groups=op.groups, block=block)
            each_call = partial(packed_conv_weight_value, groups=op.groups, block=block)
            op = replace(op, w=packer.pack(op.w, ahead, each_call, ("w", block, op.groups)))
            prepared.tiles[op] = block
            prepared.kernel_sizes[op] = kernel_size
        packer.ops.append(op)
    prepared.graph = LoopGraph(graph.inputs, graph.outputs, graph.literals, tuple(packer.ops))
    return prepared


class _Packer:
    """Packs operands, equal ones once. `ops` grows by the packing that has to happen in every call."""

    def __init__(self, prepared: Prepared) -> None:
        self.ops: list[LoopOp] = []
        self._prepared = prepared
        self._known: dict[tuple[object, ...], Buffer] = {}

    def pack(
        self,
        operand: Value,
        ahead: Callable[[torch.Tensor], torch.Tensor],
        each_call: Callable[[Value], Map],
        how: tuple[object, ...],
    ) -> Buffer:
        view = strided_view(operand)
        identity = (operand,) if view is None else (view.buffer, view.shape, view.strides, view.offset)
        key = (*how, *identity)
        if key in self._known:
            return self._known[key]
        value = each_call(operand)
        constant = view is not None and view.buffer.constant and view.is_static
        buffer = self._known[key] = Buffer(value.shape, operand.dtype, "packed", constant=constant)
        if view is not None and constant:
            self._prepared.packed.append(Packed(buffer, view.buffer, view, ahead))
        else:
            self.ops.append(MapOp(buffer, value))
        return buffer
