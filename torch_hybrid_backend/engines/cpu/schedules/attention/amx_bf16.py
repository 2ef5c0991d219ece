"""Attention of bfloat16 by AMX: as `bf16`, with both products by tiles of 16 x 16 sums.

Pattern: a `Bf16AttentionKernel` with a format. Operands lie as they do for dot products, which is how tiles have them:
1. Scores: 32 queries by a panel of 32 keys are four tiles; a step is 32 elements of a head. Packed keys are tiles whose rows lie a panel apart.
2. Values: weights of 32 queries and 32 keys by 32 columns, a step for each panel, so that sums stay in registers for all panels of a block.
Tiles reach vectors through memory only, and the first-level cache holds scores for the softmax anyway. Rows beyond the last query are
computed of what is there, and never read. Elements beyond a head's last, and keys beyond the last, are zeros.
Sources: as `schedules/amx`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.kernels import Bf16AttentionKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS, PANEL
from torch_hybrid_backend.engines.cpu.schedules.amx import instructions
from torch_hybrid_backend.engines.cpu.schedules.attention.bf16 import Bf16Attention
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import Dim, known_int

_ROWS = 16  # of a tile


@dataclass(frozen=True, slots=True)
class _Operand:
    """Elements of an array: from one row of a tile to the next, and from one part of numbers to the next."""

    array: TirBuffer
    row: int
    part: Dim


class AmxBf16Attention(Bf16Attention):
    """The emission of one kernel. How many queries, keys and matrices there are may be known only at run time."""

    def __init__(self, kernel: Bf16AttentionKernel, builder: Builder, printer: Printer, target: Target) -> None:
        self.form = FORMATS[kernel.format]
        super().__init__(kernel, builder, printer, target)
        parts, self.weight_parts = self.form.parts, max(self.form.parts, kernel.weight_parts)
        # Of parts of weights by those of values: the small ones first.
        self.value_products = (
            self.form.products if self.weight_parts == parts else tuple((p, 0) for p in range(self.weight_parts)[::-1])
        )
        panels, key_rows, pairs = self.panels, known_int(self.key_rows), self.panels * (self.panel // 2)
        # Parts of keys lie panel by panel, those of the others one behind the other.
        self.packed_k = self._workspace(panels * parts * key_rows * self.panel, "kt", "int32")
        self.packed_v = self._workspace(parts * pairs * self.padded, "v", "int32")
        self.q = self._workspace(parts * self.tallest * self.query_size, "q", "uint16")
        self.weights = self._workspace(self.weight_parts * self.tallest * self.stride, "weights", "uint16")
        self.of_q = _Operand(self.q, self.query_size, self.tallest * self.query_size)
        self.of_k = _Operand(self.packed_k, self.panel, key_rows * self.panel)
        self.of_weights = _Operand(self.weights, self.stride, self.tallest * self.stride)
        self.of_v = _Operand(self.packed_v, self.padded, pairs * self.padded)
        self.configuration = instructions.configuration(builder)

    def _most_rows(self) -> int:
        return PANEL

    def _behind_row(self) -> int:
        """A row of weights, of 16 bits, is whole lines, too, of which tiles are read."""
        return 2 * self.lanes

    def _panel_vectors(self) -> int:
        return PANEL // _ROWS

    def _key_rows(self) -> Dim:
        return self.form.steps(known_int(self.depth)) * _ROWS

    def _held(self, rows: int) -> int:
        return -(-rows // _ROWS) * _ROWS

    def _reads_beyond(self) -> bool:
        return True

    def _buffers(self) -> tuple[TirBuffer, ...]:
        return (*super()._buffers(), self.configuration)

    def _pack(self, batch: Index, head: Index) -> Stmt | None:
        return self.builder.seq(instructions.configure(self.builder, self.configuration), super()._pack(batch, head))

    def _end(self) -> Stmt | None:
        return instructions.release()

    def pack_k(self, batch: Index, head: Index) -> Stmt:
        used, held = known_int(self.depth) // self.group, known_int(self.key_rows)

        def clear(panel: Index) -> Stmt:
            start = (panel * held + used) * self.panel
            return self.fill(self.packed_k, start, (held - used) * self.panel, tir.const(0, self.packed_dtype))

        beyond = self.builder.loop(self.panels, clear, name="p") if used < held else None
        return self.builder.seq(super().pack_k(batch, head), beyond)

    def _copy_q(self, batch: Index, head: Index, query: Index, r: Index) -> Stmt:
        left, end = self.query_size - known_int(self.depth), (r + 1) * self.query_size
        beyond = self.fill(self.q, end - left, left, tir.const(0, "uint16")) if left else None
        return self.builder.seq(super()._copy_q(batch, head, query, r), beyond)

    # Products.

    def _products(self, rows: int, panel: Index, column: Index, keys: Dim) -> Stmt:
        b, held = self.builder, known_int(self.key_rows)
        sums = _Sums(self._held(rows) // _ROWS, self.vectors_of(keys))
        statements = sums.each(lambda tile, i, j: instructions.zero(tile))

        def step(s: Index) -> Stmt:
            k = panel * (self.form.parts * self.of_k.part) + s * (_ROWS * self.panel)
            return self._multiply(self.form.products, sums, self.of_q, s * self.form.depth, self.of_k, k)

        statements.append(b.loop(held // _ROWS, step, name="step"))
        statements += sums.each(lambda tile, i, j: self._store(tile, self.scores, column, i, j, self.stride))
        return b.seq(*statements)

    def _times_v(
        self, batch: Index, head: Index, rows: int, each_panel: Callable[[Callable[[Index, Index], Stmt | None]], Stmt]
    ) -> Stmt:
        b = self.builder

        def group(first: int, vectors: int) -> Stmt:
            sums, width = _Sums(self._held(rows) // _ROWS, vectors), vectors * self.lanes
            start = as_index(first * self._held(rows) * self.lanes)

            def add(panel: Index, column: Index) -> Stmt:
                v = panel * (self.panel // 2 * self.padded) + first * self.lanes
                return self._multiply(self.value_products, sums, self.of_weights, column, self.of_v, v)

            def begin(tile: int, i: int, j: int) -> Stmt:
                if not self.is_online:
                    return instructions.zero(tile)
                return instructions.load(b, tile, self.out, start + (i * width + j) * _ROWS, width * 4)

            stores = sums.each(lambda tile, i, j: self._store(tile, self.out, start, i, j, width))
            return b.seq(*sums.each(begin), each_panel(add), *stores)

        return b.seq(*[group(first, vectors) for first, vectors in self._groups()])

    def _store(self, tile: int, array: TirBuffer, start: Index, i: int, j: int, stride: int) -> Stmt:
        """A tile of sums as rows of an array of float32."""
        return instructions.store(self.builder, tile, array, start + (i * stride + j) * _ROWS, stride * 4)

    def _multiply(
        self,
        products: tuple[tuple[int, int], ...],
        sums: _Sums,
        left: _Operand,
        row: Index,
        right: _Operand,
        pair: Index,
    ) -> Stmt:
        """sums += rows of 32 bfloat16 from `row` on in `left`, times 16 rows of pairs from `pair` on in `right`: `products` of parts."""
        b, name, statements = self.builder, self.form.instruction, list[Stmt]()
        held: tuple[int | None, int | None] = (None, None)
        for parts in products:
            if parts[0] != held[0]:
                at = row + parts[0] * left.part
                tiles = [(4 + i, at + i * _ROWS * left.row) for i in range(sums.rows)]
                statements += [instructions.load(b, tile, left.array, place, left.row * 2) for tile, place in tiles]
            if parts[1] != held[1]:
                at = pair + parts[1] * right.part
                tiles = [(6 + j, at + j * _ROWS) for j in range(sums.columns)]
                statements += [instructions.load(b, tile, right.array, place, right.row * 4) for tile, place in tiles]
            held = parts
            statements += sums.each(lambda tile, i, j: instructions.multiply(name, tile, 4 + i, 6 + j))
        return b.seq(*statements)


class _Sums:
    """Up to 2 x 2 tiles of sums, registers 0 to 3; the rows' operands are in 4 and 5, the columns' in 6 and 7."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns

    def each(self, body: Callable[[int, int, int], Stmt]) -> list[Stmt]:
        """`body(register, row, column)` of every tile."""
        return [body(2 * i + j, i, j) for i in range(self.rows) for j in range(self.columns)]
