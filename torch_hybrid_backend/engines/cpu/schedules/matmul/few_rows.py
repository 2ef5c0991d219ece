"""Few rows times a plain weight: C[m, n] = sum over k of A[m, k] * W[n, k] as dot products along k, as both lie in memory.

Pattern: a weight `InPlace` with less than a vector of rows: classifiers, decoding. W comes from memory, once: packed panels would come no
faster. Steps:
1. The rows of A are copied once for each task: they may be computed, or lie in any order.
2. A block is a vector's worth of W's rows; the last one overlaps the one before where the columns are not whole vectors.
3. A tile is up to four of them by all rows of A: a vector accumulator for each pair. What lies beyond the last whole vector of k is read as a
   vector that ends with k, masked. Meanwhile later rows of W are prefetched: a row is a stream that ends before the hardware has begun.
4. The accumulators of a row of A, a vector for each column of the block, are transposed and added: a vector along n for the epilogue.
Source: Van Zee & van de Geijn, "BLIS", 2015, level-1f `dotxf`: several dot products fused, so that the shared operand is loaded once.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.schedules.axes import offsets_of, step
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile, partials
from torch_hybrid_backend.engines.cpu.schedules.transposition import transposed
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES, Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import InPlace
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import known_int

_ITEMSIZE = 4
_LINE = LINE_BYTES // _ITEMSIZE  # elements of a cache line
_MAX_STREAMS = 4  # rows of W read at once


def emit(kernel: CpuMatMulKernel[InPlace], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body. float32; sizes are known; at least a vector of columns and of k."""
    return _DotRows(kernel, builder, printer, target).emit()


class _DotRows:
    """The emission of one kernel."""

    def __init__(self, kernel: CpuMatMulKernel[InPlace], builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.builder, self.printer = kernel, builder, printer
        self.b, self.m, self.n = kernel.domain
        self.rows, self.columns, self.depth = map(known_int, (self.m.extent, self.n.extent, kernel.k.extent))
        self.lanes, self.dtype = target.lanes, kernel.accumulator.dtype
        self.weight = printer.arguments[kernel.weight.buffer][0]
        self.blocks = -(-self.columns // self.lanes)
        self.tasks = min(target.cores, self.blocks)
        tall = (h for h in (_MAX_STREAMS, 2) if self.rows * h + min(self.rows, h) + 1 <= target.isa.registers)
        self.streams = next(tall, 1)
        # How many rows of W before its use a line is asked for: a block, or what a quarter of the second-level cache holds.
        held = max(1, target.l2_bytes // 4 // (_ITEMSIZE * self.depth))
        self.distance = max(_MAX_STREAMS, min(self.lanes, 1 << (held.bit_length() - 1)))
        self.copied = builder.workspace(self.rows * self.depth, self.dtype, "copied")

    def emit(self) -> Stmt:
        return self.builder.loop(self.tasks, self._task, "parallel", "task")

    def _task(self, task: Index) -> Stmt:
        """Multiply one task's share of W's rows."""
        b, lanes = self.builder, self.lanes
        first, end = task * self.blocks // self.tasks, (task + 1) * self.blocks // self.tasks
        count = b.variable("count", "int32")
        last = tir.const(self.columns - lanes, "int32")

        def block(inner: Index) -> Stmt:
            start = tir.minimum((b.index(first) + b.index(inner)) * b.size(lanes), last)
            column, bind = b.bound(start, self.columns - lanes + 1, "column")
            return b.seq(bind, self._block(column))

        return b.seq(
            b.bind(count, b.index(end) - b.index(first)),
            b.alloc_on_heap(self.copied),
            b.loop(self.rows, self._copy, name="row"),
            b.loop_until(count, -(-self.blocks // self.tasks), block, "block"),
        )

    def _copy(self, row: Index) -> Stmt:
        """copied[row, k] = A[row, k]."""
        b, lanes = self.builder, self.lanes
        along_k = all(step(offset, self.kernel.k) in (0, 1) for offset in offsets_of(self.printer, [self.kernel.a]))
        whole = self.depth // lanes if along_k else 0

        def element(k: Index) -> Stmt:
            env = {self.b: as_index(0), self.m: row, self.kernel.k: k}
            return b.store(self.copied, row * self.depth + k, self.printer.expr(self.kernel.a, env))

        def vector(i: Index) -> Stmt:
            return self.printer.vector_loop(lanes, lambda lane: element(i * lanes + lane))

        left = self.depth - whole * lanes
        rest = b.loop(left, lambda k: element(k + whole * lanes), name="k") if left else None
        return b.seq(b.loop(whole, vector, name="k") if whole else None, rest)

    def _block(self, column: Index) -> Stmt:
        """A vector's worth of columns from `column` on."""
        b, lanes = self.builder, self.lanes
        products = b.local(self.rows * lanes * lanes, self.dtype, "products")
        tiles = b.loop(lanes // self.streams, lambda tile: self._tile(products, column, tile), name="tile")
        rows = b.loop(self.rows, lambda row: self._finish(products, column, row), name="row")
        return b.seq(b.alloc(products), tiles, rows)

    def _tile(self, products: TirBuffer, column: Index, number: Index) -> Stmt:
        """Dot products of `streams` rows of W with every row of A: products[tile, row, stream, lane]."""
        b, lanes, stride = self.builder, self.lanes, self.kernel.weight.row_stride
        whole, left = divmod(self.depth, lanes)
        ways = RegisterTile.ways_for(self.rows * self.streams, whole)
        tile = RegisterTile(b, self.printer, self.rows, self.streams, lanes, self.dtype, ways)
        start = (column + number * self.streams) * stride + self.kernel.weight.offset

        def products_at(k: Index, way: int, first_lane: int = 0) -> Stmt | None:
            def w(stream: int, lane: Index) -> TirExpr:
                return masked(b.load(self.weight, start + k + stream * stride + lane), lane)

            def a(row: int, lane: Index) -> TirExpr:
                return masked(b.load(self.copied, row * self.depth + k + lane), lane)

            def masked(value: TirExpr, lane: Index) -> TirExpr:
                zero = tir.const(0, self.dtype)
                return tir.select(b.index(lane) >= first_lane, value, zero) if first_lane else value

            return tile.accumulate(partials(a, self.rows), partials(w, self.streams), way)

        lines = max(1, tile.unrolled(whole) * lanes // _LINE)
        places = [row * stride + line * _LINE for row in range(self.streams) for line in range(lines)]

        def ahead(i: Index) -> Stmt:
            following = start + self.distance * stride + i * (lines * _LINE)
            return b.seq(*[b.prefetch(self.weight, b.index(following + place)) for place in places])

        main = tile.steps(whole, lambda k, way: products_at(k * lanes, way), ahead)
        rest = products_at(as_index(self.depth - lanes), 0, lanes - left) if left else None
        spill = tile.spill(products, number * tile.size)
        return b.seq(tile.declare(), tile.clear(), main, rest, tile.merge(), spill)

    def _finish(self, products: TirBuffer, column: Index, row: Index) -> Stmt:
        """The sums of one row of A over a block's columns, and their stores."""
        b, lanes, streams = self.builder, self.lanes, self.streams
        vectors, binds = [], []
        for number in range(lanes):
            tile, stream = divmod(number, streams)
            place = row * (streams * lanes) + (tile * self.rows * streams + stream) * lanes
            vectors.append(b.variable("product", f"{self.dtype}x{lanes}"))
            load = b.load_vector(products, place, lanes)
            binds.append(b.bind(vectors[-1], load))
        parts = transposed(vectors)
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        out = b.local(lanes, self.dtype, "out")
        put = b.store_vector(out, 0, parts[0], lanes)

        def store(lane: Index) -> Stmt:
            value = b.load(out, lane)
            self.printer.locals[self.kernel.accumulator] = lambda _: value
            env = {self.b: as_index(0), self.m: row, self.n: column + lane}
            return self.printer.stores(self.kernel.stores, env)

        return b.seq(*binds, b.alloc(out), put, self.printer.vector_loop(lanes, store))
