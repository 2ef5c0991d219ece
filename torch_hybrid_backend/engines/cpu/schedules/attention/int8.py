"""Attention whose queries and keys are integers of 8 bits: as `tiled`, with scores by dot products of four of them, exact in 32 bits.

Pattern: a `ByteAttentionKernel`. What differs:
1. Keys are packed in words of four neighbours along the head, (panel, word, key of the panel): the squares that are transposed are of words,
   which takes a quarter of the instructions. Queries are copied as they are, without signs: signed ones are moved up by 128.
2. What that and a zero point add to a key's scores, so many times the sum of its elements, is taken off where they start. It is found once for
   each key, by the same dot products.
3. Scores are scaled in float32, in the softmax or where they are masked. Weights and values are multiplied in float32, so that weights are not
   rounded: in integers they would take three products of bytes, which is no less work.
"""

from __future__ import annotations

from functools import partial

from torch_hybrid_backend.engines.cpu.dot_products import integer_dot_product
from torch_hybrid_backend.engines.cpu.kernels import ByteAttentionKernel
from torch_hybrid_backend.engines.cpu.schedules.attention.tiled import TiledAttention
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.dot import load_word
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.sizes.size import Dim, known_int

_ONES = 0x01010101  # four bytes of 1


class ByteAttention(TiledAttention):
    """The emission of one kernel."""

    group = 4

    def __init__(self, kernel: ByteAttentionKernel, builder: Builder, printer: Printer, target: Target) -> None:
        super().__init__(kernel, builder, printer, target)
        dot = integer_dot_product("uint8", "int8", target, knows_sums=True)
        assert dot is not None  # else the kernel is another
        self.dot = dot
        self.is_signed = kernel.q.dtype == "int8"
        self.moved = kernel.zero + (128 if self.is_signed else 0)  # by how much queries are too large
        self.q = self._workspace(self.tallest * self.depth, "q", "uint8")
        self.packed_v = self._workspace(self.panels * self.panel * self.value_vectors * self.lanes, "v")
        self.starts = self._workspace(self.panels * self.panel, "starts", "int32")

    def _buffers(self) -> tuple[TirBuffer, ...]:
        return (*super()._buffers(), *([self.starts] if self.moved else []))

    # Packing.

    def _of_key(self, batch: Index, head: Index, key: Index, d: Index) -> TirExpr:
        k, variables = self.kernel.k, self.kernel.k_vars
        word = tir.const(0, "uint32")
        for number in range(self.group):
            byte = tir.reinterpret(self.read(k, variables, batch, head, key, d * self.group + number), "uint8")
            part = tir.cast(byte, "uint32") << tir.const(8 * number, "uint32")
            word = word | part
        return tir.reinterpret(word, "int32")

    def pack_k(self, batch: Index, head: Index) -> Stmt:
        b, words = self.builder, super().pack_k(batch, head)
        if not self.moved:
            return words

        def panel(number: Index) -> Stmt:
            tile = RegisterTile(b, self.printer, 1, self.panel_vectors, self.lanes, "int32")
            ones = tir.broadcast(tir.const(_ONES, "int32"), self.lanes)

            def step(word: Index, way: int) -> Stmt | None:
                return tile.accumulate_words([ones], self._words(tile, number, word), self.dot, way)

            def start(vector: int, lane: Index) -> Stmt:
                at = number * self.panel + vector * self.lanes + lane
                return b.store(self.starts, at, tile.at(0, vector, lane) * tir.const(-self.moved, "int32"))

            starts = [self.vector(self.lanes, partial(start, v)) for v in range(self.panel_vectors)]
            return b.seq(tile.declare(), tile.clear(), tile.reduce(self.key_rows, step), *starts)

        return b.seq(words, b.loop(self.panels, panel, name="p"))

    def _words(self, tile: RegisterTile, panel: Index, word: Index) -> list[TirExpr]:
        """Word number `word` of a panel's keys, in vectors."""
        at = panel * (self.key_rows * self.panel) + word * self.panel
        return [
            tir.reinterpret(
                self.builder.load_vector(self.packed_k, at + v * self.lanes, self.lanes),
                f"int8x{self.group * self.lanes}",
            )
            for v in range(tile.vectors)
        ]

    def _copy_q(self, batch: Index, head: Index, query: Index, r: Index) -> Stmt:
        """q[r][d] = the query, without a sign."""
        b, kernel = self.builder, self.kernel

        def element(d: Index) -> Stmt:
            value = self.read(kernel.q, kernel.q_vars, batch, head, query, d)
            if self.is_signed:
                value = tir.reinterpret(value, "uint8") ^ tir.const(0x80, "uint8")
            return b.store(self.q, r * self.depth + d, value)

        return self.along(self.depth, element)

    # Products.

    def _products(self, rows: int, panel: Index, column: Index, keys: Dim) -> Stmt:
        b, vectors, depth = self.builder, self.vectors_of(keys), known_int(self.depth)
        ways = RegisterTile.ways_for(rows * vectors, self.key_rows)
        tile = RegisterTile(b, self.printer, rows, vectors, self.lanes, "int32", ways)

        def step(word: Index, way: int) -> Stmt | None:
            places = [b.index(word * self.group + row * depth) for row in range(rows)]
            queries = [load_word(self.q, at, self.dot, self.lanes) for at in places]
            return tile.accumulate_words(queries, self._words(tile, panel, word), self.dot, way)

        def start(_: int, vector: int, lane: Index) -> TirExpr:
            return b.load(self.starts, panel * self.panel + vector * self.lanes + lane)

        return b.seq(
            tile.declare(),
            tile.clear(),
            tile.fill(start) if self.moved else None,
            tile.reduce(self.key_rows, step),
            tile.spill(self.scores, column, self.stride),
        )

    def _scaled(self, product: TirExpr) -> TirExpr:
        return product * tir.const(self.kernel.scale, self.dtype)
