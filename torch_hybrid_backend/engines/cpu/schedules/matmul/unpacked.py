"""Plain matmul: C[m, n] = sum over k of A[m, k] * W[n, k], with W read where the network keeps it: no packed copy of it exists.

Pattern: a weight `InPlace`. It computes the transposed product, the mirror image of `matmul`: rows of W are the scalars of the register
tiles, read along k as they lie, and it is A that is packed, once for each call. Steps:
1. Each task has a share of W's rows, and goes through A in groups of panels, of up to three vectors of rows, that fit half its second-level
   cache. It packs a group first, (panel, k, rows): squares of vectors are transposed in registers. Rows are padded to whole vectors with
   copies of the last one. Every task packs all of A: that costs about what sharing it does, a second launch and lines of another core's cache.
2. It takes its rows of W a vector's worth (a block) at a time, and multiplies them with every panel of the group: W is read once for each
   group. Meanwhile the next rows are prefetched, a share by every tile.
3. A tile is half a vector of W's rows by a panel (8 x 3 accumulators with AVX-512: 11 loads for 24 multiply-adds). k is cut so that its rows
   fit half the first-level cache; between the parts of k sums wait in memory.
4. Finished squares are transposed back, and the epilogue runs on vectors along n. What it reads besides is asked for by the tiles before it.
Where the columns are not whole vectors, the last block overlaps the one before (what both compute is equal).
Source: Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, which packs both operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.schedules.axes import offsets_of, step
from torch_hybrid_backend.engines.cpu.schedules.matmul import few_rows, panel_copy
from torch_hybrid_backend.engines.cpu.schedules.matmul.operand_prefetch import Operands
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile, by_part, partials
from torch_hybrid_backend.engines.cpu.schedules.transposition import transposed
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES, Target
from torch_hybrid_backend.engines.cpu.tile_sizes import Split, split_at_most
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import InPlace
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import known_int

_ITEMSIZE = 4
_LINE = LINE_BYTES // _ITEMSIZE  # elements of a cache line
_VECTORS = 3
_UNROLL = 4


def emit(kernel: CpuMatMulKernel[InPlace], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body. float32; sizes are known; at least a vector of columns. A weight laid out (K, N) is `panel_copy`' affair."""
    if kernel.weight.k_stride != 1:
        return panel_copy.emit(kernel, builder, printer, target)
    if known_int(kernel.domain[1].extent) < target.lanes <= known_int(kernel.k.extent):
        return few_rows.emit(kernel, builder, printer, target)
    return _UnpackedMatMul(kernel, builder, printer, target).emit()


@dataclass(frozen=True, slots=True)
class _Depth:
    """`parts` parts of k of `size` each, but for the last, of `last`."""

    parts: int
    size: int
    last: int


def _depth(extent: int, most: int) -> _Depth:
    parts = -(-extent // most)
    size = -(-extent // parts // _LINE) * _LINE
    parts = -(-extent // size)
    return _Depth(parts, size, extent - (parts - 1) * size)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of k: `size` steps from `start`."""

    start: Index
    size: int
    is_only: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of W's rows: the task's number `inner`; `first` is its first row, `ahead` where the rows to prefetch begin in W."""

    inner: Index
    first: Index
    ahead: TirExpr


class _UnpackedMatMul:
    """The emission of one kernel."""

    def __init__(self, kernel: CpuMatMulKernel[InPlace], builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.builder, self.printer = kernel, builder, printer
        self.b, self.m, self.n = kernel.domain
        self.rows, self.columns, self.k_extent = map(known_int, (self.m.extent, self.n.extent, kernel.k.extent))
        self.lanes = target.lanes
        self.height = self.lanes // 2
        self.dtype = kernel.accumulator.dtype
        self.weight = printer.arguments[kernel.weight.buffer][0]
        self.depth = _depth(self.k_extent, max(_LINE, target.l1_bytes // 2 // (self.height * _ITEMSIZE)))
        self.panels: Split = split_at_most(-(-self.rows // self.lanes), _VECTORS)
        fitting = max(1, target.l2_bytes // 2 // (self.panels.size * self.lanes * self.depth.size * _ITEMSIZE))
        self.groups = -(-self.panels.parts // fitting)
        self.per_group = -(-self.panels.parts // self.groups)
        self.blocks = -(-self.columns // self.lanes)
        self.tasks = min(target.cores, self.blocks)
        self.operands = Operands(printer, kernel.stores, kernel.domain)
        self.panel_size = self.panels.size * self.lanes * self.depth.size
        self.packed = self._array(self.per_group * self.panel_size, "packed")
        kept = 1 if self.depth.parts == 1 else -(-self.blocks // self.tasks) * self.per_group
        self.sums = self._array(kept * self.panels.size * self.lanes**2, "sums")

    def _array(self, size: int, name: str) -> TirBuffer:
        """An array on the heap."""
        return self.builder.workspace(size, self.dtype, name)

    def emit(self) -> Stmt:
        return self.builder.loop(self.tasks, self._task, "parallel", "task")

    # Packing A.

    def _pack(self, panel: Index, position: Index, part: _Part) -> Stmt:
        """Pack one panel, at `position` of the group's, for one part of k."""
        b, lanes = self.builder, self.lanes
        squares, left = divmod(part.size, lanes)
        place = position * self.panel_size

        def of_panel(first: Index, vectors: int) -> Stmt:
            def steps(k: Index, count: int) -> Stmt:
                at = place + k * (vectors * lanes)
                each = [self._square(first + v, part.start + k, count, at + v * lanes, vectors) for v in range(vectors)]
                return b.seq(*each)

            whole = b.loop(squares, lambda i: steps(i * lanes, lanes), name="k") if squares else None
            return b.seq(whole, steps(as_index(squares * lanes), left) if left else None)

        return by_part(b, self.panels, panel, of_panel)

    def _square(self, vector: Index, k: Index, count: int, place: Index, vectors: int) -> Stmt:
        """packed[place + i * vectors * lanes + lane] = A[row `lane` of `vector`, k + i], i from 0 to count - 1."""
        b, lanes, kernel = self.builder, self.lanes, self.kernel
        width = vectors * lanes

        def a(row: Index, step_of_k: Index) -> TirExpr:
            return self.printer.expr(kernel.a, {self.b: as_index(0), self.m: row, kernel.k: step_of_k})

        if count < lanes or not self._along_k():

            def element(i: Index, lane: Index) -> Stmt:
                row, bound = self._row(vector * lanes + lane)
                return b.seq(bound, b.store(self.packed, place + i * width + lane, a(row, k + i)))

            if self.rows % lanes:
                return b.nest((count, lanes), lambda index: element(*index))
            return b.loop(count, lambda i: self.printer.vector_loop(lanes, lambda lane: element(i, lane)), name="k")
        square = b.local(lanes * lanes, self.dtype, "square")
        rows, bounds = zip(*[self._row(vector * lanes + j) for j in range(lanes)], strict=True)

        def loads(lane: Index) -> Stmt:
            return b.seq(*[b.store(square, j * lanes + lane, a(rows[j], k + lane)) for j in range(lanes)])

        def put(i: int, column: TirExpr) -> Stmt:
            return self._put(self.packed, place + i * width, column)

        return b.seq(*bounds, b.alloc(square), self.printer.vector_loop(lanes, loads), self._transpose(square, put))

    def _along_k(self) -> bool:
        """True if A is read in vectors along k."""
        return all(step(offset, self.kernel.k) in (0, 1) for offset in offsets_of(self.printer, [self.kernel.a]))

    def _row(self, row: Index) -> tuple[Index, Stmt | None]:
        """A row of A, or the last one in place of one that is not there; and what must come before."""
        if self.rows % self.lanes == 0:
            return row, None
        limit = tir.const(self.rows - 1, "int32")
        return self.builder.bound(tir.minimum(self.builder.index(row), limit), self.rows, "row")

    def _transpose(
        self, square: TirBuffer, put: Callable[[int, TirExpr], Stmt], begin: Index | int = 0, stride: int = 0
    ) -> Stmt:
        """`put(j, column j)` for the square whose rows lie `stride` elements apart in a local array (0: dense)."""
        b, lanes = self.builder, self.lanes
        rows, binds = [], []
        for j in range(lanes):
            row = b.variable("row", f"{self.dtype}x{lanes}")
            place = as_index(begin) + j * (stride or lanes)
            binds.append(b.bind(row, b.load_vector(square, place, lanes)))
            rows.append(row)
        return b.seq(*binds, *[put(j, column) for j, column in enumerate(transposed(rows))])

    def _put(self, array: TirBuffer, start: Index, value: TirExpr) -> Stmt:
        return self.builder.store_vector(array, start, value, self.lanes)

    # The product.

    def _task(self, task: Index) -> Stmt:
        """Multiply one task's share of W's rows by all of A."""
        b, depth = self.builder, self.depth
        first, end = task * self.blocks // self.tasks, (task + 1) * self.blocks // self.tasks
        count = b.variable("count", "int32")
        own = -(-self.blocks // self.tasks)

        def group(number: Index) -> Stmt:
            panels = self.panels.parts - number * self.per_group
            held = tir.minimum(b.index(panels), tir.const(self.per_group, "int32"))

            def part(at: _Part) -> Stmt:
                pack = self._panels(held, lambda i: self._pack(number * self.per_group + i, i, at))
                blocks = b.loop_until(count, own, lambda i: self._block(first, i, count, at, number, held), "block")
                return b.seq(pack, blocks)

            one = depth.parts == 1
            last = part(_Part(as_index((depth.parts - 1) * depth.size), depth.last, one, True))
            if one:
                return last
            before = b.loop(
                depth.parts - 1, lambda p: part(_Part(p * depth.size, depth.size, False, False)), name="part"
            )
            return b.seq(before, last)

        return b.seq(
            b.bind(count, b.index(end) - b.index(first)),
            b.alloc_on_heap(self.packed),
            b.alloc_on_heap(self.sums),
            b.loop(self.groups, group, name="group"),
        )

    def _first_row(self, block: TirExpr) -> TirExpr:
        first = block * tir.const(self.lanes, "int32")
        return (
            first
            if self.columns % self.lanes == 0
            else tir.minimum(first, tir.const(self.columns - self.lanes, "int32"))
        )

    def _block(self, begin: Index, inner: Index, count: TirExpr, part: _Part, group: Index, held: TirExpr) -> Stmt:
        """A vector's worth of W's rows, by the panels of one group, over one part of k."""
        b, lanes = self.builder, self.lanes
        number, bind = b.bound(b.index(begin) + b.index(inner), self.blocks, "at")
        binds = [bind]
        first = number * lanes
        if self.columns % lanes:
            first, bind = b.bound(self._first_row(b.index(number)), self.columns - lanes + 1, "first")
            binds.append(bind)
        ahead = b.variable("ahead", "int32")
        next_start = as_index(0) if part.is_last else part.start + part.size
        stride = tir.const(self.kernel.weight.row_stride, "int32")
        following = tir.select(
            b.index(inner) + 1 < count,
            self._first_row(b.index(number) + 1) * stride + b.index(part.start),
            self._first_row(b.index(begin)) * stride + b.index(next_start),
        )
        binds.append(b.bind(ahead, following + tir.const(self.kernel.weight.offset, "int32")))
        block = _Block(inner, first, ahead)

        def panel(position: Index) -> Stmt:
            return by_part(
                b,
                self.panels,
                group * self.per_group + position,
                lambda vector, vectors: self._panel(block, position, vector, vectors, part),
            )

        return b.seq(*binds, self._panels(held, panel))

    def _panels(self, held: TirExpr, body: Callable[[Index], Stmt]) -> Stmt:
        """A loop over the panels of a group, which has `held`."""
        if self.groups * self.per_group == self.panels.parts:
            return self.builder.loop(self.per_group, body, name="panel")
        return self.builder.loop_until(held, self.per_group, body, "panel")

    def _panel(self, block: _Block, position: Index, vector: Index, vectors: int, part: _Part) -> Stmt:
        """The block by one panel: `vectors` vectors of rows from number `vector` on. `position`: the panel's in its group."""
        b, square = self.builder, self.lanes * self.lanes
        place = as_index(0)
        if not part.is_only:
            place = (block.inner * self.per_group + position) * (self.panels.size * square)
        halves = self.lanes // self.height

        def tile(half: Index) -> Stmt:
            return self._tile(block, position, half, vector, vectors, part, place)

        tiles = b.loop(halves, tile, name="half")
        if not part.is_last:
            return tiles
        ends = [self._finish(block, vector + v, place + v * self.lanes, vectors * self.lanes) for v in range(vectors)]
        return b.seq(tiles, *ends)

    def _tile(
        self, block: _Block, position: Index, half: Index, vector: Index, vectors: int, part: _Part, place: Index
    ) -> Stmt:
        """A register tile: half a block of W by one panel, of `vectors` vectors of rows from number `vector` on."""
        b, lanes, row = self.builder, self.lanes, half * self.height
        ways = RegisterTile.ways_for(self.height * vectors, part.size)
        tile = RegisterTile(b, self.printer, self.height, vectors, lanes, self.dtype, ways)
        stride, width = self.kernel.weight.row_stride, vectors * lanes
        weights = (block.first + row) * stride + part.start + self.kernel.weight.offset
        panel = position * self.panel_size

        def step_at(k: Index, way: int) -> Stmt | None:
            def scalar(r: int, _: Index) -> TirExpr:
                return b.load(self.weight, weights + k + r * stride)

            def values(v: int, lane: Index) -> TirExpr:
                return b.load(self.packed, panel + k * width + v * lanes + lane)

            return tile.accumulate(partials(scalar, self.height), partials(values, vectors), way)

        tiles = self.per_group * (lanes // self.height)
        share = -(-lanes // tiles)
        fetched = b.variable("fetched", "int32")
        number = position * (lanes // self.height) + half
        own = tir.minimum(b.index(number * share), tir.const(lanes - share, "int32"))
        bind = b.bind(fetched, block.ahead + own * tir.const(stride, "int32"))

        asked = vectors * self.height  # rows: the other half of the block asks for the others
        start = (as_index(0), vector * lanes + half * asked, block.first)

        def line(c: Index) -> Stmt:
            ahead = [b.prefetch(self.weight, fetched + b.index(c * _LINE + i * stride)) for i in range(share)]
            operands = self.operands.ahead(start, asked, 1, lanes, c, part.size // _LINE) if part.is_last else None

            def some(i: Index) -> Stmt:
                return b.seq(*[step_at(c * _LINE + i * _UNROLL + u, u % ways) for u in range(_UNROLL)])

            return b.seq(*ahead, operands, b.loop(_LINE // _UNROLL, some, name="k"))

        whole = part.size // _LINE
        rest = [step_at(as_index(whole * _LINE + u), u % ways) for u in range(part.size - whole * _LINE)]
        main = b.loop(whole, line, name="line") if whole else None

        begin = place + row * width

        def kept(r: int, v: int, lane: Index) -> TirExpr:
            return b.load(self.sums, begin + r * width + v * lanes + lane)

        restore = None if part.is_only else b.when(b.index(part.start) > 0, tile.fill(kept))
        return b.seq(
            bind, tile.declare(), tile.clear(), restore, main, *rest, tile.merge(), tile.spill(self.sums, begin)
        )

    def _finish(self, block: _Block, vector: Index, place: Index, stride: int) -> Stmt:
        """The stores of one square: the block's columns, a vector of rows."""
        b, lanes, kernel = self.builder, self.lanes, self.kernel
        out = b.local(lanes * lanes, self.dtype, "out")
        first = vector * lanes

        def row(r: Index) -> Stmt:
            def store(lane: Index) -> Stmt:
                value = b.load(out, r * lanes + lane)
                self.printer.locals[kernel.accumulator] = lambda _: value
                env = {self.b: as_index(0), self.m: first + r, self.n: block.first + lane}
                return self.printer.stores(kernel.stores, env)

            return self.printer.vector_loop(lanes, store)

        if self.rows % lanes == 0:
            stores = b.loop(lanes, row, name="r")
        else:
            held = tir.minimum(tir.const(self.rows, "int32") - b.index(first), tir.const(lanes, "int32"))
            stores = b.loop_until(held, lanes, row, "r")
        moves = self._transpose(self.sums, lambda j, v: self._put(out, as_index(j * lanes), v), place, stride)
        return b.seq(b.alloc(out), moves, stores)
