"""MatMul by instructions that multiply two rows by two columns (AArch64's smmla, ummla, usmmla and bfmmla).

Pattern: a weight in `Panels` whose `dot` has two rows. As `packed`, with these differences:
1. Tiles are cut along pairs of rows. The words of a pair are read where they lie and put together, by one instruction, for all columns of a
   panel. So panels are wide, and tiles few pairs high; a register holds two columns of a panel only while it is multiplied.
2. A register of sums is a block of 2 x 2. Behind the sum over k, shuffles of two neighbouring blocks make a vector of four columns for each of
   the two rows; then sums are moved to where they start, and stored as any.
3. Of an odd number of rows the last is computed twice, and stored once.
Not used: pairs that are packed before. Their kernel takes as long as 128 columns, and rows that are rounded by the kernel before are read anew.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.schedules.matmul.packed import Ahead, PackedMatMul
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile, unzipped
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import most_pairs
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.dot import load_word_of_two
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import Panels
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Load
from torch_hybrid_backend.sizes.size import Dim


def emit(kernel: CpuMatMulKernel[Panels], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body. Sums are int32, or float32 of bfloat16."""
    return _RowPairs(kernel, builder, printer, target).emit()


class _RowPairs(PackedMatMul):
    """The emission of one kernel."""

    def __init__(self, kernel: CpuMatMulKernel[Panels], builder: Builder, printer: Printer, target: Target) -> None:
        super().__init__(kernel, builder, printer, target)
        # The last pair of the tile that is emitted, and its second row.
        self.last_pair: tuple[Index, Index] | None = None

    def _most_rows(self) -> int:
        return most_pairs(self.vectors, self._most_cached_rows(), self.target)

    def _tile(self, batch: Index, first: Index, rows: int, panel: Index, columns: Dim, ahead: Ahead) -> Stmt:
        """Compute one register tile: `rows` pairs of rows from pair `first`."""
        pair, m = first + (rows - 1), self.m.extent
        if m % 2 == 0:
            self.last_pair = None
            return super()._tile(batch, first, rows, panel, columns, ahead)
        b = self.builder
        second = tir.minimum(b.index(pair * 2 + 1), b.size(m - 1))
        row, begin = b.bound(second, m, "row")
        self.last_pair = pair, row
        return b.seq(begin, super()._tile(batch, first, rows, panel, columns, ahead))

    def _word(self, batch: Index, row: Index, k: Index, dot: DotProduct, count: int = 1) -> TirExpr:
        second = row * 2 + 1 if self.last_pair is None or row != self.last_pair[0] else self.last_pair[1]
        (array, start), (_, other) = (self._word_place(batch, of, k, dot) for of in (row * 2, second))
        return load_word_of_two(array, (start, other), dot)

    def _start(self, tile: RegisterTile, batch: Index, panel: Index) -> Stmt | None:
        return None

    def _write(self, tile: RegisterTile, batch: Index, first: Index, column: Index, columns: Dim) -> Stmt:
        b, start = self.builder, self.weight.start

        def moved(vector: int, lane: Index) -> TirExpr:
            assert start is not None
            place = (batch if self.is_batched else as_index(0), column + vector * tile.lanes + lane)
            return self.printer.expr(Load("int32", start, place), {})

        rows, unzip = unzipped(tile, None if start is None else moved)
        return b.seq(unzip, super()._write(rows, batch, first * 2, column, columns))

    def _row(self, row: Index, stores: Stmt) -> Stmt:
        b, m = self.builder, self.m.extent
        if m % 2 == 0 or row % 2 == as_index(0):
            return stores
        return b.when(b.index(row) < b.size(m), stores)
