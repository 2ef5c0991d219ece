"""Attention by bfloat16 dot products (AVX512-BF16): as `tiled`, with both products of pairs of bfloat16, in VNNI layout, and sums in float32.

Pattern: a `Bf16AttentionKernel`. What differs:
1. Keys are packed in pairs of two neighbours along the head, (panel, pair, key of the panel). Transposing squares of pairs takes half the
   instructions. Values are packed in pairs of two neighbouring keys, (pair, padded width). Queries are copied as they are.
2. Scores are scaled in float32, in the softmax or where they are masked: a scaled query would have to be rounded again.
3. Weights are rounded to bfloat16 as the softmax computes them. Their sum is of what they were before, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_hybrid_backend.engines.cpu.dot_products import bf16_dot_product
from torch_hybrid_backend.engines.cpu.kernels import Bf16AttentionKernel
from torch_hybrid_backend.engines.cpu.schedules.attention.tiled import TiledAttention
from torch_hybrid_backend.engines.cpu.schedules.bf16_split import upper
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.dot import load_word
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.storage import narrow
from torch_hybrid_backend.engines.cpu.tir.x86 import rounded_words
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Expr, Load
from torch_hybrid_backend.loops.ops import round_to
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, known_int


class Bf16Attention(TiledAttention):
    """The emission of one kernel."""

    group = 2

    def __init__(self, kernel: Bf16AttentionKernel, builder: Builder, printer: Printer, target: Target) -> None:
        super().__init__(kernel, builder, printer, target)
        self.dot = bf16_dot_product(target)
        self.padded = self.value_vectors * self.lanes
        # Elements of a query, in whole pairs.
        self.query_size = known_int(self.key_rows) * self.group
        self.tallest = self._held(self.tallest)
        self.q = self._workspace(self.tallest * self.query_size, "q", "uint16")
        self.scores = self._workspace(self.tallest * self.stride, "scores")
        self.weights = self._workspace(self.tallest * self.stride, "weights", "uint16")
        self.out = self._workspace(self.tallest * self.padded, "out")
        # The weights of a row's panel, until they are rounded: in registers; of the row whose softmax is emitted.
        self.recent: TirBuffer = None
        self.rounds_panels = target.isa.rounds_to_bfloat16 and self.panel == 32

    def _buffers(self) -> tuple[TirBuffer, ...]:
        return (*super()._buffers(), self.weights)

    # Packing.

    def _bits(self, expr: Expr, variables: tuple[LoopVar, ...], *point: Index) -> TirExpr:
        """An operand's element as the bits of a bfloat16."""
        if isinstance(expr, Load) and expr.buffer.dtype == "bfloat16" and expr.buffer in self.printer.arguments:
            array, _ = self.printer.arguments[expr.buffer]
            env = dict(zip(variables, point, strict=True))
            return self.builder.load(array, self.printer.offset(expr.buffer, expr.index, env))
        rounded = self.read(round_to(expr, "bfloat16"), variables, *point)
        return upper(tir.reinterpret(rounded, "uint32"))

    def _of_key(self, batch: Index, head: Index, key: Index, d: Index) -> TirExpr:
        k, variables = self.kernel.k, self.kernel.k_vars
        return _pair(*(self._bits(k, variables, batch, head, key, d * 2 + side) for side in (0, 1)))

    def pack_v(self, batch: Index, head: Index) -> Stmt:
        """v[pair of keys][padded width]; what is padded is zero, keys beyond the last too where they are read (0 * NaN is not 0)."""
        b, kernel, padded = self.builder, self.kernel, self.padded

        def row(t: Index, is_pair: bool = True) -> Stmt:
            def one(e: Index) -> Stmt:
                first, second = (
                    self._bits(kernel.v, kernel.v_vars, batch, head, t * 2 + side, e) if side == 0 or is_pair else None
                    for side in (0, 1)
                )
                return b.store(self.packed_v, t * padded + e, _pair(first, second))

            last = t * padded + (padded - self.lanes)
            clear = self.fill(self.packed_v, last, self.lanes, tir.const(0, "int32")) if self.width < padded else None
            return b.seq(clear, self.along(self.width, one))

        pairs, odd = self.keys // 2, self.keys - self.keys // 2 * 2
        half = row(as_index(pairs), False) if odd != 0 else None
        if isinstance(odd, Size):
            half = b.when(b.size(odd) > 0, half)
        whole = b.loop(pairs, row, name="t") if pairs != 0 else None
        used = ceil_div(self.keys, 2)
        beyond = self.panels * (self.panel // 2) - used
        rest = None
        if self._reads_beyond() and beyond != 0:
            rest = self.fill(self.packed_v, as_index(used * padded), beyond * padded, tir.const(0, "int32"))
        return b.seq(whole, half, rest)

    def _reads_beyond(self) -> bool:
        """True if values beyond the last key are read, with weights of zero."""
        return isinstance(self.tail, Size)

    def _copy_q(self, batch: Index, head: Index, query: Index, r: Index) -> Stmt:
        """q[r][d] = the query."""
        b, kernel = self.builder, self.kernel

        def element(d: Index) -> Stmt:
            value = self._bits(kernel.q, kernel.q_vars, batch, head, query, d)
            return b.store(self.q, r * self.query_size + d, value)

        return self.along(self.depth, element)

    # Products.

    def _products(self, rows: int, panel: Index, column: Index, keys: Dim) -> Stmt:
        tile = self._tile(rows, self.vectors_of(keys), self.key_rows)

        def step(pair: Index, way: int) -> Stmt | None:
            k = panel * (self.key_rows * self.panel) + pair * self.panel
            return self._accumulate(tile, self.q, lambda row: pair * 2 + row * self.query_size, self.packed_k, k, way)

        compute = self.builder.seq(tile.declare(), tile.clear(), tile.reduce(self.key_rows, step))
        return self.builder.seq(compute, tile.spill(self.scores, column, self.stride))

    def _add_values(
        self, tile: RegisterTile, batch: Index, head: Index, first: int, panel: Index, column: Index
    ) -> Stmt | None:
        def step(pair: Index, way: int) -> Stmt | None:
            v = panel * (self.panel // 2 * self.padded) + pair * self.padded + first * self.lanes

            def weights(row: int) -> Index:
                return column + pair * 2 + row * self.stride

            return self._accumulate(tile, self.weights, weights, self.packed_v, v, way)

        return self._over_keys(panel, lambda keys: tile.steps(ceil_div(keys, 2), step))

    def _accumulate(
        self, tile: RegisterTile, left: TirBuffer, pairs: Callable[[int], Index], right: TirBuffer, at: Index, way: int
    ) -> Stmt | None:
        """tile += the pairs that begin at elements `pairs(row)` of `left`, times vectors of pairs from `at` on in `right`."""
        b, lanes, dot = self.builder, self.lanes, self.dot
        assert dot is not None  # else the kernel is another

        def vector(number: int) -> TirExpr:
            return tir.reinterpret(b.load_vector(right, at + number * lanes, lanes), f"uint16x{2 * lanes}")

        scalars = [load_word(left, b.index(pairs(row)), dot, lanes) for row in range(tile.rows)]
        return tile.accumulate_words(scalars, [vector(v) for v in range(tile.vectors)], dot, way)

    # The softmax.

    def _scaled(self, product: TirExpr) -> TirExpr:
        return product * tir.const(self.kernel.scale, self.dtype)

    def _row_locals(self) -> tuple[TirBuffer, ...]:
        self.recent = self.builder.local(self.panel, self.dtype, "recent")
        return (self.recent,) if self.rounds_panels else ()

    def _keep(self, lane: Index, at: Index, weight: TirExpr) -> Stmt:
        if self.rounds_panels:
            return self.builder.store(self.recent, lane, weight)
        return self.builder.store(self.weights, at, narrow(weight, "bfloat16"))

    def _kept(self, start: Index, vectors: int) -> Stmt | None:
        """weights[start ...] = the panel's, rounded; zeros where it has fewer than a panel's vectors."""
        b, lanes = self.builder, self.lanes
        if not self.rounds_panels:
            missing = (self.panel_vectors - vectors) * lanes
            return (
                self.fill(self.weights, start + vectors * lanes, missing, tir.const(0, "uint16")) if missing else None
            )

        def vector(number: int) -> TirExpr:
            if number >= vectors:
                return tir.broadcast(tir.const(0, self.dtype), lanes)
            return b.load_vector(self.recent, number * lanes, lanes)

        words = tir.reinterpret(rounded_words(b, vector(0), vector(1)), f"uint16x{self.panel}")
        return b.store_vector(self.weights, start, words, self.panel)


def _pair(low: TirExpr, high: TirExpr | None) -> TirExpr:
    """Two bfloat16, the second zero for None, in 32 bits."""
    words = [tir.cast(half, "uint32") for half in (low, high) if half is not None]
    if high is not None:
        words[0] = words[0] | (words[1] << tir.const(16, "uint32"))
    return tir.reinterpret(words[0], "int32")
