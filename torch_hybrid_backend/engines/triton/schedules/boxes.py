"""Boxes of memory: what the tensor memory accelerator (TMA) of an NVIDIA Hopper copies to shared memory of an operand, a tile at a time.

One thread asks for a whole tile: the others compute no addresses, and what lies beyond a tensor's edges arrives as zeros. A program makes a
descriptor of each tensor that it copies from, in memory that its launch lends (`Header.scratch_bytes`).

Source: NVIDIA, "CUDA Driver API", Tensor Map Object Management: what strides, extents and addresses may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_hybrid_backend.core.limits import MAX_ELEMENTS
from torch_hybrid_backend.engines.triton.printer import Printer
from torch_hybrid_backend.engines.triton.schedules.tilings import HALVES, width_of
from torch_hybrid_backend.loops.index import Index, LoopVar
from torch_hybrid_backend.loops.ir import Call, Expr, Load, loads_of, parts
from torch_hybrid_backend.loops.kernels import Argument, MatMulKernel
from torch_hybrid_backend.loops.layout import Strided, offset_of
from torch_hybrid_backend.sizes.size import Size, known_at_most

DESCRIPTOR_BYTES = 128  # CUtensorMap's
_UNIT = 16  # bytes: of strides, and of where a tensor begins
_DTYPES = (*HALVES, "float32")


@dataclass(frozen=True, slots=True)
class Box:
    """The elements that an operand reads by `load`, along `axes`, the slowest first and the contiguous one last, with `strides` in elements;
    from element `first` on. `blocks`: a tile's extents along these, by name; `starts`: where it begins, "" along the batch. `is_turned`: the
    tile lies the other way round in memory."""

    load: Load
    axes: tuple[LoopVar, ...]
    strides: tuple[int, ...]
    first: int
    blocks: tuple[str, ...]
    starts: tuple[str, ...]
    is_turned: bool

    def descriptor(self, printer: Printer) -> str:
        """The text that makes its descriptor."""
        base = printer.name_of(self.load.buffer)
        base = f"{base} + {self.first}" if self.first else base
        shape = ", ".join(printer.size(variable.extent) for variable in self.axes)
        return f"tl.make_tensor_descriptor({base}, [{shape}], {[*self.strides]}, [{', '.join(self.blocks)}])"

    def copy(self, printer: Printer, descriptor: str, outer: Mapping[LoopVar, Index]) -> str:
        """The text of the tile in which the step `step` along k is multiplied."""
        starts = [start or printer.index(outer[axis]).text for start, axis in zip(self.starts, self.axes, strict=True)]
        text = f"{descriptor}.load([{', '.join(starts)}])"
        if len(self.axes) == 3:
            text += f".reshape([{', '.join(self.blocks[1:])}])"
        return f"{text}.T" if self.is_turned else text


def boxes_of(
    e: Expr, reads: Sequence[Argument], batch: LoopVar, row: LoopVar, k: LoopVar, *, is_left: bool
) -> list[Box]:
    """The boxes that TMA can copy of what an operand over (batch, row, k) reads. `row`: m of the left one, n of the right one."""
    if any(isinstance(part, Call) and part.op == "guard" for part in parts([e])):
        return []  # what it reads exists under a condition
    layouts = {argument.buffer: argument.layout for argument in reads}
    found = []
    for load in dict.fromkeys(loads_of(e)):
        layout = layouts.get(load.buffer)
        if isinstance(layout, Strided) and (box := _box(load, layout, batch, row, k, is_left=is_left)) is not None:
            found.append(box)
    return found


def copies_both(kernel: MatMulKernel) -> bool:
    """True if TMA can copy of both operands all that has no fewer elements than they do."""
    if not all(known_at_most(argument.span, MAX_ELEMENTS) for argument in (*kernel.reads, *kernel.writes)):
        return False  # with addresses of 64 bits: where a copy begins is a number of 32
    batch, m, n = kernel.domain
    for e, row, is_left in ((kernel.a, m, True), (kernel.b, n, False)):
        copied = {box.load for box in boxes_of(e, kernel.reads, batch, row, kernel.k, is_left=is_left)}
        full = [load for load in loads_of(e) if {row, kernel.k} <= {*_variables(load)}]
        if not full or not copied.issuperset(full):
            return False
    return True


def _variables(load: Load) -> list[LoopVar]:
    return [leaf for index in load.index for leaf in index.leaves() if isinstance(leaf, LoopVar)]


def _box(load: Load, layout: Strided, batch: LoopVar, row: LoopVar, k: LoopVar, *, is_left: bool) -> Box | None:
    if load.buffer.by_value or load.buffer.dtype not in _DTYPES:
        return None
    offset = offset_of(layout, load.buffer.shape, load.index)
    strides = {atom: n for atom, n in offset.terms if isinstance(atom, LoopVar) and isinstance(n, int)}
    if len(strides) < len(offset.terms) or not {row, k} <= strides.keys() <= {batch, row, k}:
        return None
    last, other = (k, row) if strides[k] == 1 else (row, k)
    axes = (*[batch] * (batch in strides), other, last)
    if not isinstance(offset.const, int) or any(isinstance(axis.extent, Size) for axis in axes):
        return None
    outer, unit = [strides[axis] for axis in axes[:-1]], _UNIT // width_of(load.buffer.dtype)
    # No rows overlap, and a stride is a multiple of the one before it: the driver's own descriptors must be so.
    is_nested = strides[last] == 1 and known_at_most(last.extent, strides[other]) and outer[0] % strides[other] == 0
    if not is_nested or offset.const < 0 or any(n % unit for n in (*outer, offset.const)):
        return None
    if last is row and load.buffer.dtype == "float32":
        return None  # only halves are turned round on their way to the tensor cores
    block, start = ("ROWS", "row") if is_left else ("COLUMNS", "column")
    blocks, starts = (block, "DEPTH"), (start, "step * DEPTH")
    if last is row:
        blocks, starts = blocks[::-1], starts[::-1]
    many = len(axes) == 3
    return Box(
        load,
        axes,
        (*outer, 1),
        offset.const,
        (*["1"] * many, *blocks),
        (*[""] * many, *starts),
        is_left != (last is k),
    )
