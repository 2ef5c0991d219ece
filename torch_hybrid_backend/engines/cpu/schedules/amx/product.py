"""Products on AMX's tiles: C[b, m, n] = sum over k of A[b, m, k] * B[b, k, n], with B packed ahead in tiles.

Operands lie as `operands/amx_formats.py` says. Steps:
1. A task (`blocks`) configures the tile registers first, and releases them last. For each part of k it writes its rows of A as tiles (`rows`).
2. A's tiles are loaded with the hint that they will not be read again soon: without it they push B out of the first-level cache. The 2 x 2
   tiles of sums are registers 0 to 3; those of A are 4 and 5, those of B 6 and 7. Meanwhile a share of B's next panel is fetched into the
   second-level cache (a task of one panel of rows fetches what it reads next into the first), and where sums wait in memory, those of the next
   panel of rows into the first, to be written: stores to lines that are not there take longer than the products hide.
3. Tiles reach vectors through memory only: sums are stored to 4 KiB that the first-level cache holds, and the epilogue (`stores`) runs from
   there. Where k has several parts, the sums of a task wait in memory between them, and the epilogue follows the last.
4. A panel of rows that has numbers, in this part of k, for which products of parts are not exact, and a plain panel of B, are multiplied in
   float32 by vectors (`exact`): sums of both ways add up.
Sources: as `blocks`; Henry, Tang & Heinecke, ARITH 2019 (`amx_formats`).
"""

from __future__ import annotations

from functools import partial

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import PANEL, ROW_BYTES
from torch_hybrid_backend.engines.cpu.schedules.amx import instructions
from torch_hybrid_backend.engines.cpu.schedules.amx.blocks import LANES, Part, Products
from torch_hybrid_backend.engines.cpu.schedules.amx.exact import ExactProducts
from torch_hybrid_backend.engines.cpu.schedules.amx.rows import Lanes, TileRows
from torch_hybrid_backend.engines.cpu.schedules.amx.stores import PanelStores
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES, Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, as_index

# Panels of rows from which on A's tiles may pass the first-level cache.
_PASSING_ROWS = 4
# How far ahead one panel of rows, which reads every line of B once, asks for it, into the first-level cache: for the next panel it would ask
# as often, and a weight that is in the second-level cache already takes 1.5 times as long so (12 and 8 us for 1 MiB, 8 rows).
_NEAR_BYTES = 4096
# Panels of rows from which on sums are fetched: with fewer, B is fetched in so little time that nothing else should be.
_FETCHING_ROWS = 8


class TileProduct(TileRows):
    """The emission of one kernel."""

    def __init__(self, of: Products, builder: Builder, printer: Printer, target: Target) -> None:
        super().__init__(of, builder, printer, target)
        kernel = of.kernel
        column = kernel.domain[1] if isinstance(kernel, CpuConvKernel) else kernel.domain[2]
        # From one row of B's tiles to the next.
        self.b_row_bytes = ROW_BYTES
        self.a_passes = self._a_passes()
        self.packed = printer.arguments[kernel.weight.buffer][0]
        waiting = 1 if self.parts == 1 else self.block * self.group
        self.sums = builder.local(waiting * PANEL * PANEL, self.form.sums, "sums")
        # Sums of one panel of rows and one of columns: of one part of k, before they are added to those of the parts before; or those of all,
        # which the epilogue reads from here while the cache has them.
        self.near = builder.local(PANEL * PANEL, self.form.sums, "near")
        self.configuration = instructions.configuration(builder)
        self.exact = ExactProducts(self.part_elements, builder, printer)
        self.stores = PanelStores(kernel.stores, kernel.accumulator, column, self.n, builder, printer, target)

    # Tasks.

    def emit(self) -> Stmt:
        blocks, self.first_row_step = self.row_blocks()
        return self.builder.fused((self.batch, blocks, -(-self.column_panels // self.group)), self._task)

    def _task(self, position: tuple[Index, ...]) -> Stmt:
        b = self.builder
        batch, row, column = position[0], position[1] * self.first_row_step, position[2] * self.group
        last_steps = self.steps - (self.parts - 1) * self.part_steps
        last_start = (self.parts - 1) * self.part_steps
        last_elements = self.k - last_start * self.form.depth
        last = Part(as_index(self.parts - 1), as_index(last_start), last_steps, last_elements, is_last=True)

        def whole(number: Index) -> Stmt:
            part = Part(number, number * self.part_steps, self.part_steps, self.part_elements, is_last=False)
            return self._part(batch, row, column, part)

        return b.seq(
            # Memory first: where there is none, the kernel ends here, with no tiles configured.
            *map(b.alloc, self._arrays()),
            instructions.configure(b, self.configuration),
            self._before(batch, row),
            b.loop(self.parts - 1, whole, name="part") if self.parts > 1 else None,
            self._part(batch, row, column, last),
            instructions.release(),
        )

    def _arrays(self) -> list[TirBuffer]:
        """Declare a task's arrays."""
        arrays = [self.configuration, self.scratch, self.sums]
        if self.parts > 1:
            arrays.append(self.near)
        if self.form.splits:
            arrays += [self.is_outside, self.exact.a, self.exact.b]
        return arrays

    def _before(self, batch: Index, row: Index) -> Stmt | None:
        """Statements of a task before the first part of k."""
        return None

    def _part(self, batch: Index, row: Index, column: Index, part: Part) -> Stmt:
        """A part of k: the task's rows of A as tiles, and the products with its columns, with the kernel's stores behind the last part's."""

        def panel(r: Index, c: Index) -> Stmt:
            sums = self._products(batch, row, column, r, c, part)
            return self.builder.seq(sums, self._write(batch, row, column, r, c)) if part.is_last else sums

        def columns(c: Index) -> Stmt:
            return self.builder.seq(self._before_columns(column + c, part), self._each_row(row, lambda r: panel(r, c)))

        each = self._each(self.group, self._columns_in(column), columns, "column")
        return self.builder.seq(self._copies(batch, row, part), each)

    def _before_columns(self, panel: Index, part: Part) -> Stmt | None:
        """Statements of a task for a part of k, before a panel of columns is multiplied."""
        return None

    # Products.

    def _sums_at(self, r: Index, c: Index) -> Index:
        """The address of the 32 x 32 sums of a panel of rows and one of columns."""
        return as_index(0) if self.parts == 1 else (c * self.block + r) * (PANEL * PANEL)

    def _products(self, batch: Index, row: Index, column: Index, r: Index, c: Index, part: Part) -> Stmt:
        """The sums of a panel of rows and one of columns, with a part of k added."""
        b, panel = self.builder, self._panel_of(batch, column, c)
        by_tiles = b.seq(self._by_tiles_of_panel(batch, row, column, r, c, part), self._kept(self._sums_at(r, c), part))
        if not self.form.splits:
            return by_tiles
        is_outside, is_plain = b.load(self.is_outside, r) != 0, self._is_plain(panel)
        numbers = self._numbers(panel, part, False)
        if is_plain is not None:
            is_outside = tir.logical_or(is_outside, is_plain)
            numbers = b.when(is_plain, self._numbers(panel, part, True), numbers)
        return b.when(is_outside, self._by_vectors(batch, row, r, c, part, numbers), by_tiles)

    def _is_plain(self, panel: Index) -> TirExpr | None:
        """True if a panel of B is plain; None where none is."""
        count = self.b_batches * self.column_panels
        place = count * self.steps * self.panel_size + panel
        return self.builder.load(self.packed, place) != tir.const(0, "uint16")

    def _by_tiles_of_panel(self, batch: Index, row: Index, column: Index, r: Index, c: Index, part: Part) -> Stmt:
        """The products of a panel of rows and one of columns, in the registers of sums."""
        b, panel = self.builder, self._panel_of(batch, column, c)
        by_tiles = self._by_tiles(batch, row, r, panel, c, part, 2)
        if not self.has_half_panels():
            return by_tiles
        is_half = self.rows_of(row, r) <= tir.const(PANEL // 2, "int32")
        return b.when(is_half, self._by_tiles(batch, row, r, panel, c, part, 1), by_tiles)

    def _stored(self, array: TirBuffer, start: Index | int) -> list[Stmt]:
        """The registers of sums to memory."""
        places = {2 * i + j: start + (i * PANEL + j) * LANES for i in (0, 1) for j in (0, 1)}
        return [instructions.store(self.builder, tile, array, at, 4 * PANEL) for tile, at in places.items()]

    def _kept(self, sums: Index, part: Part) -> Stmt | None:
        """The registers of sums to their place in memory, or added to what is there where k has several parts.

        Of a panel of one tile of rows the other registers hold what was there before; no row of it is one of the result's.
        """
        b = self.builder
        stores = b.seq(*self._stored(self.sums, sums))
        if self.parts == 1 or not (self._adds_in_memory() or part.is_last):
            return stores
        near = b.seq(*self._stored(self.near, 0))
        if not self._adds_in_memory():
            return near
        return b.when(b.equal(part.number, 0), stores, b.seq(near, self._add(sums)))

    def _adds_in_memory(self) -> bool:
        """True if `sums` has the sums of all parts of k after the last one: elsewhere tiles add that to them, and `near` has them."""
        return self.parts == 1 or self.form.splits

    def _by_tiles(self, batch: Index, row: Index, r: Index, panel: Index, c: Index, part: Part, row_tiles: int) -> Stmt:
        """The products of `row_tiles` tiles of rows and two of columns, in the registers of sums."""
        b, sums = self.builder, self._sums_at(r, c)
        places = {2 * i + j: sums + (i * PANEL + j) * LANES for i in range(row_tiles) for j in (0, 1)}
        zeros = [instructions.zero(tile) for tile in places]
        before: list[Stmt] = zeros
        if self.parts > 1 and not self.form.splits:
            loads = [instructions.load(b, tile, self.sums, at, 4 * PANEL) for tile, at in places.items()]
            before = [b.when(b.equal(part.number, 0), b.seq(*zeros), b.seq(*loads))]

        def step(s: Index) -> Stmt:
            inner = self._step(r, panel, part, s, row_tiles)
            fetches = self._fetches(r, panel, c, part, s) + self._sum_fetches(sums, part, s)
            return b.seq(*spread(inner, fetches))

        return b.seq(*before, b.loop(part.steps, step, name="step"))

    def _step(self, r: Index, panel: Index, part: Part, s: Index, row_tiles: int) -> list[Stmt]:
        """The products of step `s` of a part of k, added to the registers of sums."""
        b, form, statements = self.builder, self.form, []
        held: tuple[int | None, int | None] = (None, None)
        for pair in form.products:
            if pair[0] != held[0]:
                statements += self._a_loads(r, part, s, pair[0], row_tiles)
            if pair[1] != held[1]:
                array, at, tile = self._b_at(panel, part, s, pair[1])
                statements += [instructions.load(b, 6 + j, array, at + j * tile, self.b_row_bytes) for j in (0, 1)]
            held = pair
            statements += [
                instructions.multiply(form.instruction, 2 * i + j, 4 + i, 6 + j)
                for i in range(row_tiles)
                for j in (0, 1)
            ]
        return statements

    def _a_passes(self) -> bool:
        """True if the first-level cache need not keep A's tiles: half of it is B's, which several panels of rows read. With less of B there is
        room for both, and tiles that pass are not fetched ahead by the processor."""
        is_full = self.part_steps * self.panel_size * self.form.itemsize >= self.target.l1_bytes // 2
        return is_full and self.block >= _PASSING_ROWS

    def _a_loads(self, r: Index, part: Part, s: Index, number: int, row_tiles: int) -> list[Stmt]:
        """Registers 4 and 5: the tiles of a panel of rows, of one step and of a part of the numbers."""
        at, apart = self.a_at(r, part, s, number), self.a_row
        row_bytes = apart * self.form.itemsize
        return [
            instructions.load(
                self.builder, 4 + i, self.scratch, at + i * LANES * apart, row_bytes, passing=self.a_passes
            )
            for i in range(row_tiles)
        ]

    def _b_at(self, panel: Index, part: Part, s: Index, number: int) -> tuple[TirBuffer, Index, int]:
        """The address of the first tile of a panel of columns, of one step and one part of the numbers, and the distance to the second in
        elements."""
        form = self.form
        at = (panel * self.steps + part.start + s) * self.panel_size + number * form.panel_elements
        return self.packed, at, form.panel_elements // 2

    def _add(self, sums: Index) -> Stmt:
        """The sums of a part of k to those of the parts before: rounded once, where tiles would round at every step."""
        b = self.builder

        def line(at: Index) -> Stmt:
            old = b.load(self.sums, sums + at)
            return b.store(self.sums, sums + at, old + b.load(self.near, at))

        return b.loop(
            PANEL * PANEL // LANES,
            lambda i: self.printer.vector_loop(LANES, lambda lane: line(i * LANES + lane)),
            name="sum",
        )

    def _fetches(self, r: Index, panel: Index, c: Index, part: Part, s: Index) -> list[Stmt]:
        """Prefetches of one step: a share of B's next panel, which behind the task's last column is that of its first and the next part.

        Of one panel of rows: as much of B as the step reads, a little ahead.
        """
        b, line = self.builder, LINE_BYTES // self.form.itemsize
        if self.block == 1:
            here = (panel * self.steps + part.start + s) * self.panel_size + _NEAR_BYTES // self.form.itemsize
            return [b.prefetch(self.packed, b.index(here + at), 1) for at in range(0, self.panel_size, line)]
        share = -(-self.panel_size // line // self.block)
        following = b.index(((panel + 1) * self.steps + part.start) * self.panel_size)
        if self.parts > 1:
            ends = tir.equal(b.index(panel % self.column_panels), tir.const(self.column_panels - 1, "int32"))
            is_last = tir.logical_or(ends, tir.equal(b.index(c), tir.const(self.group - 1, "int32")))
            next_part = ((panel - c) * self.steps + part.start + part.steps) * self.panel_size
            following = tir.select(is_last, b.index(next_part), following)
        places = [following + b.index(((r * part.steps + s) * share + i) * line) for i in range(share)]
        return [b.prefetch(self.packed, at, 2) for at in places]

    def _sum_fetches(self, sums: Index, part: Part, s: Index) -> list[Stmt]:
        """Prefetches of one step, where k has several parts: a share of the sums behind those of this panel, which are the next ones."""
        if self.parts == 1 or self.block < _FETCHING_ROWS:
            return []
        b, line = self.builder, LINE_BYTES // 4
        share = -(-(PANEL * PANEL // line) // part.steps)
        places = [sums + PANEL * PANEL + (s * share + i) * line for i in range(share)]
        return [b.prefetch(self.sums, b.index(at), 1, to_write=True) for at in places]

    def _by_vectors(self, batch: Index, row: Index, r: Index, c: Index, part: Part, numbers: Stmt) -> Stmt:
        """Multiply as `_by_tiles` does, in float32: A as it is, and B as `numbers` puts it together again."""

        def put(line: Index, at: Index, width: int, env: Lanes) -> Stmt:
            def value(lane: Index) -> TirExpr:
                return tir.const(0, "float32") if env is None else self.printer.expr(self.a, env(lane))

            return self.exact.row(line, at, width, value)

        has_sums = self.builder.index(part.number) > 0 if self.parts > 1 else None
        return self.builder.seq(
            self._rows(batch, row, r, part, put),
            numbers,
            self.exact.products(part.elements, self.sums, self._sums_at(r, c), has_sums),
        )

    def _numbers(self, panel: Index, part: Part, is_plain: bool) -> Stmt:
        """B's panel as float32, (k, 32 columns), from a plain panel or from the sums of parts."""

        def words(s: Index, number: int, at: Index) -> TirExpr:
            start = (panel * self.steps + part.start + s) * self.panel_size + number * self.form.panel_elements
            vector = self.builder.load_vector(self.packed, start + at, 2 * LANES)
            return tir.reinterpret(vector, f"uint32x{LANES}")

        return self.exact.columns(self.form, part.steps, words, is_plain)

    # The stores.

    def _write(self, batch: Index, row: Index, column: Index, r: Index, c: Index) -> Stmt:
        """The kernel's stores of a panel of rows and one of columns."""
        sums, at = (self.sums, self._sums_at(r, c)) if self._adds_in_memory() else (self.near, as_index(0))
        first = (column + c) * PANEL + self._first_column(batch)
        return self.stores.written(column + c, first, sums, at, partial(self.each_line, batch, row, r))

    def _first_column(self, batch: Index) -> Index:
        """The result's column of the first one of B."""
        return as_index(0)


def spread(statements: list[Stmt], among: list[Stmt]) -> list[Stmt]:
    """`statements`, each followed by its share of those that go `among` them."""
    count, found = len(statements), []
    for number, statement in enumerate(statements):
        found += [statement, *among[len(among) * number // count : len(among) * (number + 1) // count]]
    return found
