"""The left operand as AMX's tiles: a task writes its rows of A to scratch memory, part of k by part of k.

Any expression, rounded to bfloat16, or split into several. What is beyond the last k is zero; rows beyond the last are never written, nor are
sums of them stored. Tiles are not loaded from where rows lie, not even bfloat16: rows are often a multiple of 2 KiB apart, and then all of a
tile is in a few sets of the caches. Operands of float32 are split into parts, and the numbers are looked at on the way: a panel of rows that
has one for which products of parts are not exact is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.operands.amx_formats import PANEL
from torch_hybrid_backend.engines.cpu.schedules.amx.blocks import LANES, Part, Products, TileBlocks
from torch_hybrid_backend.engines.cpu.schedules.bf16_split import FloatParts
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.storage import narrow, storage_dtype
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Load

# Of a vector's piece of A: when it is there, None for always (elsewhere it is zero), and what the kernel's variables are at each lane.
Piece = tuple[TirExpr | None, Callable[[Index], Mapping[LoopVar, Index]]]
# The kernel's variables at each lane of a vector of A; None where elements are zero: behind the last k, or where A says so.
Lanes = Callable[[Index], Mapping[LoopVar, Index]] | None


@dataclass(frozen=True, slots=True)
class RowsInMemory:
    """Rows of A that lie along k in one array, as tiles have them; `at(batch, m, k)` is the place of an element."""

    array: TirBuffer
    at: Callable[[Index, Index, Index], Index]


class TileRows(TileBlocks):
    """The rows of A of a kernel's tasks."""

    def __init__(self, of: Products, builder: Builder, printer: Printer, target: Target) -> None:
        super().__init__(of, builder, printer, target)
        self.a_row = self._row_elements()
        self.rows = self._rows_in_memory()
        self.scratch = builder.local(self._scratch_size(), storage_dtype(self.form.a_dtype), "a")
        # Of each panel: whether it is to be multiplied by vectors.
        self.is_outside = builder.local(self.block, "int32", "outside")

    def _rows_in_memory(self) -> RowsInMemory | None:
        """The array in which rows of A lie along k as they are multiplied; None if there is none."""
        return None

    def piece(self, env: dict[LoopVar, Index], unit: Index, within: int) -> Piece:
        """Elements of a row of A from `16 * unit + within` of k on, of one unit."""
        raise NotImplementedError

    def _row_elements(self) -> int:
        """Elements from one row of A's tiles to the next."""
        return self.form.depth

    def _scratch_size(self) -> int:
        """Elements of a task's A."""
        return self.block * self.part_steps * self.panel_size

    def a_at(self, r: Index, part: Part, s: Index, number: int) -> Index:
        """The address of the tiles of a panel of rows, of one step and one part of the numbers; the second tile lies behind the first."""
        return (r * self.part_steps + s) * self.panel_size + number * self.form.panel_elements

    # In memory.

    def _copies(self, batch: Index, row: Index, part: Part) -> Stmt | None:
        """A part of k of the task's rows, as tiles."""
        return self._each_row(row, lambda r: self._copy(batch, row, r, part))

    def _rows(
        self,
        batch: Index,
        row: Index,
        r: Index,
        part: Part,
        put: Callable[[Index, Index, int, Lanes], Stmt],
    ) -> Stmt:
        """`put(line, at, width, env)` for every row of a panel of A and every element of a part of k, counted from its first, in vectors of
        `width`."""
        b, depth = self.builder, self.form.depth
        whole, left = divmod(part.elements, depth)

        def one(line: Index, own: dict[LoopVar, Index]) -> Stmt:
            def zeros(at: Index, width: int) -> Stmt:
                return put(line, at, width, None)

            def numbers(step: Index, start: int, width: int) -> Stmt:
                unit, within = divmod(start, LANES)
                at = step * depth + start
                condition, env = self.piece(own, (part.start + step) * (depth // LANES) + unit, within)
                there = put(line, at, width, env)
                return there if condition is None else b.when(condition, there, zeros(at, width))

            def step(at: Index) -> Stmt:
                return b.seq(*[numbers(at, start, LANES) for start in range(0, depth, LANES)])

            rest = []
            if left:
                rest = [numbers(as_index(whole), start, width) for start, width in lane_chunks(left, LANES)]
                behind = lane_chunks(depth - left, LANES)
                rest += [zeros(as_index(whole * depth + left + start), width) for start, width in behind]
            return b.seq(b.loop(whole, step, name="step") if whole else None, *rest)

        return self.each_line(batch, row, r, one)

    def _copy(self, batch: Index, row: Index, r: Index, part: Part) -> Stmt:
        """Copy one part of a panel of rows to scratch memory. Tells as well whether any of its numbers cannot be split."""
        b, form = self.builder, self.form
        if self.rows is not None and self.k % form.depth == 0:
            return self._copy_rows(self.rows, batch, row, r, part)
        zero = tir.const(0, storage_dtype(form.a_dtype))
        splitting = FloatParts(b, self.printer, form.parts, self.target) if form.splits else None

        def put(line: Index, at: Index, width: int, env: Lanes) -> Stmt:
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
            return b.store(self.is_outside, r, tir.const(value, "int32"))

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

    def whole(self, env: Mapping[LoopVar, Index]) -> TirExpr:
        """An element of A that is one part, as tiles have it."""
        a, dtype = self.a, self.form.a_dtype
        if isinstance(a, Load) and a.buffer.dtype == dtype and a.buffer in self.printer.arguments:
            array, _ = self.printer.arguments[a.buffer]
            return self.builder.load(array, self.printer.offset(a.buffer, a.index, env))
        value = self.printer.expr(a, env)
        return narrow(value, dtype) if a.dtype == "float32" else tir.cast(value, dtype)
