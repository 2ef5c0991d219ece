"""Row kernels: reductions over the same axes of one domain, and what is computed per row from them.

Pattern: per row, stages in order: softmax is reduce(max) -> map(exp) -> reduce(sum) -> store; a layer norm reduce(sum) -> scalar ->
reduce(sum of squares) -> store; pooling reduce(max) over a window -> store.

Strategy
1. The vector axis is the dimension along which most accesses go element by element.
2. It is reduced (softmax over the last dimension): one task per row; every stage runs along the row in vectors; a reduction
   keeps several vector accumulators, so that additions overlap, and combines them by halves at the end of the row.
   Where rows are fewer than cores and long, all threads share each row (`SplitRow`).
3. It is kept (pooling, means over rows or pixels, anything in NCHW16c): a task handles one vector of rows at once; reduced axes are serial
   loops inside, small windows unrolled; the accumulator is one vector, of a large window several.
4. A guard around an element (a window's padding) that does not depend on the lane becomes a branch around the vector step.
5. Values that later stages read stay in a buffer of the row.
6. Along a row the position of an extreme is found in two passes, both in vectors: the extreme, then the first position that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch_hybrid_backend.engines.cpu.schedules.axes import (
    Flat,
    chunks,
    depends,
    fastest,
    flatten,
    is_large,
    offsets_of,
    step,
)
from torch_hybrid_backend.engines.cpu.schedules.reduction.inner import Row, SplitRow
from torch_hybrid_backend.engines.cpu.schedules.reduction.outer import UNROLLED, VectorOfRows
from torch_hybrid_backend.engines.cpu.schedules.reduction.parts import EXTREMES
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import INDEX_DTYPE, Buffer, Expr, Load
from torch_hybrid_backend.loops.kernels import RowKernel, Stage
from torch_hybrid_backend.sizes.size import Size, known_less, product, size_hint

_NO_POSITION = (1 << 63) - 1
# Tasks a core gets at least, so that none waits long for the slowest.
_TASKS = 4


def emit(kernel: RowKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The loops of a row kernel."""
    return Rows(kernel, builder, printer, target).emit()


class Rows:
    """A row kernel that is being emitted."""

    def __init__(self, kernel: RowKernel, builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.b, self.p, self.target = kernel, builder, printer, target
        self.reduced = [kernel.domain[d] for d in kernel.axes]
        self.kept = [v for d, v in enumerate(kernel.domain) if d not in kernel.axes]
        self.exprs = [stage.value for stage in kernel.stages]
        self.offsets = offsets_of(printer, self.exprs)
        self.written = [printer.offset(s.store.buffer, s.store.index, {}) for s in kernel.stages if s.store]
        self.offsets += self.written
        self.kind = "parallel" if is_large(kernel, self.exprs) else "serial"

    def emit(self) -> Stmt:
        inner = fastest(self.offsets, self.kernel.domain)
        if inner is None:
            inner = max(self.kernel.domain, key=lambda v: size_hint(v.extent), default=None)
        if inner in self.reduced and known_less(inner.extent, self.target.lanes):
            # A window is too short for a vector: run along what is written instead.
            inner = fastest(self.written, self.kept) or inner
        if inner is None or inner in self.reduced:
            return self._along_rows(inner)
        return self._across_rows(inner)

    # The vector axis is reduced.

    def _along_rows(self, inner: LoopVar | None) -> Stmt:
        self.kernel = _without_positions(self.kernel)
        self.exprs = [stage.value for stage in self.kernel.stages]
        rest = [v for v in self.reduced if v is not inner and v.extent != 1]
        rest.sort(key=lambda v: -max((step(o, v) for o in self.offsets), default=0))
        flat = Flat(())
        if inner is not None:
            flat = flatten(inner, rest, [o for o in self.offsets if depends(o, inner)], self.exprs)
            rest = [v for v in rest if v not in flat.variables]
        kept = [v for v in self.kept if v.extent != 1]
        extents = [v.extent for v in kept]
        pieces = SplitRow.pieces(self, rest, flat) if self.kind == "parallel" else 1

        def row(place: tuple[Index, ...]) -> Stmt:
            return Row(self, dict(zip(kept, place, strict=True)), rest, flat).emit()

        def split(place: tuple[Index, ...]) -> Stmt:
            return SplitRow(self, dict(zip(kept, place, strict=True)), flat, pieces).emit()

        return self.b.fused(extents, row, self.kind) if pieces == 1 else self.b.fused(extents, split, "serial")

    # The vector axis is kept.

    def _across_rows(self, inner: LoopVar) -> Stmt:
        # A blocked dimension's lanes must not straddle blocks; vectors of that many lanes from 0 on do not.
        lanes = self.target.lanes
        whole = inner.extent // lanes
        vectors = LoopVar("vectors", whole)
        # As the result lies in memory, the largest steps outermost: channel blocks outside pixels. The other way round neighbouring
        # tasks are whole images apart, in one and the same set of the cache where an image is a multiple of a page.
        offset = self.written[0].substitute({inner: index_of(vectors) * lanes}) if self.written else as_index(0)
        others = [v for v in self.kept if v.extent != 1 and v is not inner]
        ordered = sorted([*others, vectors] if whole != 0 else others, key=lambda v: -step(offset, v))

        def at(variables: Sequence[LoopVar], place: tuple[Index, ...], base: Index | None, width: int) -> Stmt:
            env = dict(zip(variables, place, strict=True))
            first = base if base is not None else env.pop(vectors) * lanes
            return VectorOfRows(self, env, inner, first, width).emit()

        parts: list[Stmt] = []
        if whole != 0:
            parts.append(self._over(ordered, lambda place: at(ordered, place, None, lanes)))
        others = [v for v in ordered if v is not vectors]
        for chunk in chunks(self.b, inner.extent - whole * lanes, lanes if isinstance(whole, int) else lanes // 2):
            tail = partial(at, others, base=chunk.start + whole * lanes, width=chunk.width)
            parts.append(chunk.around(self.b, self._over(others, tail)))
        return self.b.seq(*parts)

    def _over(self, variables: Sequence[LoopVar], body: Callable[[tuple[Index, ...]], Stmt]) -> Stmt:
        """`body` at every point, in parallel; where rows are short the last loop is one task's, which then counts addresses up."""
        extents = [v.extent for v in variables]
        kind = self.kind if extents else "serial"
        outer, window = size_hint(product(extents[:-1])), product(v.extent for v in self.reduced)
        if outer < _TASKS * self.target.cores or isinstance(window, Size) or window > UNROLLED:
            return self.b.fused(extents, body, kind)
        return self.b.fused(
            extents[:-1], lambda place: self.b.loop(extents[-1], lambda last: body((*place, last))), kind
        )


def _without_positions(kernel: RowKernel) -> RowKernel:
    """The kernel with each argmax and argmin as two reductions: the extreme, then the first position where it is.

    A NaN is every extreme: where there is one, no other element is equal to the extreme, and the positions of NaNs count.
    """
    if not any(stage.combiner in EXTREMES for stage in kernel.stages):
        return kernel
    shape = tuple(v.extent for v in kernel.domain)
    index = tuple(map(index_of, kernel.domain))
    kept = tuple(i for d, i in enumerate(index) if d not in kernel.axes)
    position = as_index(0)
    for axis in kernel.axes:
        position = position * shape[axis] + index[axis]
    stages: list[Stage] = []
    for stage in kernel.stages:
        if stage.combiner not in EXTREMES:
            stages.append(stage)
            continue
        assert stage.local is not None
        value, dtype = stage.value, stage.value.dtype
        if not isinstance(value, Load):
            # Computed twice it might be rounded twice: a multiply-add here, a product and a sum there.
            held = Buffer(shape, dtype, "held")
            stages.append(Stage("map", held, value))
            value = Load(dtype, held, index)
        extreme = Buffer(stage.local.shape, dtype, "extreme")
        stages.append(replace(stage, local=extreme, value=value, combiner=EXTREMES[stage.combiner]))
        stages.append(replace(stage, value=_position_if(value, Load(dtype, extreme, kept), position), combiner="min"))
    return replace(kernel, stages=tuple(stages))


def _position_if(value: Expr, extreme: Expr, position: Index) -> Expr:
    found = ops.call("eq", value, extreme, dtype="bool")
    if ops.is_float(value.dtype):
        found = ops.call("or", found, ops.call("isnan", value, dtype="bool"), dtype="bool")
    return ops.where(found, ops.from_index(position), ops.const(_NO_POSITION, INDEX_DTYPE))
