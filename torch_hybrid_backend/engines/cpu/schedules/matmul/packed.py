"""MatMul: C[b, m, n] = sum over k of A[b, m, k] * B[b, k, n], with B packed in panels of `tile_n` columns.

Pattern: a weight in `Panels`. Steps:
1. Rows are cut into register tiles as equal as can be (197 rows are 2 tiles of 14 and 13 of 13), so there is no ragged last tile, and of
   no more rows than the first-level cache holds lines of; columns are the panels of the packed B, the last of which computes only the
   vectors that hold columns.
2. Tiles are visited in the order (batch, block of rows, panel, tile of rows) by one parallel loop: a core keeps a panel of B in its
   second-level cache while it goes through the rows of the block, and the block of A stays there too.
3. In a tile, k runs outside an outer product held in registers; short tiles keep several copies to hide the latency of multiply-adds.
   While a panel is worked on, its tiles prefetch the next one, a share each: weights come from memory in every call of a network that
   is larger than the caches, and a core that waits for a panel's first tile loses a tenth of its time (128 rows).
4. The stores run from registers, or from a spilled tile where the epilogue is long or the panel is the ragged last one.
Where the number of rows is only known at run time, a variant for each height of tiles is compiled (`by_height`).
One column (matrix-vector with the vector on the right) is a dot product, vectorised over k.
Source: Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008; BLIS (Van Zee & van de Geijn, 2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.schedules.axes import Chunk, chunks, offsets_of, step
from torch_hybrid_backend.engines.cpu.schedules.matmul.operand_prefetch import Operands
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import (
    IN_FLIGHT,
    LaneFn,
    RegisterTile,
    by_height,
    by_part,
    has_long_epilogue,
    lanes_of,
    partials,
    tile_start,
)
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES, Target
from torch_hybrid_backend.engines.cpu.tile_sizes import Split, max_rows, split_at_most, split_into
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.dot import load_neighbours, load_word, load_words
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import Panels, Weight
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Load, compute_dtype, loads_of
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, function, size_hint

# Sets times line: that of x86's first-level caches is a page, for they are looked up before the address is translated.
_L1_WAY_BYTES = 4096

# With 28 accumulators and a long epilogue, LLVM 22 keeps 16 of them in memory while it multiplies (3136 x 384 x 96 with GELU: twice the time).
_LONG_EPILOGUE_ACCUMULATORS = 26


def emit(kernel: CpuMatMulKernel[Panels], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body. Any float or integer dtype; accumulates in the compute dtype of the accumulator's dtype."""
    return PackedMatMul(kernel, builder, printer, target).emit()


@dataclass(frozen=True, slots=True)
class _Order:
    """The order of tiles: `blocks` blocks of `per_block` row tiles; `rows` says how the rows are cut."""

    rows: Split
    blocks: int
    per_block: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """The tile that prefetches the next panel: tile number `tile` of about `tiles` that work on one panel. `repeats`: the first follows the
    last."""

    tile: Index
    tiles: int
    repeats: bool


class MatMul:
    """The emission of one kernel, whatever its weight's form: register tiles of rows by panels of `width` columns.

    With a `dot`, k is in words.
    """

    def __init__(
        self,
        kernel: CpuMatMulKernel[Weight],
        width: int,
        builder: Builder,
        printer: Printer,
        target: Target,
        dot: DotProduct | None = None,
    ) -> None:
        self.kernel, self.builder, self.printer, self.target = kernel, builder, printer, target
        self.width, self.dot = width, dot
        self.b, self.m, self.n = kernel.domain
        self.dtype = compute_dtype(kernel.accumulator.dtype)
        # Of a tile: along k, one element each, or one word.
        self.steps = kernel.k.extent if dot is None else kernel.k.extent // dot.group
        self.lanes = min(lanes_of(target, self.dtype), width)
        # Rows of a vector of sums, and its columns. Tiles are cut along `rows`: rows of A, or pairs of them.
        self.together = 1 if dot is None else dot.rows
        self.columns = self.lanes // self.together
        self.rows = ceil_div(self.m.extent, self.together)
        self.vectors = width // self.columns
        self.panels = ceil_div(self.n.extent, width)
        # Columns of the last panel; of one that is not whole where that is only known at run time.
        whole = self.n.extent // width if isinstance(self.n.extent, Size) else self.panels - 1
        self.last = self.n.extent - whole * width
        self.long_epilogue = has_long_epilogue(kernel.stores)
        self.operands = Operands(printer, kernel.stores, kernel.domain)
        # Steps that lie together in A are loaded a vector at a time.
        loads_vectors = target.isa.loads_apart and self.lanes > 1 and self.together == 1
        self.by_element = loads_vectors and self._lies_along_k()
        self.is_dot = dot is None and width == 1 and size_hint(kernel.k.extent) >= 2 * lanes_of(target, self.dtype)

    def emit(self) -> Stmt:
        if isinstance(self.rows, Size):
            return by_height(self.builder, self.rows, self._most_rows(), self.vectors, self._tiles_of)
        order = self._order()

        def tile(position: tuple[Index, ...]) -> Stmt:
            batch, block, panel, inner = position
            part = block * order.per_block + inner
            ahead = Ahead(inner, order.per_block, repeats=order.blocks > 1)
            return by_part(
                self.builder, order.rows, part, lambda first, count: self._by_panel(batch, first, count, panel, ahead)
            )

        return self.builder.fused((self.b.extent, order.blocks, self.panels, order.per_block), tile)

    def _tiles_of(self, rows: int) -> Stmt:
        """Every tile, `rows` rows each, where the number of rows is only known at run time."""
        b, parts = self.builder, ceil_div(self.rows, rows)
        blocks = function("max", ceil_div(parts, self._fitting(rows)), 1)
        per_block = ceil_div(parts, blocks)

        def tile(position: tuple[Index, ...]) -> Stmt:
            batch, block, panel, inner = position
            part = block * per_block + inner
            first, begin = tile_start(b, self.rows, rows, part)
            ahead = Ahead(inner, size_hint(per_block), repeats=size_hint(blocks) > 1)
            return b.when(b.index(part) < b.size(parts), b.seq(begin, self._by_panel(batch, first, rows, panel, ahead)))

        return b.fused((self.b.extent, blocks, self.panels, per_block), tile)

    def _most_rows(self) -> int:
        spare, vectors = 0 if self.dot is None else self.dot.registers, 1 if self.is_dot else self.vectors
        most = min(max_rows(vectors, self.target, spare, by_element=self.by_element), self._most_cached_rows())
        return min(most, _LONG_EPILOGUE_ACCUMULATORS // self.vectors) if self.long_epilogue else most

    def _most_cached_rows(self) -> int:
        """Rows of A whose cache lines find a place in the first-level cache beside those of a panel.

        Rows a multiple of 4 KiB apart (k a multiple of 1,024 float32) all compete for one set: of more rows than it has places every line is
        gone before its next element is read.
        """
        sets = [
            _L1_WAY_BYTES // math.gcd(_L1_WAY_BYTES, distance)
            for distance in self._row_distances()
            if distance >= LINE_BYTES
        ]
        return min(sets, default=_L1_WAY_BYTES) * max(1, self.target.l1_bytes // _L1_WAY_BYTES - 2)

    def _row_distances(self) -> list[int]:
        """Bytes from one row to the next of what A is computed from."""
        found = []
        for load in loads_of(self.kernel.a):
            if load.buffer in self.printer.arguments:
                itemsize = tir.itemsize(load.buffer.dtype)
                found.append(step(self.printer.offset(load.buffer, load.index, {}), self.m) * itemsize)
        return found

    def _lies_along_k(self) -> bool:
        """True if neighbours along k are neighbours in memory, in all that A is computed from."""
        return all(step(offset, self.kernel.k) in (0, 1) for offset in offsets_of(self.printer, [self.kernel.a]))

    def _fitting(self, rows: int) -> int:
        """Tiles of `rows` rows of A that fit half the second-level cache."""
        step_bytes = max(4, tir.itemsize(self.dtype)) * self.together**2  # a word, or two of twice its size
        return max(1, self.target.l2_bytes // 2 // (rows * max(1, size_hint(self.steps)) * step_bytes))

    def _order(self) -> _Order:
        """Rows per tile: the kernel's `schedule_rank` by estimated time; then blocks of rows that fit half the second-level cache."""
        m, tasks_per_row_tile = self.rows, size_hint(self.b.extent * self.panels)
        assert isinstance(m, int)
        most = self._most_rows()

        def time(rows: int) -> float:
            # Per step of k, in half cycles: a multiply-add each (two a cycle), or a load each (a broadcast is one), or the latency of a
            # short tile; the panel's vectors come from the second-level cache, at the cost of about a multiply-add for two.
            parts = -(-m // rows)
            mean = m / parts
            work = max(mean * self.vectors, mean + self.vectors, IN_FLIGHT) + self.vectors / 2
            return -(-(tasks_per_row_tile * parts) // self.target.cores) * work

        # Heights that cut the rows into as many tiles are one choice: the least height that does.
        heights = {split_at_most(m, rows).size: time(rows) for rows in range(min(m, most), 0, -1)}
        rows = self.builder.ranked_choice(heights)
        split = split_at_most(m, rows)
        blocks = -(-split.parts // self._fitting(split.size))
        per_block = -(-split.parts // blocks)
        if blocks * per_block > m:  # more parts than rows: too few rows to block
            return _Order(split, 1, split.parts)
        return _Order(split_into(m, blocks * per_block), blocks, per_block)

    def _by_panel(self, batch: Index, first: Index, rows: int, panel: Index, ahead: Ahead) -> Stmt:
        b, full = self.builder, self.width
        if isinstance(self.last, Size):
            return b.when(
                b.index(panel * full + full) <= b.size(self.n.extent),
                self._tile(batch, first, rows, panel, full, ahead),
                self._tile(batch, first, rows, panel, self.last, ahead),
            )
        if self.last == full:
            return self._tile(batch, first, rows, panel, full, ahead)
        if self.panels == 1:
            return self._tile(batch, first, rows, panel, self.last, ahead)
        return b.when(
            b.index(panel) < b.size(self.panels - 1),
            self._tile(batch, first, rows, panel, full, ahead),
            self._tile(batch, first, rows, as_index(self.panels - 1), self.last, ahead),
        )

    def _ahead(
        self, start: tuple[Index, Index, Index], rows: int, columns: Dim, turn: Index, turns: int
    ) -> Stmt | None:
        """Ask for a share of what the stores of a tile of `rows` rows and `columns` columns from `start` on read besides its sums."""
        lines = 1 if isinstance(columns, Size) else -(-columns // self.columns)
        return self.operands.ahead(start, rows, lines, self.columns, turn, turns)

    def _a(self, batch: Index, row: Index, k: Index) -> TirExpr:
        return self.printer.expr(self.kernel.a, {self.b: batch, self.m: row, self.kernel.k: k})

    def _tile(self, batch: Index, first: Index, rows: int, panel: Index, columns: Dim, ahead: Ahead) -> Stmt:
        """Compute one register tile: `rows` rows from `first`, the first `columns` columns of a panel."""
        raise NotImplementedError

    def _write(self, tile: RegisterTile, batch: Index, first: Index, column: Index, columns: Dim) -> Stmt:
        """The stores of a tile, straight from registers where the epilogue is short and all columns are real."""
        b, width = self.builder, tile.vectors * tile.lanes

        def store(value: Callable[[Index], TirExpr], row: Index, start: Index | int, lanes: int) -> Stmt:
            return self.printer.vector_loop(
                lanes, lambda lane: self._stores(value(lane), batch, row, column + lane + start)
            )

        if not self.long_epilogue and columns == width:
            return b.seq(
                *[
                    self._row(first + r, store(partial(tile.at, r, v), first + r, v * tile.lanes, tile.lanes))
                    for r in range(tile.rows)
                    for v in range(tile.vectors)
                ]
            )
        spilled = b.local(tile.size, self.dtype, "tile")

        def stores_of(r: Index) -> Stmt:
            def load(start: Index, lane: Index) -> TirExpr:
                return b.load(spilled, r * width + lane + start)

            def part(chunk: Chunk) -> Stmt:
                return chunk.around(b, store(partial(load, chunk.start), first + r, chunk.start, chunk.width))

            return self._row(first + r, b.seq(*[part(chunk) for chunk in chunks(b, columns, tile.lanes)]))

        return b.seq(b.alloc(spilled), tile.spill(spilled), b.loop(tile.rows, stores_of, name="r"))

    def _row(self, row: Index, stores: Stmt) -> Stmt:
        """The stores of a row of a tile, all of which exist here."""
        return stores

    def _stores(self, value: TirExpr, batch: Index, row: Index, column: Index) -> Stmt:
        """Every store of the kernel at one point of the domain, with `value` as the accumulator."""
        self.printer.locals[self.kernel.accumulator] = lambda _: value
        return self.printer.stores(self.kernel.stores, {self.b: batch, self.m: row, self.n: column})


class PackedMatMul(MatMul):
    """The emission of one kernel whose weight is packed ahead."""

    def __init__(self, kernel: CpuMatMulKernel[Panels], builder: Builder, printer: Printer, target: Target) -> None:
        self.weight = kernel.weight
        super().__init__(kernel, self.weight.width, builder, printer, target, self.weight.dot)
        self.is_batched = kernel.is_batched

    def _by_panel(self, batch: Index, first: Index, rows: int, panel: Index, ahead: Ahead) -> Stmt:
        if self.is_dot:
            return self._dot_tile(batch, first, rows)
        return super()._by_panel(batch, first, rows, panel, ahead)

    def _packed(self, batch: Index, panel: Index, k: Index, column: Index) -> TirExpr:
        packed = self.weight.buffer
        position = (batch if self.is_batched else as_index(0), panel, k, column)
        return self.printer.expr(Load(compute_dtype(packed.dtype), packed, position), {})

    def _tile(self, batch: Index, first: Index, rows: int, panel: Index, columns: Dim, ahead: Ahead) -> Stmt:
        b, dot, k_extent = self.builder, self.dot, self.steps
        vectors = self.vectors if isinstance(columns, Size) else -(-columns // self.lanes) * self.together
        ways = RegisterTile.ways_for(rows * vectors, k_extent)
        tile = RegisterTile(b, self.printer, rows, vectors, self.lanes, self.dtype, ways, by_element=self.by_element)

        def words_step(dot: DotProduct, k: Index, words: Sequence[TirExpr], way: int) -> Stmt | None:
            columns_of = [self._packed_words(batch, panel, k, v, dot) for v in range(vectors)]
            return tile.accumulate_words(words, columns_of, dot, way, one_by_one=dot.rows > 1)

        def scalars_step(k: Index, scalars: Sequence[LaneFn], way: int) -> Stmt | None:
            def packed(vector: int, lane: Index) -> TirExpr:
                return self._packed(batch, panel, k, lane + vector * self.lanes)

            return tile.accumulate(scalars, partials(packed, vectors), way)

        def step(k: Index, way: int) -> Stmt | None:
            if dot is not None:
                return words_step(dot, k, [self._word(batch, first + row, k, dot) for row in range(rows)], way)
            return scalars_step(k, partials(lambda row, _: self._a(batch, first + row, k), rows), way)

        def several(k: Index) -> Stmt:
            if dot is not None:
                loads = [self._word(batch, first + row, k, dot, self.lanes) for row in range(rows)]
                return tile.words_in_vectors(loads, lambda s, words: words_step(dot, k + s, words, s % ways))
            values = partials(lambda row, lane: self._a(batch, first + row, k + lane), rows)
            return tile.in_vectors(values, lambda s, scalars: scalars_step(k + s, scalars, s % ways))

        begin, prefetch = self._prefetching(tile, batch, panel, ahead)
        start = (batch, first, panel * self.width)

        def before(turn: Index) -> Stmt | None:
            operands = self._ahead(start, rows, columns, turn, size_hint(k_extent // tile.unrolled(k_extent)))
            if prefetch is None or operands is None:
                return operands if prefetch is None else prefetch(turn)
            return b.seq(prefetch(turn), operands)

        compute = b.seq(
            begin,
            tile.declare(),
            tile.clear(),
            self._start(tile, batch, panel),
            tile.reduce(k_extent, step, before, several),
        )
        return b.seq(compute, self._write(tile, batch, first, panel * self.width, columns))

    def _start(self, tile: RegisterTile, batch: Index, panel: Index) -> Stmt | None:
        """Begin the sums where they do not begin at zero: only the first copy may be overwritten."""
        start = self.weight.start
        if start is None:
            return None
        of_right = batch if self.is_batched else as_index(0)

        def value(row: int, vector: int, lane: Index) -> TirExpr:
            column = panel * self.width + (lane + vector * self.lanes)
            return self.printer.expr(Load("int32", start, (of_right, column)), {})

        return tile.fill(value)

    def _word_place(self, batch: Index, row: Index, k: Index, dot: DotProduct) -> tuple[TirBuffer, TirExpr]:
        """The array of A, and the place of a row's word in it."""
        load = self.kernel.a
        assert isinstance(load, Load)
        env = {self.b: batch, self.m: row, self.kernel.k: k * dot.group}
        array = self.printer.arguments[load.buffer][0]
        return array, self.builder.index(self.printer.offset(load.buffer, load.index, env))

    def _word(self, batch: Index, row: Index, k: Index, dot: DotProduct, count: int = 1) -> TirExpr:
        """A word of A in every lane, or `count` neighbours along k, as many as there are lanes."""
        array, offset = self._word_place(batch, row, k, dot)
        return load_word(array, offset, dot, self.lanes) if count == 1 else load_neighbours(array, offset, dot, count)

    def _packed_words(self, batch: Index, panel: Index, k: Index, vector: int, dot: DotProduct) -> TirExpr:
        packed = self.weight.buffer
        none = as_index(0)
        position = (batch if self.is_batched else none, panel, k, as_index(vector * self.columns), none)
        array = self.printer.arguments[packed][0]
        return load_words(array, self.builder.index(self.printer.offset(packed, position, {})), dot, self.lanes)

    def _prefetching(
        self, tile: RegisterTile, batch: Index, panel: Index, ahead: Ahead
    ) -> tuple[Stmt | None, Callable[[Index], Stmt] | None]:
        """A statement before a tile, and what goes before each of its unrolled steps: this tile's share of the next panel."""
        b, packed, k_extent = self.builder, self.weight.buffer, self.steps
        panels = self.panels * (self.b.extent if self.is_batched else 1)
        unroll = tile.unrolled(k_extent)
        # Lines of a panel for one unrolled step, and how many of them each of the tiles fetches.
        itemsize = tir.itemsize(packed.dtype)
        line = LINE_BYTES // itemsize
        step_elements = self.width * (1 if self.dot is None else self.dot.group)
        lines = -(-unroll * step_elements // line)
        if size_hint(panels) <= self.target.cores or size_hint(k_extent) < unroll:
            return None, None
        share = -(-lines // ahead.tiles)
        number = batch * self.panels + panel if self.is_batched else panel
        following = number + 1
        if ahead.repeats:
            following = following % panels
        # The last tiles ask again for what is there already, where tiles outnumber lines.
        each = k_extent // unroll * (share * line)
        start = b.variable("next", "int32")
        mine = tir.minimum(b.index(ahead.tile), tir.const(-(-lines // share) - 1, "int32")) * b.size(each)
        begin = b.bind(start, b.index(following * (k_extent * step_elements)) + mine)
        array = self.printer.arguments[packed][0]

        def prefetch(k: Index) -> Stmt:
            return b.seq(*[b.prefetch(array, start + b.index(k * (share * line) + i * line)) for i in range(share)])

        return begin, prefetch

    def _dot_tile(self, batch: Index, first: Index, rows: int) -> Stmt:
        """Compute one column: rows of A, read along k, times the only panel, which is a plain vector over k."""
        b, k_extent = self.builder, self.kernel.k.extent
        lanes = lanes_of(self.target, self.dtype)
        ways = (
            4
            if rows == 1 and size_hint(k_extent) >= 8 * lanes
            else 2
            if rows < 4 and size_hint(k_extent) >= 4 * lanes
            else 1
        )
        tile = RegisterTile(b, self.printer, rows, 1, lanes, self.dtype, ways)
        none = as_index(0)

        def step(k: Index, way: int) -> Stmt:
            def a(row: int, lane: Index) -> TirExpr:
                return self._a(batch, first + row, k + lane)

            return tile.accumulate(partials(a, rows), [lambda lane: self._packed(batch, none, k + lane, none)], way)

        chunk = ways * lanes
        whole = k_extent // chunk
        left = k_extent - whole * chunk
        main = b.loop(whole, lambda k: b.seq(*[step(k * chunk + w * lanes, w) for w in range(ways)]), name="k")
        spilled = b.local(tile.size, self.dtype, "tile")

        def row(r: Index) -> Stmt:
            total = b.local(1, self.dtype, "sum")

            def add(value: TirExpr) -> Stmt:
                return b.store(total, 0, b.load(total, 0) + value)

            def rest(k: Index) -> Stmt:
                at = k + whole * chunk
                return add(self._a(batch, first + r, at) * self._packed(batch, none, at, none))

            return b.seq(
                b.alloc(total),
                b.store(total, 0, tir.const(0, self.dtype)),
                b.loop(lanes, lambda lane: add(b.load(spilled, r * lanes + lane)), name="l"),
                b.loop(left, rest, name="k") if left != 0 else None,
                self._stores(b.load(total, 0), batch, first + r, none),
            )

        return b.seq(
            tile.declare(), tile.clear(), main, tile.merge(),
            b.alloc(spilled), tile.spill(spilled), b.loop(rows, row, name="r"),
        )  # fmt: skip
