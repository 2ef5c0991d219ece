"""Packed operands: constants are packed ahead of calls, other values by an operation in every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from torch_hybrid_backend.core.program import Packing
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.index import LoopVar, contiguous_strides, linear
from torch_hybrid_backend.loops.ir import Buffer, Load, LoopOp, Map, MapOp, Value, domain_vars
from torch_hybrid_backend.loops.layout import Strided
from torch_hybrid_backend.loops.quantized import NARROW, bounded
from torch_hybrid_backend.sizes.size import Dim, Size, known_at_most


@dataclass(frozen=True, slots=True)
class StridedView:
    """A value that is a strided view of a buffer's logical row-major elements.

    `bounds`: the range that elements are clamped to, for integers of 8 bits alone; None: they are the buffer's.
    """

    buffer: Buffer
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim
    bounds: tuple[int, int] | None = None

    @property
    def is_static(self) -> bool:
        """True if sizes and strides are known ahead of any call."""
        return not any(isinstance(n, Size) for n in (*self.shape, *self.strides, self.offset))

    @property
    def is_constant(self) -> bool:
        """True if the view's elements are known ahead of any call."""
        return self.buffer.constant and self.is_static

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a tensor with the buffer's shape (any strides, beginning anywhere in its storage)."""
        sizes, strides = [int(n) for n in self.shape], [int(s) for s in self.strides]
        whole = tensor.contiguous()  # which may begin in the middle of its storage, as a piece of a parameter does
        view = whole.as_strided(sizes, strides, whole.storage_offset() + int(self.offset))
        return view if self.bounds is None else view.clamp(*self.bounds)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A constant buffer made ahead from a constant region input or literal, `source`: a view of it, packed by `ahead`."""

    buffer: Buffer
    source: Buffer
    view: StridedView
    ahead: Callable[[torch.Tensor], torch.Tensor]

    @property
    def pack(self) -> Packing:
        """Packs the source's tensor: returns the buffer's."""
        view, ahead = self.view, self.ahead
        seen = view.shape, view.strides, view.offset, view.bounds
        how = (*seen, self.buffer.shape, self.buffer.dtype, _named(ahead))
        return Packing(how, lambda tensor: ahead(view.of(tensor)))

    @property
    def made_of(self) -> tuple[object, ...]:
        """A hashable key of the source and the packing: constants with equal keys have equal tensors."""
        return self.source, self.pack

    def repacked(self, buffer: Buffer, ahead: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        """The same operand packed another way, into another buffer."""
        return Packed(buffer, self.source, self.view, ahead)


def _named(value: object) -> object:
    """A function with its bound arguments, hashable and comparable: two `functools.partial` objects are never equal."""
    if not isinstance(value, partial):
        return value
    keywords = sorted(value.keywords.items(), key=lambda item: item[0])
    named = tuple((name, _named(argument)) for name, argument in keywords)
    return _named(value.func), tuple(map(_named, value.args)), named


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A graph whose operations read operands as an engine's kernels want them.

    `packed`: constants that are packed ahead. `row_major`: buffers with that layout, among them all packed ones.
    """

    graph: LoopGraph
    packed: tuple[Packed, ...] = ()
    row_major: tuple[Buffer, ...] = ()


def strided_view(value: Value, layout: Strided | None = None) -> StridedView | None:
    """`value` as a strided view of one buffer; None if it is none. With `layout`, the buffer's: as a view of its memory.

    The value may clamp a constant of 8 bits: packing clamps it, too (`StridedView.bounds`).
    """
    if isinstance(value, Buffer):
        strides = contiguous_strides(value.shape) if layout is None else layout.strides
        return StridedView(value, value.shape, strides, 0)
    index = domain_vars(value.shape)
    expr, bounds = value.at(index), None
    if expr.dtype in NARROW and not isinstance(expr, Load):
        expr, bounds = bounded(expr)
    if not isinstance(expr, Load) or not (bounds is None or expr.buffer.constant):
        return None
    offset = linear(expr.index, contiguous_strides(expr.buffer.shape) if layout is None else layout.strides)
    by_var = dict(offset.terms)
    if not all(isinstance(atom, LoopVar) for atom in by_var):
        return None
    strides = tuple(by_var.get(i.terms[0][0], 0) if i.terms else 0 for i in index)
    if not all(known_at_most(0, s) for s in strides):
        return None  # a flip: torch has no negative strides
    return StridedView(expr.buffer, value.shape, strides, offset.const, bounds)


class OperandPacker:
    """Packs operands, equal ones once. `add` takes the graph's operations in order; those that pack in every call precede their readers."""

    def __init__(self) -> None:
        self._ops: list[LoopOp] = []
        self._packed: list[Packed] = []
        self._buffers: dict[tuple[object, ...], Buffer] = {}
        self._row_major: list[Buffer] = []

    def pack(
        self,
        operand: Value,
        ahead: Callable[[torch.Tensor], torch.Tensor],
        each_call: Callable[[Value], Map],
        how: tuple[object, ...],
    ) -> Buffer:
        """The buffer of an operand, packed by `ahead` if it is constant, else in every call as the value that `each_call` gives.

        `how` names the packing: operands are equal if they are the same view of one buffer, packed alike.
        """
        view = strided_view(operand)
        key = (*how, operand if view is None else view)
        if key in self._buffers:
            return self._buffers[key]
        value = each_call(operand)
        constant = view is not None and view.is_constant
        buffer = self._buffers[key] = Buffer(value.shape, value.dtype, "packed", constant=constant)
        if view is not None and constant:
            self._packed.append(Packed(buffer, view.buffer, view, ahead))
        else:
            self._ops.append(MapOp(buffer, value))
        return buffer

    def made_ahead(self, view: StridedView, ahead: Callable[[torch.Tensor], torch.Tensor], like: Buffer) -> Buffer:
        """A buffer of shape and dtype of `like`, which `ahead` packs from a constant view."""
        buffer = Buffer(like.shape, like.dtype, like.name, constant=True)
        self._packed.append(Packed(buffer, view.buffer, view, ahead))
        self._row_major.append(buffer)
        return buffer

    def keep_row_major(self, buffer: Buffer) -> None:
        """Require the row-major layout for a buffer of the graph that is no input."""
        self._row_major.append(buffer)

    def add(self, op: LoopOp) -> None:
        self._ops.append(op)

    def prepared(self, graph: LoopGraph) -> Prepared:
        """`graph` with the operations added here in place of its own."""
        whole = replace(graph, ops=tuple(self._ops))
        return Prepared(whole, tuple(self._packed), (*self._buffers.values(), *self._row_major))
