"""Register tiles: the accumulators of an outer-product microkernel, and how they are written out.

A tile has `rows` x `vectors` vector accumulators of `lanes` elements, all in registers: every access is at a constant position, so that
LLVM turns the local array into registers. `accumulate` adds `scalar[row] * vector[v]` to each; matmul, convolution and attention differ only
in what rows and vectors mean.

    tile = RegisterTile(builder, printer, rows=14, vectors=2, lanes=16, dtype="float32")
    b.seq(tile.declare(), tile.clear(), b.loop(K, lambda k: tile.accumulate(a_of(k), b_of(k))), tile.write(...))

Source: Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import tirx

from torch_hybrid_backend.engines.tvm.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.tvm.printer import Printer
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index

# lane index -> the scalar of that lane
LaneFn = Callable[[Index], TirExpr]


def lanes_of(target: Target, dtype: str) -> int:
    """Elements of a compute dtype in one vector register."""
    width = max(4, int(tvm.DataType(dtype).bits) // 8)
    return max(1, target.lanes * 4 // width)


def vector_loop(builder: Builder, printer: Printer, lanes: int, body: Callable[[Index], Stmt]) -> Stmt:
    """A vectorised loop whose variable the printer knows to be a lane."""

    def with_lane(lane: Index) -> Stmt:
        printer.lanes.update(atom for atom, _ in lane.terms if isinstance(atom, LoopVar))
        return body(lane)

    return builder.loop(lanes, with_lane, "vectorized", "l")


def zero(dtype: str) -> TirExpr:
    return tirx.const(0, dtype)


class RegisterTile:
    """`rows` x `vectors` accumulators of `lanes` elements of `dtype`; `ways` independent copies hide the latency of short tiles.

    With fewer accumulators than latency x width of the multiply-add units (8 on current x86 cores) one addition waits for the last:
    `accumulate(..., way=w)` adds to copy w, and `merge` sums the copies.
    """

    def __init__(
        self, builder: Builder, printer: Printer, rows: int, vectors: int, lanes: int, dtype: str, ways: int = 1
    ) -> None:
        self.builder, self.printer = builder, printer
        self.rows, self.vectors, self.lanes, self.dtype, self.ways = rows, vectors, lanes, dtype, ways
        self.size = rows * vectors * lanes
        self.buffer = builder.local(self.size * ways, dtype, "acc")

    def declare(self) -> Stmt:
        return self.builder.alloc(self.buffer)

    def _offset(self, row: int, vector: int, way: int = 0) -> int:
        return way * self.size + (row * self.vectors + vector) * self.lanes

    def _lanes(self, body: Callable[[Index], Stmt]) -> Stmt:
        return vector_loop(self.builder, self.printer, self.lanes, body)

    def at(self, row: int, vector: int, lane: Index) -> TirExpr:
        return self.builder.load(self.buffer, lane + self._offset(row, vector))

    def set(self, row: int, vector: int, lane: Index, value: TirExpr) -> Stmt:
        return self.builder.store(self.buffer, lane + self._offset(row, vector), value)

    def _each(self, body: Callable[[int, int, Index], Stmt], ways: int = 1) -> Stmt:
        return self._lanes(
            lambda lane: self.builder.seq(
                *[
                    body(row, vector, lane + way * self.size)
                    for way in range(ways)
                    for row in range(self.rows)
                    for vector in range(self.vectors)
                ]
            )
        )

    def clear(self) -> Stmt:
        return self._each(lambda row, vector, lane: self.set(row, vector, lane, zero(self.dtype)), self.ways)

    def fill(self, value: Callable[[int, int, Index], TirExpr]) -> Stmt:
        """acc[row, vector, lane] = value(row, vector, lane)."""
        return self._each(lambda row, vector, lane: self.set(row, vector, lane, value(row, vector, lane)))

    def accumulate(
        self,
        scalars: Sequence[LaneFn | None],
        vectors: Sequence[LaneFn],
        way: int = 0,
    ) -> Stmt | None:
        """acc[row, v] += scalars[row] * vectors[v], lane by lane; a row whose scalar is None is left alone."""
        if all(scalar is None for scalar in scalars):
            return None

        def body(lane: Index) -> Stmt:
            steps = []
            values = [vector(lane) for vector in vectors]
            for row, scalar in enumerate(scalars):
                if scalar is None:
                    continue
                left = scalar(lane)
                for v, value in enumerate(values):
                    position = lane + self._offset(row, v, way)
                    total = self.builder.load(self.buffer, position) + left * value
                    steps.append(self.builder.store(self.buffer, position, total))
            return self.builder.seq(*steps)

        return self._lanes(body)

    def merge(self) -> Stmt | None:
        """Sums the copies into the first."""
        if self.ways == 1:
            return None

        def value(row: int, vector: int, lane: Index) -> TirExpr:
            parts = [self.builder.load(self.buffer, lane + self._offset(row, vector, way)) for way in range(self.ways)]
            while len(parts) > 1:  # pairwise: half the latency, and half the rounding error
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            return parts[0]

        return self.fill(value)

    def spill(self, buffer: TirBuffer, offset: Index | int = 0) -> Stmt:
        """buffer[offset ...] = the tile, dense: row by row, vector by vector."""
        start = as_index(offset)
        return self._each(
            lambda row, vector, lane: self.builder.store(
                buffer, start + lane + self._offset(row, vector), self.at(row, vector, lane)
            )
        )

    def restore(self, buffer: TirBuffer, offset: Index | int) -> Stmt:
        """The inverse of `spill`."""
        start = as_index(offset)
        return self.fill(lambda row, vector, lane: self.builder.load(buffer, start + lane + self._offset(row, vector)))
