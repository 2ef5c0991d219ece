"""Matmul by AMX: C[b, m, n] = sum over k of A[b, m, k] * B[b, k, n], with B packed ahead in tiles.

Pattern: a `TileMatMulKernel`. Operands lie as `cpu/amx_formats.py` says. Steps:
1. A task has a block of rows and a group of columns, both in panels of 32. It configures the tile registers first, and releases them last.
2. k is cut into parts. For each part the task writes its rows of A as tiles to scratch memory: any expression, rounded to bfloat16, or split
   into several. What is beyond the last k is zero; rows beyond the last are never written, nor are sums of them stored. Tiles are not loaded
   from where rows lie, not even bfloat16: rows are often a multiple of 2 KiB apart, and then all of a tile is in a few sets of the caches.
3. A panel of B stays in the first-level cache while the panels of A go by, which come from the second: loading both from there takes half as
   long again as multiplying. So parts are short, A's tiles are loaded with the hint that they will not be read again soon (without it they
   push B out), and a task is as large as leaves its sums and its part of A room in the second. The 2 x 2 tiles of sums are registers 0 to 3;
   those of A are 4 and 5, those of B 6 and 7. Meanwhile a share of B's next panel is fetched into the second-level cache, and where sums
   wait in memory, those of the next panel of rows into the first, to be written: stores to lines that are not there take longer than the
   products hide.
4. Tiles reach vectors through memory only: sums are stored to 4 KiB that the first-level cache holds, and the epilogue runs from there. Where k
   has several parts, the sums of a task wait in memory between them, and the epilogue follows the last. What the epilogue computes from the
   column alone, it computes once for a panel of rows.
5. Operands of float32 are split into parts, and the numbers of A are looked at on the way. A panel of rows that has one, in this part of k, for
   which products of parts are not exact, and a plain panel of B, are multiplied in float32 by vectors: sums of both ways add up.
Sources: Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008; Henry, Tang & Heinecke, ARITH 2019 (`amx_formats`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from torch_hybrid_backend.engines.tvm.cpu.amx_formats import FORMATS, PANEL, ROW_BYTES, TileFormat
from torch_hybrid_backend.engines.tvm.cpu.kernels import DequantizedMatMulKernel, TileConvKernel, TileMatMulKernel
from torch_hybrid_backend.engines.tvm.cpu.tiles import lane_chunks
from torch_hybrid_backend.engines.tvm.schedules import amx_tiles
from torch_hybrid_backend.engines.tvm.schedules.float_parts import FloatParts
from torch_hybrid_backend.engines.tvm.schedules.registers import RegisterTile, partials
from torch_hybrid_backend.engines.tvm.schedules.vector_stores import stored_vector
from torch_hybrid_backend.engines.tvm.target import LINE_BYTES, Target
from torch_hybrid_backend.engines.tvm.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.tvm.tir.printer import Printer
from torch_hybrid_backend.engines.tvm.tir.storage import narrow, storage_dtype
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, Call, Expr, Load, parts
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.loops.layout import offset_of
from torch_hybrid_backend.loops.scales import depends_on_column_alone
from torch_hybrid_backend.sizes.size import known_int

_LANES = 16  # of a vector, and rows, and columns of words, of a tile
_TILE_CYCLES = 16
# Steps of k in one part of float32, 768 elements; fewer than the second number are not cut.
PART_STEPS, _WHOLE_STEPS = 24, 32
# Steps that a part of k of the other formats may have, where it has several.
_PART_LENGTHS = (12, 16)
# Bytes a cycle that tiles are loaded from the second-level cache; the share of the first that a panel of B may take to stay there while panels
# of A go by; the share of the second that sums and A's tiles may take.
_L2_BYTES, _L1_SHARE, _L2_SHARE = 40.0, 0.7, 0.51
# Cycles to read or write a byte beyond the second-level cache, which a core partly hides.
_BYTE_CYCLES = 0.06
# The same for sums, which are read and written while nothing else is.
_SUM_CYCLES = 0.1
# Panels of rows from which on A's tiles may pass the first-level cache.
_PASSING_ROWS = 4
# Panels of rows from which on sums are fetched: with fewer, B is fetched in so little time that nothing else should be.
_FETCHING_ROWS = 8
# Rows that share what is made of a panel of B for a product by vectors.
_EXACT_ROWS = 8


def emit(kernel: TileMatMulKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body."""
    return TileMatMul(kernel, FORMATS[kernel.format], builder, printer, target).emit()


# Of a vector's piece of A: when it is there, None for always (elsewhere it is zero), and what the kernel's variables are at each lane.
Piece = tuple[TirExpr | None, Callable[[Index], Mapping[LoopVar, Index]]]


@dataclass(frozen=True, slots=True)
class Part:
    """Steps of k: `steps` from number `start` on, `elements` of k in all; `number` says which part it is."""

    number: Index
    start: Index
    steps: int
    elements: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class RowsInMemory:
    """Rows of A that lie along k in one array, as tiles have them; `at(batch, m, k)` is the place of an element."""

    array: TirBuffer
    at: Callable[[Index, Index, Index], Index]


class TileProduct:
    """The emission of one kernel: products of (batch, m, k) by (batch or 1, k, n), whose A is the expression `a`."""

    def __init__(
        self,
        kernel: TileMatMulKernel | TileConvKernel | DequantizedMatMulKernel,
        form: TileFormat,
        a: Expr,
        sizes: tuple[int, int, int, int],
        builder: Builder,
        printer: Printer,
        target: Target,
    ) -> None:
        self.kernel, self.a, self.builder, self.printer, self.target = kernel, a, builder, printer, target
        self.form = form
        self.batch, self.m, self.k, self.n = sizes
        self.b_batches = self._b_batches()
        self.column = kernel.domain[1] if isinstance(kernel, TileConvKernel) else kernel.domain[2]
        self.row_panels, self.column_panels = -(-self.m // PANEL), -(-self.n // PANEL)
        self.steps = self.form.steps(self.k)
        self.panel_size = self.form.parts * self.form.panel_elements  # of one step
        self.a_row = self._row_elements()
        self.rows = self._rows_in_memory()
        self.part_steps, self.block, self.group = self._tiling()
        self.parts = -(-self.steps // self.part_steps)
        self.a_passes = self._a_passes()
        self.packed = printer.arguments[kernel.packed][0]
        self.scratch = builder.local(self._scratch_size(), storage_dtype(self.form.a_dtype), "a")
        waiting = 1 if self.parts == 1 else self.block * self.group
        self.sums = builder.local(waiting * PANEL * PANEL, self.form.sums, "sums")
        # Sums of one panel of rows and one of columns: of one part of k, before they are added to those of the parts before; or those of all,
        # which the epilogue reads from here while the cache has them.
        self.near = builder.local(PANEL * PANEL, self.form.sums, "near")
        self.configuration = amx_tiles.configuration(builder)
        # Of each panel of A: whether it is to be multiplied by vectors. For that, a panel of A as numbers, (32, k), and one of B, (k, 32).
        self.is_outside = builder.local(self.block, "int32", "outside")
        self.part_elements = self.part_steps * self.form.depth
        self.a_numbers, self.b_numbers = (
            builder.local(self.part_elements * PANEL, "float32", name) for name in ("a_numbers", "b_numbers")
        )

    def _b_batches(self) -> int:
        """How many B there are: the rows of batch i are multiplied by number i modulo them."""
        return 1

    def _rows_in_memory(self) -> RowsInMemory | None:
        """Where rows of A lie along k as they are multiplied; None where that is not simply in an array."""
        return None

    def piece(self, env: dict[LoopVar, Index], unit: Index, within: int) -> Piece:
        """Elements of a row of A from `16 * unit + within` of k on, of one unit."""
        raise NotImplementedError

    def _a_passes(self) -> bool:
        """Whether the first-level cache need not keep A's tiles: half of it is B's, which several panels of rows read. With less of B there is
        room for both, and tiles that pass are not fetched ahead by the processor."""
        is_full = self.part_steps * self.panel_size * self.form.itemsize >= self.target.l1_bytes // 2
        return is_full and self.block >= _PASSING_ROWS

    def _row_elements(self) -> int:
        """Elements from one row of A's tiles to the next."""
        return self.form.depth

    def _scratch_size(self) -> int:
        """Elements of a task's A."""
        return self.block * self.part_steps * self.panel_size

    def row_blocks(self) -> tuple[int, int]:
        """How many blocks of rows there are, and what a task's first row is a multiple of."""
        return -(-self.row_panels // self.block), self.block

    def _groups(self) -> list[int]:
        """Numbers of column panels that a task may have."""
        counts = (1, 2, 4, 8, 16, 32, 64, self.target.cores)
        return sorted({-(-self.column_panels // count) for count in counts if count <= self.column_panels})

    def _tiling(self) -> tuple[int, int, int]:
        """Steps of a part of k, and panels of rows and of columns of one task: the kernel's `schedule_rank` by estimated time."""
        step_bytes = self.form.itemsize * self.panel_size
        estimates: dict[tuple[int, int, int], float] = {}
        for steps in self._part_lengths():
            # Half of the cache: beside A's tiles there are panels of B, and what is read and written.
            most = max(1, self.target.l2_bytes // 2 // (steps * step_bytes))
            fewest = -(-self.row_panels // most)
            counts = {-(-self.row_panels // count) for count in range(fewest, min(self.row_panels, 4 * fewest) + 1)}
            for block in sorted(counts, reverse=True):
                for group in self._groups():
                    tasks = self.batch * -(-self.row_panels // block) * -(-self.column_panels // group)
                    cycles = self._copy_cycles(block) + self._product_cycles(steps, block, group)
                    estimates[steps, block, group] = -(-tasks // self.target.cores) * cycles
        return self.builder.ranked_choice(estimates)

    def _part_lengths(self) -> list[int]:
        """Steps of k that a part may have."""
        if self.form.splits:
            return [self.steps if self.steps <= _WHOLE_STEPS else -(-self.steps // -(-self.steps // PART_STEPS))]
        counts = {1, *(-(-self.steps // length) for length in _PART_LENGTHS)}
        return sorted({-(-self.steps // count) for count in counts}, reverse=True)

    def _copy_cycles(self, block: int) -> float:
        """Of a task with so many panels of rows, to write A's tiles."""
        return block * PANEL * self.k * self.form.copy_cycles

    def _product_cycles(self, part_steps: int, block: int, group: int) -> float:
        """Of a task with so many panels of rows and of columns, without what A's tiles cost."""
        form, step_bytes = self.form, self.form.parts * PANEL * ROW_BYTES
        parts = -(-self.steps // part_steps)
        # A step reads A from the second-level cache, and B too where a panel's part of k does not stay in the first.
        read = step_bytes * (1 if part_steps * step_bytes <= self.target.l1_bytes * _L1_SHARE else 2)
        step = max(len(form.products) * 4 * _TILE_CYCLES, read / _L2_BYTES)
        cycles = block * group * self.steps * step
        cycles += group * self.steps * step_bytes * _BYTE_CYCLES
        if parts > 1:
            waiting = block * group * PANEL * PANEL * 4
            is_near = waiting + block * part_steps * step_bytes <= self.target.l2_bytes * _L2_SHARE
            cycles += 2 * parts * waiting * (1 / _L2_BYTES if is_near else _SUM_CYCLES)
        return cycles

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
            amx_tiles.configure(b, self.configuration),
            self._before(batch, row),
            b.loop(self.parts - 1, whole, name="part") if self.parts > 1 else None,
            self._part(batch, row, column, last),
            amx_tiles.release(),
        )

    def _arrays(self) -> list[TirBuffer]:
        """What a task declares."""
        arrays = [self.configuration, self.scratch, self.sums]
        if self.parts > 1:
            arrays.append(self.near)
        if self.form.splits:
            arrays += [self.is_outside, self.a_numbers, self.b_numbers]
        return arrays

    def _before(self, batch: Index, row: Index) -> Stmt | None:
        """What a task does before the first part of k."""
        return None

    def _copies(self, batch: Index, row: Index, part: Part) -> Stmt | None:
        """A part of k of the task's rows, as tiles."""
        return self._each_row(row, lambda r: self._copy(batch, row, r, part))

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
        """What a task does with a part of k before it multiplies a panel of columns."""
        return None

    def panels_in(self, first: Index) -> TirExpr | None:
        """Panels of rows of a task; None where every task has `block` of them."""
        return self._left(first, self.row_panels, self.block)

    def _columns_in(self, column: Index) -> TirExpr | None:
        """Panels of columns of a task; None where every task has `group` of them."""
        return self._left(column, self.column_panels, self.group)

    def _left(self, first: Index, total: int, count: int) -> TirExpr | None:
        if total % count == 0:
            return None
        return tirx.Min(self.builder.index(total - first), tirx.IntImm("int32", count))

    def _each_row(self, first: Index, body: Callable[[Index], Stmt]) -> Stmt:
        """`body(r)` for the panels of rows of a task."""
        return self._each(self.block, self.panels_in(first), body, "row")

    def _each(self, count: int, limit: TirExpr | None, body: Callable[[Index], Stmt], name: str) -> Stmt:
        """`body(i)` for i in 0 .. count-1, or .. limit-1 where that is fewer."""
        if limit is None:
            return self.builder.loop(count, body, name=name)
        return self.builder.loop_until(limit, count, body, name)

    # A as tiles.

    def _rows(
        self,
        batch: Index,
        row: Index,
        r: Index,
        part: Part,
        put: Callable[[Index, Index, int, Callable[[Index], Mapping[LoopVar, Index]] | None], Stmt],
    ) -> Stmt:
        """`put(line, at, width, env)` for every row of a panel of A and every element of a part of k, counted from its first, in vectors of
        `width`.

        `env`: the kernel's variables at each lane; None where elements are zero: behind the last k, or where A says so.
        """
        b, depth = self.builder, self.form.depth
        whole, left = divmod(part.elements, depth)

        def one(line: Index, own: dict[LoopVar, Index]) -> Stmt:
            def zeros(at: Index, width: int) -> Stmt:
                return put(line, at, width, None)

            def numbers(step: Index, start: int, width: int) -> Stmt:
                unit, within = divmod(start, _LANES)
                at = step * depth + start
                condition, env = self.piece(own, (part.start + step) * (depth // _LANES) + unit, within)
                there = put(line, at, width, env)
                return there if condition is None else b.when(condition, there, zeros(at, width))

            def step(at: Index) -> Stmt:
                return b.seq(*[numbers(at, start, _LANES) for start in range(0, depth, _LANES)])

            rest = []
            if left:
                rest = [numbers(as_index(whole), start, width) for start, width in lane_chunks(left, _LANES)]
                behind = lane_chunks(depth - left, _LANES)
                rest += [zeros(as_index(whole * depth + left + start), width) for start, width in behind]
            return b.seq(b.loop(whole, step, name="step") if whole else None, *rest)

        return self.each_line(batch, row, r, one)

    def each_line(
        self, batch: Index, row: Index, r: Index, body: Callable[[Index, dict[LoopVar, Index]], Stmt]
    ) -> Stmt:
        """`body(line, env)` for the rows of a panel that the result has; `env`: the kernel's variables there."""
        raise NotImplementedError

    def _copy(self, batch: Index, row: Index, r: Index, part: Part) -> Stmt:
        """One part of a panel of rows to scratch memory, and whether any of its numbers is outside of what can be split."""
        b, form = self.builder, self.form
        if self.rows is not None and self.k % form.depth == 0:
            return self._copy_rows(self.rows, batch, row, r, part)
        zero = tirx.const(0, storage_dtype(form.a_dtype))
        splitting = FloatParts(b, self.printer, form.parts, self.target) if form.splits else None

        def put(line: Index, at: Index, width: int, env: Callable[[Index], Mapping[LoopVar, Index]] | None) -> Stmt:
            to = r * (self.part_steps * self.panel_size) + at // form.depth * self.panel_size
            to = to + line * form.depth + at % form.depth

            def missing(lane: Index) -> Stmt:
                return b.seq(
                    *[b.store(self.scratch, to + lane + p * form.panel_elements, zero) for p in range(form.parts)]
                )

            if env is None:
                return self.printer.vector_loop(width, missing)
            if splitting is None:
                return self.printer.vector_loop(
                    width, lambda lane: b.store(self.scratch, to + lane, self.whole(env(lane)))
                )
            return splitting.stored(
                width,
                lambda lane: self.printer.expr(self.a, env(lane)),
                lambda number: (self.scratch, to + number * form.panel_elements),
            )

        rows = self._rows(batch, row, r, part, put)
        if splitting is None:
            return rows

        def mark(value: int) -> Stmt:
            return b.store(self.is_outside, r, tirx.IntImm("int32", value))

        return b.seq(splitting.begin(), mark(0), rows, splitting.when_outside(mark(1)))

    def _copy_rows(self, rows: RowsInMemory, batch: Index, row: Index, r: Index, part: Part) -> Stmt:
        """`_copy` of rows that are copied as they are, in whole rows of tiles."""
        b, depth = self.builder, self.form.depth
        to = r * (self.part_steps * self.panel_size)

        def line(at: Index) -> Stmt:
            def step(s: Index) -> Stmt:
                k = (part.start + s) * depth
                value = b.load_vector(rows.array, rows.at(batch, (row + r) * PANEL + at, k), depth)
                return b.store_vector(self.scratch, to + s * self.panel_size + at * depth, value, depth)

            return b.loop(part.steps, step, name="step")

        return self._each(PANEL, self.rows_of(row, r), line, "line")

    def rows_of(self, row: Index, r: Index) -> TirExpr | None:
        """How many rows a panel has; None where all have 32."""
        if self.m % PANEL == 0:
            return None
        return tirx.Min(self.builder.index(self.m - (row + r) * PANEL), tirx.IntImm("int32", PANEL))

    def has_half_panels(self) -> bool:
        """Whether a panel of rows may be one tile."""
        return 0 < self.m % PANEL <= PANEL // 2

    def a_at(self, r: Index, part: Part, s: Index, number: int) -> Index:
        """Where the tiles of a panel of rows begin, of one step and of a part of the numbers; the second lies behind the first."""
        return (r * self.part_steps + s) * self.panel_size + number * self.form.panel_elements

    def whole(self, env: Mapping[LoopVar, Index]) -> TirExpr:
        """An element of A that is one part, as tiles have it."""
        a, dtype = self.a, self.form.a_dtype
        if isinstance(a, Load) and a.buffer.dtype == dtype and a.buffer in self.printer.arguments:
            array, _ = self.printer.arguments[a.buffer]
            return self.builder.load(array, self.printer.offset(a.buffer, a.index, env))
        value = self.printer.expr(a, env)
        return narrow(value, dtype) if a.dtype == "float32" else tirx.Cast(dtype, value)

    # Products.

    def _sums_at(self, r: Index, c: Index) -> Index:
        """Where the sums of a panel of rows and one of columns are, 32 x 32 of them."""
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
            is_outside = tirx.Or(is_outside, is_plain)
            numbers = b.when(is_plain, self._numbers(panel, part, True), numbers)
        return b.when(is_outside, self._by_vectors(batch, row, r, c, part, numbers), by_tiles)

    def _is_plain(self, panel: Index) -> TirExpr | None:
        """Whether a panel of B is plain; None where none is."""
        count = self.column_panels * self.b_batches
        place = count * self.steps * self.panel_size + panel
        return self.builder.load(self.packed, place) != tirx.IntImm("uint16", 0)

    def _panel_of(self, batch: Index, column: Index, c: Index) -> Index:
        """The number of a panel of B."""
        return column + c + self._b_of(batch) * self.column_panels

    def _b_of(self, batch: Index) -> Index:
        """Which B the rows of a batch are multiplied by."""
        return batch % self.b_batches

    def _by_tiles_of_panel(self, batch: Index, row: Index, column: Index, r: Index, c: Index, part: Part) -> Stmt:
        """The products of a panel of rows and one of columns, in the registers of sums."""
        b, panel = self.builder, self._panel_of(batch, column, c)
        by_tiles = self._by_tiles(batch, row, r, panel, c, part, 2)
        if not self.has_half_panels():
            return by_tiles
        is_half = tirx.LE(self.rows_of(row, r), tirx.IntImm("int32", PANEL // 2))
        return b.when(is_half, self._by_tiles(batch, row, r, panel, c, part, 1), by_tiles)

    def _stored(self, array: TirBuffer, start: Index | int) -> list[Stmt]:
        """The registers of sums to memory."""
        places = {2 * i + j: start + (i * PANEL + j) * _LANES for i in (0, 1) for j in (0, 1)}
        return [amx_tiles.store(self.builder, tile, array, at, 4 * PANEL) for tile, at in places.items()]

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
        return b.when(b.index(part.number).equal(0), stores, b.seq(near, self._add(sums)))

    def _adds_in_memory(self) -> bool:
        """Whether `sums` has the sums of all parts of k after the last one: elsewhere tiles add that to them, and `near` has them."""
        return self.parts == 1 or self.form.splits

    def _by_tiles(self, batch: Index, row: Index, r: Index, panel: Index, c: Index, part: Part, row_tiles: int) -> Stmt:
        """The products of `row_tiles` tiles of rows and two of columns, in the registers of sums."""
        b, sums = self.builder, self._sums_at(r, c)
        places = {2 * i + j: sums + (i * PANEL + j) * _LANES for i in range(row_tiles) for j in (0, 1)}
        zeros = [amx_tiles.zero(tile) for tile in places]
        before: list[Stmt] = zeros
        if self.parts > 1 and not self.form.splits:
            loads = [amx_tiles.load(b, tile, self.sums, at, 4 * PANEL) for tile, at in places.items()]
            before = [b.when(b.index(part.number).equal(0), b.seq(*zeros), b.seq(*loads))]

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
                statements += [amx_tiles.load(b, 6 + j, array, at + j * tile, ROW_BYTES) for j in (0, 1)]
            held = pair
            statements += [
                amx_tiles.multiply(form.instruction, 2 * i + j, 4 + i, 6 + j) for i in range(row_tiles) for j in (0, 1)
            ]
        return statements

    def _a_loads(self, r: Index, part: Part, s: Index, number: int, row_tiles: int) -> list[Stmt]:
        """Registers 4 and 5: the tiles of a panel of rows, of one step and of a part of the numbers."""
        at, apart = self.a_at(r, part, s, number), self.a_row
        row_bytes = apart * self.form.itemsize
        return [
            amx_tiles.load(self.builder, 4 + i, self.scratch, at + i * _LANES * apart, row_bytes, passing=self.a_passes)
            for i in range(row_tiles)
        ]

    def _b_at(self, panel: Index, part: Part, s: Index, number: int) -> tuple[TirBuffer, Index, int]:
        """Where the first tile of a panel of columns is, of one step and of a part of the numbers, and elements from there to the second."""
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
            PANEL * PANEL // _LANES,
            lambda i: self.printer.vector_loop(_LANES, lambda lane: line(i * _LANES + lane)),
            name="sum",
        )

    def _fetches(self, r: Index, panel: Index, c: Index, part: Part, s: Index) -> list[Stmt]:
        """Prefetches of one step: a share of B's next panel, which behind the task's last column is that of its first and the next part."""
        b, line = self.builder, LINE_BYTES // self.form.itemsize
        share = -(-self.panel_size // line // self.block)
        following = b.index(((panel + 1) * self.steps + part.start) * self.panel_size)
        if self.parts > 1:
            ends = tirx.EQ(b.index(panel % self.column_panels), tirx.IntImm("int32", self.column_panels - 1))
            is_last = tirx.Or(ends, tirx.EQ(b.index(c), tirx.IntImm("int32", self.group - 1)))
            next_part = ((panel - c) * self.steps + part.start + part.steps) * self.panel_size
            following = tirx.Select(is_last, b.index(next_part), following)
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
        """As `_by_tiles`, in float32: of A as it is, and of B as `numbers` puts it together again."""
        b, sums = self.builder, self._sums_at(r, c)

        def put(line: Index, at: Index, width: int, env: Callable[[Index], Mapping[LoopVar, Index]] | None) -> Stmt:
            def number(lane: Index) -> Stmt:
                value = tirx.const(0, "float32") if env is None else self.printer.expr(self.a, env(lane))
                return b.store(self.a_numbers, line * self.part_elements + at + lane, value)

            return self.printer.vector_loop(width, number)

        def rows(group: Index) -> Stmt:
            tile = RegisterTile(b, self.printer, _EXACT_ROWS, PANEL // _LANES, _LANES, "float32")
            at = sums + group * (_EXACT_ROWS * PANEL)

            def a(i: int, k: Index) -> TirExpr:
                return b.load(self.a_numbers, (group * _EXACT_ROWS + i) * self.part_elements + k)

            def step(k: Index, way: int) -> Stmt | None:
                scalars = partials(lambda i, _: a(i, k), _EXACT_ROWS)
                vectors = partials(
                    lambda v, lane: b.load(self.b_numbers, k * PANEL + v * _LANES + lane), PANEL // _LANES
                )
                return tile.accumulate(scalars, vectors, way)

            restore = b.when(b.index(part.number) > 0, tile.restore(self.sums, at)) if self.parts > 1 else None
            steps = tile.steps(part.elements, step)
            return b.seq(tile.declare(), tile.clear(), restore, steps, tile.spill(self.sums, at))

        return b.seq(
            self._rows(batch, row, r, part, put),
            numbers,
            b.loop(PANEL // _EXACT_ROWS, rows, name="rows"),
        )

    def _numbers(self, panel: Index, part: Part, is_plain: bool) -> Stmt:
        """B's panel as float32, (k, 32 columns), from a plain panel or from the sums of parts."""
        b, form = self.builder, self.form
        sixteen, upper = (tirx.Broadcast(tirx.IntImm("uint32", number), _LANES) for number in (16, 0xFFFF0000))
        lower = tirx.Broadcast(tirx.IntImm("uint32", 0xFFFF), _LANES)

        def number(words: list[TirExpr], is_odd: bool) -> TirExpr:
            def half(word: TirExpr) -> TirExpr:
                return tirx.bitwise_and(word, upper) if is_odd else tirx.shift_left(word, sixteen)

            if is_plain:
                low = tirx.shift_right(words[1], sixteen) if is_odd else tirx.bitwise_and(words[1], lower)
                return tirx.reinterpret(f"float32x{_LANES}", tirx.bitwise_or(half(words[0]), low))
            total = tirx.reinterpret(f"float32x{_LANES}", half(words[-1]))
            for word in reversed(words[:-1]):
                total = tirx.reinterpret(f"float32x{_LANES}", half(word)) + total
            return total

        def pair(position: tuple[Index, ...]) -> Stmt:
            s, j, line = position
            at = (
                (panel * self.steps + part.start + s) * self.panel_size
                + j * (form.panel_elements // 2)
                + line * form.depth
            )
            words = [
                tirx.reinterpret(
                    f"uint32x{_LANES}", b.load_vector(self.packed, at + p * form.panel_elements, 2 * _LANES)
                )
                for p in range(form.parts)
            ]
            to = ((s * _LANES + line) * 2) * PANEL + j * _LANES
            return b.seq(
                *[b.store_vector(self.b_numbers, to + odd * PANEL, number(words, odd == 1), _LANES) for odd in (0, 1)]
            )

        return b.nest((part.steps, 2, _LANES), pair, name="k")

    # The stores.

    def _write(self, batch: Index, row: Index, column: Index, r: Index, c: Index) -> Stmt:
        """The kernel's stores of a panel of rows and one of columns."""
        b, kernel, left = self.builder, self.kernel, self.n % PANEL
        array, sums = (self.sums, self._sums_at(r, c)) if self._adds_in_memory() else (self.near, as_index(0))
        first = (column + c) * PANEL + self._first_column(batch)
        stores, of_columns = self._columns_apart(kernel.stores, first)

        def columns(piece: Callable[[int, int], Stmt]) -> Stmt:
            """`piece(start, width)` for the columns of a panel that the result has, in vectors."""

            def each(count: int) -> Stmt:
                return b.seq(*[piece(start, width) for start, width in lane_chunks(count, _LANES)])

            if not left or self.column_panels == 1:
                return each(left or PANEL)
            return b.when(b.index(column + c) < self.column_panels - 1, each(PANEL), each(left))

        def line(at: Index, env: dict[LoopVar, Index]) -> Stmt:
            def piece(start: int, width: int) -> Stmt:
                def begin(lane: Index) -> None:
                    value = b.load(array, sums + at * PANEL + start + lane)
                    self.printer.locals[kernel.accumulator] = lambda _: value

                def place(lane: Index) -> dict[LoopVar, Index]:
                    return {**env, self.column: first + start + lane}

                return stored_vector(self.printer, self.target, stores, width, place, begin)

            return columns(piece)

        def fill(start: int, width: int) -> Stmt:
            def lanes(lane: Index) -> Stmt:
                env: dict[LoopVar, Index] = {self.column: first + start + lane}
                return b.seq(*[b.store(array, start + lane, self.printer.expr(e, env)) for e, array in of_columns])

            return self.printer.vector_loop(width, lanes)

        arrays = [b.alloc(array) for _, array in of_columns]
        return b.seq(*arrays, columns(fill) if of_columns else None, self.each_line(batch, row, r, line))

    def _first_column(self, batch: Index) -> Index:
        """The result's column of the first one of B."""
        return as_index(0)

    def _columns_apart(self, stores: Sequence[Store], first: Index) -> tuple[list[Store], list[tuple[Expr, TirBuffer]]]:
        """The stores with what depends on the column alone read from an array of a panel's columns, and what is in the arrays."""
        found: list[tuple[Expr, TirBuffer]] = []
        done: dict[Expr, Expr] = {}

        def is_apart(e: Expr) -> bool:
            if e.dtype != "float32" or not depends_on_column_alone(e, self.column):
                return False
            loads = [part for part in parts([e]) if isinstance(part, Load)]
            return bool(loads) and not any(load.buffer is self.kernel.accumulator for load in loads)

        def visit(e: Expr) -> Expr:
            if e not in done:
                done[e] = changed(e)
            return done[e]

        def changed(e: Expr) -> Expr:
            if is_apart(e):
                buffer = Buffer((self.n,), "float32", "of_columns")
                array = self.builder.local(PANEL, "float32", "of_columns")
                self.printer.locals[buffer] = lambda index: self.builder.load(array, index[0] - first)
                found.append((e, array))
                return buffer.at((index_of(self.column),))
            if not isinstance(e, Call) or e.op == "guard":  # behind a guard there may be nothing to load
                return e
            return e.with_args(map(visit, e.args))

        return [dataclasses.replace(store, value=visit(store.value)) for store in stores], found


class TileMatMul(TileProduct):
    """The emission of a matmul's kernel."""

    def __init__(
        self,
        kernel: TileMatMulKernel | DequantizedMatMulKernel,
        form: TileFormat,
        builder: Builder,
        printer: Printer,
        target: Target,
    ) -> None:
        batch, m, n = (known_int(variable.extent) for variable in kernel.domain)
        self.depth, self.batched_b = kernel.k, isinstance(kernel, TileMatMulKernel) and kernel.batched_b
        super().__init__(kernel, form, kernel.a, (batch, m, known_int(kernel.k.extent), n), builder, printer, target)

    def _b_batches(self) -> int:
        return self.batch if self.batched_b else 1

    def _rows_in_memory(self) -> RowsInMemory | None:
        a = self.a.args[0] if isinstance(self.a, Call) and self.a.op == "cast" else self.a
        if self.form.splits or not isinstance(a, Load) or a.buffer not in self.printer.arguments:
            return None
        buffer, index, (array, layout) = a.buffer, a.index, self.printer.arguments[a.buffer]
        terms = dict(offset_of(layout, buffer.shape, index).terms)
        along = terms.pop(self.depth, None)
        others = {leaf for atom in terms for leaf in Index(((atom, 1),), 0).leaves()}
        if buffer.dtype != self.form.operand or along != 1 or self.depth in others:
            return None

        def at(batch: Index, m: Index, k: Index) -> Index:
            places = (batch, m)
            return self.printer.offset(
                buffer, index, {**dict(zip(self.kernel.domain[:2], places, strict=True)), self.depth: k}
            )

        return RowsInMemory(array, at)

    def each_line(
        self, batch: Index, row: Index, r: Index, body: Callable[[Index, dict[LoopVar, Index]], Stmt]
    ) -> Stmt:
        def line(at: Index) -> Stmt:
            return body(at, dict(zip(self.kernel.domain, (batch, (row + r) * PANEL + at), strict=False)))

        return self._each(PANEL, self.rows_of(row, r), line, "line")

    def piece(self, env: dict[LoopVar, Index], unit: Index, within: int) -> Piece:
        return None, lambda lane: {**env, self.depth: unit * _LANES + within + lane}


def spread(statements: list[Stmt], among: list[Stmt]) -> list[Stmt]:
    """`statements`, each followed by its share of those that go `among` them."""
    count, found = len(statements), []
    for number, statement in enumerate(statements):
        found += [statement, *among[len(among) * number // count : len(among) * (number + 1) // count]]
    return found
