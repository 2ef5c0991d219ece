"""The division of products on AMX's tiles: tasks of rows and columns, panels of 32, parts of k.

A task has a block of rows and a group of columns, both in panels, and k is cut into parts. A panel of B stays in the first-level cache while
the panels of A go by, which come from the second: loading both from there takes half as long again as multiplying. So parts are short, and a
task is as large as leaves its sums and its part of A room in the second.
Source: Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import PANEL, ROW_BYTES, TileFormat
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import AmxTiles, Quantized
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, function, size_hint

LANES = 16  # of a vector, and rows, and columns of words, of a tile
_TILE_CYCLES = 16
# Steps of k in one part of float32, 768 elements; fewer than the second number are not cut.
PART_STEPS, _WHOLE_STEPS = 24, 32
# Steps that a part of k of the other formats may have, where it has several.
_PART_LENGTHS = (12, 16)
# Bytes a cycle that tiles are loaded from the second-level cache; the share of the first that a panel of B may take to stay there while panels
# of A go by; the share of the second that sums and A's tiles may take.
_L2_BYTES, _L1_SHARE, _L2_SHARE = 40.0, 0.7, 0.51
# Panels of rows that tasks are also cut for where there may be any number of them.
_OPEN_ROWS = 8
# Cycles to read or write a byte beyond the second-level cache, which a core partly hides.
_BYTE_CYCLES = 0.06
# The same for sums, which are read and written while nothing else is.
_SUM_CYCLES = 0.1


@dataclass(frozen=True, slots=True)
class Products:
    """Operands of a kernel: (batch, m, k) by (batch or 1, k, n), in the format `form`. `sizes`: batch, m, k, n; the first two may be known
    only at run time. `a`: an element of A."""

    kernel: CpuMatMulKernel[AmxTiles | Quantized] | CpuConvKernel[AmxTiles]
    form: TileFormat
    a: Expr
    sizes: tuple[Dim, Dim, int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """Steps of k: `steps` from number `start` on, `elements` of k in all; `number` says which part it is."""

    number: Index
    start: Index
    steps: int
    elements: int
    is_last: bool


class TileBlocks:
    """The tasks of one kernel."""

    def __init__(self, of: Products, builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.form, self.a = of.kernel, of.form, of.a
        self.batch, self.m, self.k, self.n = of.sizes
        self.builder, self.printer, self.target = builder, printer, target
        self.b_batches = self._b_batches()
        self.row_panels, self.column_panels = ceil_div(self.m, PANEL), -(-self.n // PANEL)
        self.steps = self.form.steps(self.k)
        self.panel_size = self.form.parts * self.form.panel_elements  # of one step
        self.part_steps, self.block, self.group = self._tiling()
        self.parts = -(-self.steps // self.part_steps)
        self.part_elements = self.part_steps * self.form.depth

    def _b_batches(self) -> Dim:
        """The number of matrices B: the rows of batch i are multiplied by matrix i modulo it."""
        return 1

    def _b_of(self, batch: Index) -> Index:
        """The number of the matrix B that multiplies the rows of a batch."""
        return batch % self.b_batches

    def _panel_of(self, batch: Index, column: Index, c: Index) -> Index:
        """The number of a panel of B."""
        return column + c + self._b_of(batch) * self.column_panels

    # Sizes.

    def row_blocks(self) -> tuple[Dim, Dim]:
        """The number of blocks of rows, and the number that a task's first row is a multiple of: `block`, or as few as make blocks equal."""
        if isinstance(self.row_panels, int):
            return ceil_div(self.row_panels, self.block), self.block
        blocks = function("max", ceil_div(self.row_panels, self.block), 1)
        return blocks, ceil_div(self.row_panels, blocks)

    def _groups(self) -> list[int]:
        """Numbers of column panels that a task may have."""
        counts = (1, 2, 4, 8, 16, 32, 64, self.target.cores)
        groups = sorted({-(-self.column_panels // count) for count in counts if count <= self.column_panels})
        if isinstance(self.row_panels, int):
            return groups
        # Whatever the number of blocks of rows, every core has as many tasks.
        even = [group for group in groups if -(-self.column_panels // group) % self.target.cores == 0]
        return even or groups

    def _tiling(self) -> tuple[int, int, int]:
        """Steps of a part of k, and panels of rows and of columns of one task: the kernel's `schedule_rank` by estimated time."""
        step_bytes = self.form.itemsize * self.panel_size
        batch, likely = size_hint(self.batch), max(1, size_hint(self.row_panels))
        panels = max(likely, _OPEN_ROWS) if isinstance(self.row_panels, Size) else likely
        estimates: dict[tuple[int, int, int], float] = {}
        for steps in self._part_lengths():
            # Half of the cache: beside A's tiles there are panels of B, and what is read and written.
            most = max(1, self.target.l2_bytes // 2 // (steps * step_bytes))
            fewest = -(-panels // most)
            counts = {-(-panels // count) for count in range(fewest, min(panels, 4 * fewest) + 1)}
            for block in sorted(counts, reverse=True):
                for group in self._groups():
                    # Of the likely number of rows and of more, where there may be any, by row: few must not be one task, nor many small ones.
                    estimates[steps, block, group] = sum(
                        self._cycles(batch, count, (steps, block, group)) / count for count in {likely, panels}
                    )
        return self.builder.ranked_choice(estimates)

    def _cycles(self, batch: int, panels: int, tiling: tuple[int, int, int]) -> float:
        """Cycles of all products of so many panels of rows, in tasks as `_tiling` says."""
        steps, block, group = tiling
        blocks = -(-panels // block)
        tasks, rows = batch * blocks * -(-self.column_panels // group), -(-panels // blocks)
        return -(-tasks // self.target.cores) * (self._copy_cycles(rows) + self._product_cycles(steps, rows, group))

    def _part_lengths(self) -> list[int]:
        """Steps of k that a part may have."""
        if self.form.splits:
            return [self.steps if self.steps <= _WHOLE_STEPS else -(-self.steps // -(-self.steps // PART_STEPS))]
        rows_bytes = self.steps * self.form.itemsize * self.panel_size
        if self.row_panels == 1 and rows_bytes <= self.target.l2_bytes // 2:
            return [self.steps]  # no panel of B is read twice, and one after the other they are one stream from memory
        counts = {1, *(-(-self.steps // length) for length in _PART_LENGTHS)}
        return sorted({-(-self.steps // count) for count in counts}, reverse=True)

    def _copy_cycles(self, block: int) -> float:
        """Cycles that a task with so many panels of rows takes to write A's tiles."""
        return block * PANEL * self.k * self.form.copy_cycles

    def _product_cycles(self, part_steps: int, block: int, group: int) -> float:
        """Cycles of a task with so many panels of rows and columns, without those of writing A's tiles."""
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

    # Panels.

    def panels_in(self, first: Index) -> TirExpr | None:
        """Panels of rows of a task; None where every task has `block` of them."""
        return self._left(first, self.row_panels, self.row_blocks()[1])

    def _columns_in(self, column: Index) -> TirExpr | None:
        """Panels of columns of a task; None where every task has `group` of them."""
        return self._left(column, self.column_panels, self.group)

    def _left(self, first: Index, total: Dim, count: Dim) -> TirExpr | None:
        if total % count == 0:
            return None
        return tir.minimum(self.builder.index(as_index(total) - first), self.builder.size(count))

    def _each_row(self, first: Index, body: Callable[[Index], Stmt]) -> Stmt:
        """`body(r)` for the panels of rows of a task."""
        return self._each(self.block, self.panels_in(first), body, "row")

    def _each(self, count: int, limit: TirExpr | None, body: Callable[[Index], Stmt], name: str) -> Stmt:
        """`body(i)` for i in 0 .. count-1, or .. limit-1 where that is fewer."""
        if limit is None:
            return self.builder.loop(count, body, name=name)
        return self.builder.loop_until(limit, count, body, name)

    def each_line(
        self, batch: Index, row: Index, r: Index, body: Callable[[Index, dict[LoopVar, Index]], Stmt]
    ) -> Stmt:
        """`body(line, env)` for the rows of a panel that the result has; `env`: the kernel's variables there."""
        raise NotImplementedError

    def rows_of(self, row: Index, r: Index) -> TirExpr | None:
        """The number of rows of a panel; None where all have 32."""
        if self.m % PANEL == 0:
            return None
        return tir.minimum(self.builder.index(as_index(self.m) - (row + r) * PANEL), tir.const(PANEL, "int32"))

    def has_half_panels(self) -> bool:
        """True if a panel of rows may be one tile."""
        left = self.m % PANEL
        return isinstance(left, Size) or 0 < left <= PANEL // 2
