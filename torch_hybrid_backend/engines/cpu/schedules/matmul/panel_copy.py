"""Matmul by panels that the kernel itself copies: C[m, n] = sum over k of A[m, k] * W[k, n], with no packed copy of W beside it.

Pattern: a weight `InPlace` that lies (K, N), so that a panel of columns is K pieces of whole vectors, each in another page.
The tiles are those of `matmul`; in addition:
1. Each task has a share of the panels, and room for two: the one it works on, and the next.
2. While the tiles of a panel run, each copies its share of the next one, a few rows before every chunk of its steps of k. So copying
   hides behind the multiply-adds. A task copies its first panel before it begins.
3. Rows are asked for some chunks before they are copied: memory takes as long as hundreds of multiply-adds to answer.
4. k is cut so that enough rows of A, which share the cost of a copy, fit half the second-level cache. Between the parts sums wait in memory.
Source: BLIS (Van Zee & van de Geijn, 2015), which packs in a pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.schedules.matmul.packed import Ahead, MatMul
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile, by_part
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import tile_n
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import InPlace
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import Dim, known_int

# Steps of k between two copies: 224 cycles with 14 x 2 accumulators.
_CHUNK = 16
# Chunks between asking for a row and copying it: 960 cycles with tiles of 10 rows, where memory takes 600 to 750.
_AHEAD = 6
# Rows of A that share a panel's copy: four instructions a vector are 2.5 % of their multiply-adds.
_SHARING_ROWS = 160


def emit(kernel: CpuMatMulKernel[InPlace], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body. float32; sizes are known; columns are whole panels (`tiles.copies_panels`)."""
    return _CopiedPanels(kernel, builder, printer, target).emit()


@dataclass(frozen=True, slots=True)
class _Turn:
    """A panel over one part of k: `size` steps from `start`. `place`: where it is held; `sums`: where its sums wait.

    `next_place`, `next_start`, `next_last`: where the next one is to be held, the number of its first element in W, and of its last row.
    """

    start: Index
    size: int
    is_last: bool
    place: Index
    sums: Index
    next_place: Index
    next_start: Index
    next_last: TirExpr


class _CopiedPanels(MatMul):
    """The emission of one kernel."""

    turn: _Turn  # whose tiles are being emitted

    def __init__(self, kernel: CpuMatMulKernel[InPlace], builder: Builder, printer: Printer, target: Target) -> None:
        width = tile_n(kernel.domain[2].extent, target)
        super().__init__(kernel, width, builder, printer, target)
        self.unpacked = kernel.weight
        self.weight = printer.arguments[kernel.weight.buffer][0]
        self.k_extent = known_int(kernel.k.extent)
        rows = min(known_int(self.m.extent), _SHARING_ROWS)
        parts = -(-self.k_extent // max(_CHUNK, target.l2_bytes // 2 // (4 * rows)))
        self.depth = min(self.k_extent, -(-self.k_extent // parts // _CHUNK) * _CHUNK)
        self.parts = -(-self.k_extent // self.depth)
        self.last_depth = self.k_extent - (self.parts - 1) * self.depth
        self.order = self._order()
        self.count = known_int(self.panels)
        self.tasks = min(self.target.cores, self.count)
        self.most = -(-self.count // self.tasks)
        self.room = self.depth * width
        self.held = self._array(2 * self.room, "held")
        # Of a block of rows, for every panel of a task.
        self.sums_size = self.order.per_block * self.order.rows.size * width
        self.sums = self._array(self.sums_size * self.most if self.parts > 1 else 1, "sums")

    def _array(self, size: int, name: str) -> TirExpr:
        return self.builder.workspace(size, self.dtype, name)

    def _fitting(self, rows: int) -> int:
        return max(1, self.target.l2_bytes // 2 // (rows * self.depth * 4))

    def emit(self) -> Stmt:
        return self.builder.loop(self.tasks, self._task, "parallel", "task")

    def _task(self, number: Index) -> Stmt:
        b = self.builder
        first = number * self.count // self.tasks
        held = b.variable("count", "int32")

        def part(block: Index, at: Index, size: int, is_last: bool) -> Stmt:
            return b.loop_until(
                held, self.most, lambda inner: self._turn(block, at, size, is_last, first, inner, held), "turn"
            )

        def block(at: Index) -> Stmt:
            last = part(at, as_index(self.parts - 1), self.last_depth, True)
            if self.parts == 1:
                return last
            return b.seq(b.loop(self.parts - 1, lambda p: part(at, p, self.depth, False), name="part"), last)

        begin = first * self.width + self.unpacked.offset
        arrays = [b.alloc_on_heap(array) for array in ([self.held, self.sums] if self.parts > 1 else [self.held])]
        return b.seq(
            b.bind(held, b.index((number + 1) * self.count // self.tasks) - b.index(first)),
            *arrays,
            b.loop(self.depth, lambda row: self._copy(row, begin, as_index(0)), name="row"),
            b.loop(self.order.blocks, block, name="block"),
        )

    def _turn(
        self, block: Index, part: Index, size: int, is_last: bool, first: Index, inner: Index, held: TirExpr
    ) -> Stmt:
        """The tiles of a block of rows by the task's panel number `inner`, of `held`, over one part of k."""
        b, order = self.builder, self.order
        panel, bind = b.bound(b.index(first) + b.index(inner), self.count, "panel")
        done = (b.index(block * self.parts + part)) * held + b.index(inner)
        odd, bind_odd = b.bound(done & tir.const(1, "int32"), 2, "odd")
        ends = b.index(inner) + 1 >= held
        following = tir.select(ends, b.index(first), b.index(panel) + 1)
        after = tir.const(0, "int32") if is_last else b.index(part) + 1
        row = tir.select(ends, after, b.index(part)) * tir.const(self.depth, "int32")
        begin = following * self.width + row * tir.const(self.unpacked.k_stride, "int32")
        limit = self.count * self.width + self.k_extent * self.unpacked.k_stride
        start, bind_start = b.bound(begin, limit, "next")
        last = b.variable("last", "int32")
        bind_last = b.bind(
            last, tir.minimum(tir.const(self.depth, "int32"), tir.const(self.k_extent, "int32") - row) - 1
        )
        turn = _Turn(
            part * self.depth, size, is_last, odd * self.room, inner * self.sums_size, (1 - odd) * self.room,
            start + self.unpacked.offset, last,
        )  # fmt: skip

        def tile(at: Index) -> Stmt:
            self.turn = turn
            number, ahead = block * order.per_block + at, Ahead(at, order.per_block, repeats=True)
            return by_part(
                b, order.rows, number, lambda row, rows: self._by_panel(as_index(0), row, rows, panel, ahead)
            )

        return b.seq(bind, bind_odd, bind_start, bind_last, b.loop(order.per_block, tile, name="tile"))

    def _tile(self, batch: Index, first: Index, rows: int, panel: Index, columns: Dim, ahead: Ahead) -> Stmt:
        b, turn = self.builder, self.turn
        ways = RegisterTile.ways_for(rows * self.vectors, turn.size)
        tile = RegisterTile(b, self.printer, rows, self.vectors, self.lanes, self.dtype, ways)
        place = turn.sums + ahead.tile * (self.order.rows.size * self.width)
        before = None
        if not (turn.is_last and self.parts == 1):
            restored = tile.restore(self.sums, place)
            before = restored if turn.is_last else b.when(b.index(turn.start) > 0, restored)
        start = (batch, first, panel * self.width)
        products = b.seq(tile.declare(), tile.clear(), before, self._products(tile, start, ahead))
        if not turn.is_last:
            return b.seq(products, tile.spill(self.sums, place))
        return b.seq(products, self._write(tile, batch, first, panel * self.width, columns))

    def _products(self, tile: RegisterTile, start: tuple[Index, Index, Index], ahead: Ahead) -> Stmt:
        """The tile's loop over its part of k, and its share of copying the next panel."""
        b, turn, (batch, first, _) = self.builder, self.turn, start

        def step(k: Index, way: int) -> Stmt | None:
            scalars = [lambda _, row=row: self._a(batch, first + row, turn.start + k) for row in range(tile.rows)]
            vectors = [lambda lane, at=v * self.lanes: self._held(k, lane + at) for v in range(self.vectors)]
            return tile.accumulate(scalars, vectors, way)

        size = min(_CHUNK, turn.size)
        chunks = turn.size // size
        share = -(-self.depth // (ahead.tiles * chunks))

        def chunk(at: Index) -> Stmt:
            copied = (ahead.tile * chunks + at) * share
            copies = []
            for i in range(share):
                row, bind = b.bound(tir.minimum(b.index(copied + i), turn.next_last), self.depth, "row")
                copies += [bind, self._fetch(row, share), self._copy(row, turn.next_start, turn.next_place)]
            # The last tiles have nothing to copy where shares do not come out even.
            copying = b.when(b.index(copied) <= turn.next_last, b.seq(*copies))
            operands = self._ahead(start, tile.rows, self.width, at, chunks) if turn.is_last else None
            return b.seq(copying, operands, tile.steps(size, lambda k, way: step(at * size + k, way)))

        left, done = turn.size - chunks * size, chunks * size
        rest = tile.steps(left, lambda k, way: step(k + done, way)) if left else None
        return b.seq(b.loop(chunks, chunk, name="chunk"), rest, tile.merge())

    def _held(self, k: Index, column: Index) -> TirExpr:
        return self.builder.load(self.held, self.turn.place + k * self.width + column)

    def _fetch(self, row: Index, share: int) -> Stmt:
        """Asks for the row that is copied `_AHEAD` chunks after this one: of the panel behind the next, where that has no such row."""
        b, later = self.builder, row + _AHEAD * share
        here = self.turn.next_start + later * self.unpacked.k_stride
        behind = here - (self.depth * self.unpacked.k_stride - self.width)
        start = b.variable("later", "int32")
        bind = b.bind(start, tir.select(b.index(later) < self.depth, b.index(here), b.index(behind)))
        return b.seq(
            bind, *[b.prefetch(self.weight, start + tir.const(v * self.lanes, "int32")) for v in range(self.vectors)]
        )

    def _copy(self, row: Index, start: Index, to: Index) -> Stmt:
        """Copy one row of the panel of W that begins at element `start` to its place in the panel held at `to`."""
        b = self.builder

        def vector(v: int) -> Stmt:
            def element(lane: Index) -> Stmt:
                at = lane + v * self.lanes
                value = b.load(self.weight, start + row * self.unpacked.k_stride + at)
                return b.store(self.held, to + row * self.width + at, value)

            return self.printer.vector_loop(self.lanes, element)

        return b.seq(*[vector(v) for v in range(self.vectors)])
