"""Attention of float32 by AMX: as `amx_bf16`, with every number as the sum of several bfloat16 (`operands/amx_formats.py`).

Pattern: a `Bf16AttentionKernel` with a format of float32. What differs:
1. Queries, keys and values are split where they are packed, and their magnitudes are checked.
2. Weights are split as the softmax computes them (`amx_computed`). They need no check: they are at most 1, the largest of a row is 1, and
   products that tiles flush to zero, less than 2^-126, are as little beside it.
3. A tile of rows falls back to `tiled` where a key, a value or a query of it is neither 0 nor of a magnitude from 2^-48 to 2^48 (infinities,
   NaN, denormal numbers). `tiled` packs keys and values of its own before its first tile.
Source: Henry, Tang & Heinecke, ARITH 2019 (`amx_formats`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch_hybrid_backend.engines.cpu.kernels import Bf16AttentionKernel
from torch_hybrid_backend.engines.cpu.schedules.attention.amx_computed import AmxComputedAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.tiled import TiledAttention
from torch_hybrid_backend.engines.cpu.schedules.axes import vectors
from torch_hybrid_backend.engines.cpu.schedules.bf16_split import word
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import tile_start
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import ceil_div, known_int

# Flags of a task: a key or a value cannot be split; a query of the tile cannot be; `tiled` has packed.
_PACKED_OUTSIDE, _QUERY_OUTSIDE, _HAS_PACKED = range(3)


class AmxBf16SplitAttention(AmxComputedAttention):
    """The emission of one kernel. Sizes are known."""

    def __init__(self, kernel: Bf16AttentionKernel, builder: Builder, printer: Printer, target: Target) -> None:
        super().__init__(kernel, builder, printer, target)
        self.exact = TiledAttention(kernel, builder, printer, target)
        self.state = builder.local(3, "int32", "state")

    def _buffers(self) -> tuple[TirBuffer, ...]:
        return (*super()._buffers(), *self.exact._buffers(), self.state)

    def _set(self, number: int, value: int) -> Stmt:
        return self.builder.store(self.state, number, tir.const(value, "int32"))

    def _is_set(self, number: int) -> TirExpr:
        return self.builder.load(self.state, number) != 0

    def _watched(self, number: int, statement: Stmt) -> Stmt:
        """`statement`, which splits by `self.splitting`, and what it found out."""
        return self.builder.seq(self.splitting.begin(), statement, self.splitting.when_outside(self._set(number, 1)))

    def _pack(self, batch: Index, head: Index) -> Stmt | None:
        unknown = [self._set(number, 0) for number in (_PACKED_OUTSIDE, _HAS_PACKED)]
        return self.builder.seq(*unknown, super()._pack(batch, head))

    def _row_of_key(self, batch: Index, head: Index, key: Index, row: Index) -> Stmt:
        kernel = self.kernel
        return self._split_row(
            lambda d: self.read(kernel.k, kernel.k_vars, batch, head, key, d),
            lambda number: (self.rows_of_keys, row + number * self.part_of_rows),
        )

    def _split_row(self, value: Callable[[Index], TirExpr], place: Callable[[int], tuple[TirBuffer, Index]]) -> Stmt:
        """Elements of a head, value(d), from where `place(part)` says on."""

        def piece(start: Index, width: int) -> Stmt:
            def at(number: int) -> tuple[TirBuffer, Index]:
                array, first = place(number)
                return array, first + start

            return self.splitting.stored(width, lambda lane: value(start + lane), at)

        whole, left = divmod(known_int(self.depth), self.lanes)
        pieces = [piece(as_index(whole * self.lanes + start), width) for start, width in lane_chunks(left, self.lanes)]
        loop = self.builder.loop(whole, lambda i: piece(i * self.lanes, self.lanes), name="d") if whole else None
        return self.builder.seq(loop, *pieces)

    def pack_k(self, batch: Index, head: Index) -> Stmt:
        self.splitting = self._parts()
        return self._watched(_PACKED_OUTSIDE, super().pack_k(batch, head))

    def pack_v(self, batch: Index, head: Index) -> Stmt:
        b, kernel, parts, lanes = self.builder, self.kernel, self.form.parts, self.lanes
        low = b.local(parts * lanes, "uint32", "low")
        self.splitting = self._parts()

        def row(t: Index, is_pair: bool = True) -> Stmt:
            def one(base: Index, lane: Index, _: int) -> Stmt:
                def value(side: int) -> TirExpr:
                    return self.read(kernel.v, kernel.v_vars, batch, head, t * 2 + side, base + lane)

                def keep(number: int, bits: TirExpr) -> Stmt:
                    return b.store(low, lane + number * lanes, bits >> word(16))

                def put(number: int, bits: TirExpr) -> Stmt:
                    own = b.load(low, lane + number * lanes)
                    if is_pair:
                        own = own | (bits & word(0xFFFF0000))
                    place = t * self.padded + base + lane + number * self.of_v.part
                    return b.store(self.packed_v, place, tir.reinterpret(own, "int32"))

                first = self.splitting.split(lane, value(0), keep)
                if is_pair:
                    return b.seq(first, self.splitting.split(lane, value(1), put))
                return b.seq(first, *[put(number, word(0)) for number in range(parts)])

            return vectors(b, self.printer, self.width, lanes, one)

        pairs, odd = divmod(known_int(self.keys), 2)
        whole = b.loop(pairs, row, name="t") if pairs else None
        half = row(as_index(pairs), False) if odd else None
        size = parts * self.of_v.part
        is_padded = self.width < self.padded or pairs * self.padded < self.of_v.part
        clear = self.fill(self.packed_v, as_index(0), size, tir.const(0, "int32")) if is_padded else None
        return b.seq(b.alloc(low), clear, self._watched(_PACKED_OUTSIDE, b.seq(whole, half)))

    # One tile of query rows.

    def _row_tile(self, batch: Index, head: Index, first: Index, rows: int) -> Stmt:
        b, height = self.builder, min(rows, self.exact.most_rows)
        self.splitting = self._parts()
        copy = b.loop(rows, lambda r: self._split_q(batch, head, first + r, r), name="r")
        copied = b.seq(self._set(_QUERY_OUTSIDE, 0), self._watched(_QUERY_OUTSIDE, copy))

        def part(number: Index) -> Stmt:
            start, begin = tile_start(b, rows, height, number)
            return b.seq(begin, self.exact._row_tile(batch, head, first + start, height))

        pack = b.seq(self.exact._pack(batch, head), self._set(_HAS_PACKED, 1))
        exactly = b.seq(
            b.when(tir.logical_not(self._is_set(_HAS_PACKED)), pack), b.loop(known_int(ceil_div(rows, height)), part)
        )
        is_outside = tir.logical_or(self._is_set(_PACKED_OUTSIDE), self._is_set(_QUERY_OUTSIDE))
        return b.seq(copied, b.when(is_outside, exactly, super()._row_tile(batch, head, first, rows)))

    def _copy_q(self, batch: Index, head: Index, query: Index, r: Index) -> Stmt | None:
        return None  # they are there

    def _split_q(self, batch: Index, head: Index, query: Index, r: Index) -> Stmt:
        """q[part][r][d] = the query."""
        b, kernel, parts = self.builder, self.kernel, self.form.parts

        row = self._split_row(
            lambda d: self.read(kernel.q, kernel.q_vars, batch, head, query, d),
            lambda number: (self.q, r * self.of_q.row + number * self.of_q.part),
        )
        left = self.query_size - known_int(self.depth)
        ends = [(r + 1) * self.of_q.row - left + number * self.of_q.part for number in range(parts)]
        beyond = [self.fill(self.q, end, left, tir.const(0, "uint16")) for end in ends] if left else []
        return b.seq(row, *beyond)
