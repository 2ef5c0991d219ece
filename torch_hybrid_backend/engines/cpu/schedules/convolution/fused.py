"""Convolutions one after the other, row by row: what lies between them never leaves the caches of a core.

Pattern: a `FusedConvKernel`, as in an inverted residual block: a 1x1 expansion, a depthwise convolution, a 1x1 projection.
engines/cpu/convolution_fusion.py says which convolutions are fused.

Strategy
1. One parallel loop over (image, strip of output rows), as many strips as keep all cores busy.
2. A task goes through its rows. For each it first has the stage before compute the rows that the window newly covers, all channels of
   them, and so on up to the first stage, which reads memory.
3. Between two stages lies a ring of rows: as many as the window is high, rounded up to a power of two. Row r is at position r mod that.
4. A row of a stage is computed as by the schedule of that convolution alone: the ring is to it a blocked tensor of few rows.

What a strip's first window covers is computed by both neighbours: the window's height less its stride, in rows, for each strip.
Source: Alwani et al., "Fused-Layer CNN Accelerators", MICRO 2016; for inverted residuals, line buffers of Sandler et al., CVPR 2018, 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, FusedConvKernel
from torch_hybrid_backend.engines.cpu.schedules.convolution.depthwise import depthwise_row
from torch_hybrid_backend.engines.cpu.schedules.convolution.direct import direct_row
from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import Axis
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import strips
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import Panels
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Buffer, Load
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.sizes.size import known_int

RowFn = Callable[[Index, Index], Stmt]


def emit(kernel: FusedConvKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body."""
    return _Chain(kernel, builder, printer, target).emit()


@dataclass(frozen=True, slots=True)
class _Ring:
    """Rows between two stages: their array, and the number of the next row to be computed, an int32 in memory."""

    array: TirBuffer
    next_row: TirBuffer


class _Chain:
    """The emission of one kernel."""

    def __init__(self, kernel: FusedConvKernel, builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.builder, self.target = kernel, builder, target
        self.rings: list[_Ring] = []
        arguments = dict(printer.arguments)
        stages = list(kernel.stages)
        for n in range(len(stages) - 1):
            layout = stages[n].writes[0].layout
            stages[n], stages[n + 1], between = _through_ring(stages[n], stages[n + 1])
            span = known_int(layout.span(between.shape))
            self.rings.append(_Ring(builder.local(span, between.dtype, "rows"), builder.local(1, "int32", "next")))
            arguments[between] = (self.rings[-1].array, layout)
        self.parts = [ConvParts(stage, builder, Printer(builder, arguments), target) for stage in stages]
        self.axes = [parts.rows.known() for parts in self.parts]
        self.rows: list[RowFn] = [depthwise_row(parts) or direct_row(parts) for parts in self.parts]

    def emit(self) -> Stmt:
        b, images, out = self.builder, self.kernel.domain[0].extent, self.axes[-1].out
        count = strips(images, out, self.target)
        height = -(-out // count)

        def task(at: tuple[Index, ...]) -> Stmt:
            image, first = at[0], at[1] * height

            def row(i: Index) -> Stmt:
                position, bind = b.bound(b.index(first + i), out, "row")
                return b.seq(bind, self._row(len(self.parts) - 1, image, position))

            here = tir.minimum(b.size(height), b.index(first * -1 + out)) if count * height > out else b.size(height)
            declared = [b.alloc(array) for ring in self.rings for array in (ring.array, ring.next_row)]
            return b.seq(*declared, *self._begin(first), b.loop_until(here, height, row, name="r"))

        return b.fused((images, -(-out // height)), task)

    def _begin(self, first: Index) -> list[Stmt]:
        """Sets the first row that each stage computes for a strip which begins at output row `first`."""
        b, low, found = self.builder, self.builder.index(first), []
        for n in reversed(range(len(self.rings))):
            axis = self.axes[n + 1]
            low = tir.maximum(low * axis.stride - axis.padding, b.size(0))
            found.append(b.store(self.rings[n].next_row, 0, low))
        return found

    def _row(self, stage: int, image: Index, row: Index) -> Stmt:
        """Compute one output row of a stage, after the rows that it needs."""
        before = None if stage == 0 else self._advance(stage - 1, image, row)
        return self.builder.seq(before, self.rows[stage](image, row))

    def _advance(self, stage: int, image: Index, row: Index) -> Stmt:
        """The rows of a stage that output row `row` of the next one is the first to need."""
        b, axis, ring = self.builder, self.axes[stage + 1], self.rings[stage]
        if axis.is_pointwise:
            return self._row(stage, image, row)
        end = tir.minimum(b.index(axis.source(row, axis.kernel - 1) + 1), b.size(axis.size))
        begin, bind = b.bound(b.load(ring.next_row, 0), axis.size + 1, "begin")

        def at(i: Index) -> Stmt:
            position, bound = b.bound(b.index(begin + i), axis.size, "row")
            return b.seq(bound, self._row(stage, image, position))

        loop = b.loop_until(end - b.index(begin), _window(axis), at, name="new")
        return b.seq(bind, loop, b.store(ring.next_row, 0, tir.maximum(end, b.index(begin))))


def _window(axis: Axis[int]) -> int:
    """Rows that one output row reads, those in between included."""
    return (axis.kernel - 1) * axis.dilation + 1


def _through_ring(
    first: CpuConvKernel[Panels], second: CpuConvKernel[Panels]
) -> tuple[CpuConvKernel[Panels], CpuConvKernel[Panels], Buffer]:
    """Both with a ring of rows in place of the tensor between them, and the ring."""
    (store,) = first.stores
    height = (second.kernel[0] - 1) * second.dilation[0] + 1
    rows = 1 << (height - 1).bit_length()
    _, channels, _, columns = store.buffer.shape
    ring = Buffer((1, channels, rows, columns), store.buffer.dtype, "rows")

    def place(index: tuple[Index, ...]) -> tuple[Index, ...]:
        return as_index(0), index[1], index[2] % rows, index[3]

    x = second.x
    assert isinstance(x, Load)
    return (
        dataclasses.replace(first, stores=(Store(ring, place(store.index), store.value),)),
        dataclasses.replace(second, x=Load(x.dtype, ring, place(x.index))),
        ring,
    )
