"""MatMul by instructions that multiply two rows by two columns (AArch64's smmla, ummla, usmmla and bfmmla).

Pattern: a weight in `Panels` whose `dot` has two rows. As `packed`, with these differences:
1. Tiles are cut along pairs of rows. A pair lies together, word by word (`vnni_packing.row_pairs`), and so do two neighbouring columns of a
   panel: each load is a whole register, and none is broadcast.
2. A register of sums is a block of 2 x 2. Behind the sum over k, shuffles of two neighbouring blocks make a vector of four columns for each of
   the two rows; then sums are moved to where they start, and stored as any.
3. Of an odd number of rows the last pair's second row is computed, from what the packing has there, and not stored.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.schedules.matmul.packed import PackedMatMul
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile, unzipped
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr
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

    def _start(self, tile: RegisterTile, batch: Index, panel: Index) -> Stmt | None:
        return None

    def _write(self, tile: RegisterTile, batch: Index, first: Index, column: Index, columns: Dim) -> Stmt:
        b, start = self.builder, self.weight.start
        rows, unzip = unzipped(tile)

        def moved(row: int, vector: int, lane: Index) -> TirExpr:
            assert start is not None
            of_right = batch if self.is_batched else as_index(0)
            place = (of_right, column + vector * rows.lanes + lane)
            return rows.at(row, vector, lane) + self.printer.expr(Load("int32", start, place), {})

        begin = None if start is None else rows.fill(moved)
        return b.seq(rows.declare(), unzip, begin, super()._write(rows, batch, first * 2, column, columns))

    def _row(self, row: Index, stores: Stmt) -> Stmt:
        b, m = self.builder, self.m.extent
        if isinstance(m, int) and (m % 2 == 0 or row % 2 == as_index(0)):
            return stores
        return b.when(b.index(row) < b.size(m), stores)
