"""Attention by AMX whose operands are computed: as `amx_bf16`, with the softmax's weights split into several bfloat16 where the kernel says so.

Pattern: a `Bf16AttentionKernel` with a format. What differs:
1. Keys are computed row by row into scratch memory, as bfloat16. From there squares of pairs are transposed, as of keys in memory.
2. Weights are split as the softmax computes them (`operands/amx_formats.py`).
Operands are bfloat16 or integers of 8 bits: all that are -256 to 256 are bfloat16, so each is one part and sums of their products are exact.
Source: Henry, Tang & Heinecke, ARITH 2019 (`amx_formats`).
"""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import Bf16AttentionKernel
from torch_hybrid_backend.engines.cpu.schedules.attention.amx_bf16 import AmxBf16Attention
from torch_hybrid_backend.engines.cpu.schedules.axes import vectors
from torch_hybrid_backend.engines.cpu.schedules.bf16_split import FloatParts, upper
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.sizes.size import known_int


class AmxComputedAttention(AmxBf16Attention):
    """The emission of one kernel. Sizes are known."""

    def __init__(self, kernel: Bf16AttentionKernel, builder: Builder, printer: Printer, target: Target) -> None:
        super().__init__(kernel, builder, printer, target)
        # A panel's keys, part by part, rows of whole steps.
        self.part_of_rows = self.panel * self.query_size
        self.rows_of_keys = self._workspace(self.form.parts * self.part_of_rows, "rows", "uint16")
        self.splitting: FloatParts = self._parts()  # of the statements that are emitted

    def _parts(self) -> FloatParts:
        return FloatParts(self.builder, self.printer, self.form.parts, self.target)

    def _buffers(self) -> tuple[TirBuffer, ...]:
        return (*super()._buffers(), self.rows_of_keys)

    def _bits(self, expr: Expr, variables: tuple[LoopVar, ...], *point: Index) -> TirExpr:
        # Nothing is rounded: it is a bfloat16.
        return upper(tir.reinterpret(self.read(expr, variables, *point), "uint32"))

    def _row_of_key(self, batch: Index, head: Index, key: Index, row: Index) -> Stmt:
        """rows[row ...] = the key, in all parts."""
        b, kernel = self.builder, self.kernel

        def one(base: Index, lane: Index, _: int) -> Stmt:
            bits = self._bits(kernel.k, kernel.k_vars, batch, head, key, base + lane)
            return b.store(self.rows_of_keys, row + base + lane, bits)

        return vectors(b, self.printer, self.depth, self.lanes, one)

    def pack_k(self, batch: Index, head: Index) -> Stmt:
        b, size, part = self.builder, self.query_size, self.part_of_rows

        def panel_of(panel: Index, count: int) -> Stmt:
            def key(i: Index) -> Stmt:
                return self._row_of_key(batch, head, panel * self.panel + i, i * size)

            def square(position: tuple[Index, ...]) -> Stmt:
                number, s = position
                first = (panel * self.form.parts + number) * self.of_k.part + s * (self.lanes * self.panel)
                squares = []
                for v in range(self.vectors_of(count)):
                    rows = [number * part + (v * self.lanes + lane) * size for lane in range(self.lanes)]
                    starts = [row + s * (2 * self.lanes) for row in rows]
                    squares.append(self.transposed_square(self.rows_of_keys, starts, first + v * self.lanes))
                return b.seq(*squares)

            return b.seq(
                b.loop(count, key, name="key"), b.nest((self.form.parts, size // (2 * self.lanes)), square, name="s")
            )

        whole, tail = known_int(self.whole_panels), known_int(self.tail)
        panels = [b.loop(whole, lambda p: panel_of(p, self.panel), name="p")] if whole else []
        panels += [panel_of(as_index(whole), tail)] if tail else []
        # Beyond a head's last element, and beyond the last key.
        is_ragged = size > known_int(self.depth) or tail
        clear = (
            self.fill(self.rows_of_keys, as_index(0), self.form.parts * part, tir.const(0, "uint16"))
            if is_ragged
            else None
        )
        return b.seq(clear, *panels)

    # The softmax.

    def _row_locals(self) -> tuple[TirBuffer, ...]:
        self.splitting = FloatParts(self.builder, self.printer, self.weight_parts, self.target)
        self.recent = self.builder.local(self.panel, self.dtype, "recent")
        return (self.recent, *self.splitting.vectors)

    def _keep(self, lane: Index, at: Index, weight: TirExpr) -> Stmt:
        return self.builder.store(self.recent, lane, weight)

    def _kept(self, start: Index, vectors: int) -> Stmt | None:
        b, part = self.builder, self.of_weights.part

        def vector(number: int) -> Stmt:
            at, of_panel = start + number * self.lanes, number * self.lanes
            if number >= vectors:
                return b.seq(
                    *[
                        self.fill(self.weights, at + own * part, self.lanes, tir.const(0, "uint16"))
                        for own in range(self.weight_parts)
                    ]
                )
            return self.splitting.stored(
                self.lanes,
                lambda lane: b.load(self.recent, lane + of_panel),
                lambda own: (self.weights, at + own * part),
                watches=False,
            )

        return b.seq(*map(vector, range(self.panel_vectors)))
