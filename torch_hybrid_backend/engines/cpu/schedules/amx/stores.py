"""The epilogue of products on AMX's tiles: the kernel's stores, from sums that tiles left in memory.

What they compute from the column alone is computed once for a panel of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch_hybrid_backend.engines.cpu.operands.amx_formats import PANEL
from torch_hybrid_backend.engines.cpu.schedules.amx.blocks import LANES
from torch_hybrid_backend.engines.cpu.schedules.vector_stores import stored_vector
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Call, Expr, Load, parts
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.loops.scales import depends_on_column_alone

# A line of a panel of rows, and what the kernel's variables are there.
Line = Callable[[Index, dict[LoopVar, Index]], Stmt]


class PanelStores:
    """The stores of one kernel, of a panel of rows and one of columns.

    accumulator: the buffer that stands for the sums; column, columns: the result's last dimension, and how many of it B has.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        accumulator: Buffer,
        column: LoopVar,
        columns: int,
        builder: Builder,
        printer: Printer,
        target: Target,
    ) -> None:
        self.stores, self.accumulator, self.column, self.columns = stores, accumulator, column, columns
        self.builder, self.printer, self.target = builder, printer, target

    def written(
        self, panel: Index, first: Index, sums: TirBuffer, at: Index, each_line: Callable[[Line], Stmt]
    ) -> Stmt:
        """The stores of a panel of B's columns, whose first is the result's column `first`.

        sums, at: where its sums begin, 32 a line; each_line: `body(line, env)` for the rows that the result has.
        """
        b = self.builder
        stores, of_columns = self._columns_apart(first)

        def line(row: Index, env: dict[LoopVar, Index]) -> Stmt:
            def piece(start: int, width: int) -> Stmt:
                def begin(lane: Index) -> None:
                    value = b.load(sums, at + row * PANEL + start + lane)
                    self.printer.locals[self.accumulator] = lambda _: value

                def place(lane: Index) -> dict[LoopVar, Index]:
                    return {**env, self.column: first + start + lane}

                return stored_vector(self.printer, self.target, stores, width, place, begin)

            return self._vectors(panel, piece)

        def fill(start: int, width: int) -> Stmt:
            def lanes(lane: Index) -> Stmt:
                env: dict[LoopVar, Index] = {self.column: first + start + lane}
                return b.seq(*[b.store(array, start + lane, self.printer.expr(e, env)) for e, array in of_columns])

            return self.printer.vector_loop(width, lanes)

        arrays = [b.alloc(array) for _, array in of_columns]
        return b.seq(*arrays, self._vectors(panel, fill) if of_columns else None, each_line(line))

    def _vectors(self, panel: Index, piece: Callable[[int, int], Stmt]) -> Stmt:
        """`piece(start, width)` for the columns of a panel that the result has, in vectors."""
        b, left, panels = self.builder, self.columns % PANEL, -(-self.columns // PANEL)

        def each(count: int) -> Stmt:
            return b.seq(*[piece(start, width) for start, width in lane_chunks(count, LANES)])

        if not left or panels == 1:
            return each(left or PANEL)
        return b.when(b.index(panel) < panels - 1, each(PANEL), each(left))

    def _columns_apart(self, first: Index) -> tuple[list[Store], list[tuple[Expr, TirBuffer]]]:
        """The stores with what depends on the column alone read from an array of a panel's columns, and what is in the arrays."""
        found: list[tuple[Expr, TirBuffer]] = []
        done: dict[Expr, Expr] = {}

        def is_apart(e: Expr) -> bool:
            if e.dtype != "float32" or not depends_on_column_alone(e, self.column):
                return False
            loads = [part for part in parts([e]) if isinstance(part, Load)]
            return bool(loads) and not any(load.buffer is self.accumulator for load in loads)

        def visit(e: Expr) -> Expr:
            if e not in done:
                done[e] = changed(e)
            return done[e]

        def changed(e: Expr) -> Expr:
            if is_apart(e):
                buffer = Buffer((self.columns,), "float32", "of_columns")
                array = self.builder.local(PANEL, "float32", "of_columns")
                self.printer.locals[buffer] = lambda index: self.builder.load(array, index[0] - first)
                found.append((e, array))
                return buffer.at((index_of(self.column),))
            if not isinstance(e, Call) or e.op == "guard":  # behind a guard there may be nothing to load
                return e
            return e.with_args(map(visit, e.args))

        return [dataclasses.replace(store, value=visit(store.value)) for store in self.stores], found
