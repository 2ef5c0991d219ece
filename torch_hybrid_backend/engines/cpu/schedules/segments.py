"""Sums over segments, as of the rows of an embedding bag: accumulators of a piece of the result's row stay in registers over the segment.

Threads share the segments. A point's row comes from wherever its index says, so rows of later points are asked for ahead. A bag of L rows of D
elements reads L D elements of the table and writes D.
Source: FBGEMM's `EmbeddingSpMDM`, which prefetches rows in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch_hybrid_backend.engines.cpu.schedules.axes import Env, is_large
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import lanes_of
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES, Target
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr, converted
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, Scalar, as_index, index_of
from torch_hybrid_backend.loops.ir import INDEX_DTYPE, Buffer, FromIndex, Load, loads_of
from torch_hybrid_backend.loops.kernels import SegmentKernel, Store
from torch_hybrid_backend.sizes.size import known_int

_VECTORS = 8  # of accumulators
_AHEAD = 16  # points, whose rows are asked for


def emit(kernel: SegmentKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The loops of a kernel with at most one dimension besides the segments, whose size is known."""
    return _Segments(kernel, builder, printer, target).emit()


class _Segments:
    def __init__(self, kernel: SegmentKernel, builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.b, self.p = kernel, builder, printer
        self.segment, *rest = kernel.domain
        self.column = rest[0] if rest else None
        self.width = known_int(self.column.extent) if self.column is not None else 1
        self.dtype = kernel.value.dtype
        self.lanes = lanes_of(target, self.dtype)
        self.is_parallel = is_large(kernel, [kernel.value]) or not isinstance(kernel.point.extent, int)
        self.total = Buffer((), self.dtype, "total")

    def emit(self) -> Stmt:
        kind = "parallel" if self.is_parallel else "serial"
        return self.b.loop(self.segment.extent, self._of_segment, kind, "segment")

    def _of_segment(self, segment: Index) -> Stmt:
        b, env = self.b, {self.segment: segment}

        def use(values: list[TirExpr]) -> Stmt:
            most = self.kernel.point.extent + 1
            first, end = (converted(value, INDEX_DTYPE, b.address) for value in values)
            start, bind = b.bound(first, most, "first")
            behind, bind_end = b.bound(end, most, "end")
            step = self.lanes * _VECTORS
            pieces, rest = divmod(self.width, step)
            parts: list[Stmt | None] = [
                b.loop(pieces, lambda n: self._piece(env, start, behind, n * step, step), name="piece")
                if pieces
                else None,
                self._piece(env, start, behind, as_index(pieces * step), rest) if rest else None,
            ]
            return b.seq(bind, bind_end, *parts)

        return self.p.evaluate([self.kernel.first, self.kernel.end], env, use)

    def _piece(self, env: Env, first: Index, end: Index, column: Index, width: int) -> Stmt:
        """Elements column .. column + width - 1 of a segment's sum."""
        b, chunks = self.b, lane_chunks(width, self.lanes)
        sums = b.local(width, self.dtype, "sums")

        def each(body: Callable[[Index], Stmt]) -> Stmt:
            return b.seq(*[self.p.vector_loop(lanes, partial(_shifted, body, start)) for start, lanes in chunks])

        def at(position: Index, place: Index) -> Env:
            inside = {**env, self.kernel.point: position}
            return inside if self.column is None else {**inside, self.column: column + place}

        def add(position: Index) -> Stmt:
            def lane(place: Index) -> Stmt:
                def put(values: list[TirExpr]) -> Stmt:
                    return b.store(sums, place, b.load(sums, place) + values[0])

                return self.p.evaluate([self.kernel.value], at(position, place), put)

            return b.seq(self._ask(env, position, end, column, width), each(lane))

        def store(place: Index) -> Stmt:
            value = b.load(sums, place)
            self.p.locals[self.total] = lambda _: value
            index = (index_of(self.segment),) if self.column is None else (index_of(self.segment), column + place)
            return self.p.store(Store(self.kernel.out, index, self.total.at(())), env)

        count = tir.maximum(b.index(end) - b.index(first), b.size(0))
        return b.seq(
            b.alloc(sums),
            each(lambda place: b.store(sums, place, tir.const(0, self.dtype))),
            b.loop_until(count, self.kernel.point.extent, lambda i: add(first + i), "point"),
            each(store),
        )

    def _ask(self, env: Env, position: Index, end: Index, column: Index, width: int) -> Stmt | None:
        """Prefetches of the elements that a later point of the segment reads where an index says."""
        b = self.b
        gathered = [load for load in loads_of(self.kernel.value) if any(_is_data(i) for i in load.index)]
        if self.column is None or not gathered:
            return None
        later = tir.minimum(b.index(position) + b.size(_AHEAD), b.index(end) - b.size(1))
        ahead, bind = b.bound(later, self.kernel.point.extent, "ahead")
        asked = [
            self._ask_for(load, {**env, self.kernel.point: ahead, self.column: column}, width) for load in gathered
        ]
        return b.seq(bind, *asked)

    def _ask_for(self, load: Load, env: Env, width: int) -> Stmt:
        b, array = self.b, self.p.arguments[load.buffer][0]

        def use(values: list[TirExpr]) -> Stmt:
            binds, place = [], list(load.index)
            for d, value in zip(where, values, strict=True):
                place[d], bind = b.bound(converted(value, INDEX_DTYPE, b.address), load.buffer.shape[d], "row")
                binds.append(bind)
            offset = self.p.offset(load.buffer, tuple(place), env)
            lines = range(0, width, max(1, LINE_BYTES // tir.itemsize(str(array.dtype))))
            return b.seq(*binds, *[b.prefetch(array, b.index(offset + line), 1) for line in lines])

        where = [d for d, index in enumerate(load.index) if _is_data(index)]
        return self.p.evaluate([FromIndex(INDEX_DTYPE, load.index[d]) for d in where], env, use)


def _is_data(index: Index) -> bool:
    return any(isinstance(leaf, Scalar) for leaf in index.leaves())


def _shifted(body: Callable[[Index], Stmt], start: int, lane: Index) -> Stmt:
    return body(lane + start)
