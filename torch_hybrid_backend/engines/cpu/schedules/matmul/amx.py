"""Matmul by AMX: the products of `schedules/amx` with rows of one array or expression.

Pattern: a weight in `AmxTiles`. Where it lies in VNNI format, the lines of its two tiles alternate: a tile's are 128 bytes apart.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS, PANEL, ROW_BYTES, TileFormat
from torch_hybrid_backend.engines.cpu.schedules.amx.blocks import LANES, Part, Products
from torch_hybrid_backend.engines.cpu.schedules.amx.product import TileProduct
from torch_hybrid_backend.engines.cpu.schedules.amx.rows import Piece, RowsInMemory
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import AmxTiles, Quantized
from torch_hybrid_backend.loops.index import Index, LoopVar
from torch_hybrid_backend.loops.ir import Call, Load
from torch_hybrid_backend.loops.layout import offset_of
from torch_hybrid_backend.sizes.size import Dim, known_int


def emit(kernel: CpuMatMulKernel[AmxTiles], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body."""
    return TileMatMul(kernel, FORMATS[kernel.weight.tile_format], builder, printer, target).emit()


class TileMatMul(TileProduct):
    """The emission of a matmul's kernel."""

    def __init__(
        self,
        kernel: CpuMatMulKernel[AmxTiles | Quantized],
        form: TileFormat,
        builder: Builder,
        printer: Printer,
        target: Target,
    ) -> None:
        batch, m, n = (variable.extent for variable in kernel.domain)
        self.depth, self.is_batched = kernel.k, kernel.is_batched
        sizes = (batch, m, known_int(kernel.k.extent), known_int(n))
        super().__init__(Products(kernel, form, kernel.a, sizes), builder, printer, target)
        self.is_vnni = isinstance(kernel.weight, AmxTiles) and kernel.weight.is_vnni
        if self.is_vnni:
            self.b_row_bytes = 2 * ROW_BYTES

    def _b_batches(self) -> Dim:
        return self.batch if self.is_batched else 1

    def _b_at(self, panel: Index, part: Part, s: Index, number: int) -> tuple[TirBuffer, Index, int]:
        array, at, apart = super()._b_at(panel, part, s, number)
        return array, at, ROW_BYTES // self.form.itemsize if self.is_vnni else apart

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
        return None, lambda lane: {**env, self.depth: unit * LANES + within + lane}
