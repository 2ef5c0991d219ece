"""Attention of few queries, as a decoder with a cache of keys and values asks: every key and value is read once, where it lies.

Pattern: an `AttentionKernel` of at most 8 queries, those of all heads that share keys, whose heads are whole vectors. Steps, for each (batch,
head of keys):
1. Scores: a group of keys times the queries, in registers, along the head; a horizontal sum ends each score. Packing the keys, as
   `tiled` does, would cost as much as the products themselves.
2. Softmax as in `tiled`, in blocks of keys where they are many.
3. Weights times values: a row of values is a vector operand as it is.
Keys behind the last one that is visible to all queries, where the mask tells it, are not read: a static cache is mostly empty.
Time is that of reading keys and values from memory: 2 T D elements for 4 T D operations a query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hybrid_backend.engines.cpu.schedules.attention.parts import FEW_QUERIES
from torch_hybrid_backend.engines.cpu.schedules.attention.tiled import TiledAttention
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import LaneFn, RegisterTile, partials
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.loops.attention_scores import is_free_of, visible
from torch_hybrid_backend.loops.cache_updates import CacheUpdate
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Expr, Load
from torch_hybrid_backend.sizes.size import Dim

# Accumulators of a group of keys times the queries: enough to hide the latency of multiply-adds, and few enough for 16 registers.
_ACCUMULATORS = 8


class DecodingAttention(TiledAttention):
    """The emission of one kernel."""

    # Variables of the row tile at hand: no row of it sees a key behind one of them.
    _last: Sequence[TirExpr] = ()

    def serves(self) -> bool:
        """True if the kernel is of this kind."""
        lanes = self.lanes
        few = isinstance(self.queries, int) and self.queries <= FEW_QUERIES
        vectors = isinstance(self.depth, int) and self.depth % lanes == 0 and self.width % lanes == 0
        return few and vectors and isinstance(self.packed_keys, Load) and isinstance(self.packed_values, Load)

    def _row_tile(self, batch: Index, head: Index, first: Index, rows: int) -> Stmt:
        b, kernel = self.builder, self.kernel
        self._last, binds = [], []
        for high in self._last_keys():
            last = b.variable("last", "int64")
            value = self.read(high, kernel.score_vars, batch, *self.place(head, first), as_index(0))
            binds.append(b.bind(last, value))
            self._last.append(last)
        return b.seq(*binds, super()._row_tile(batch, head, first, rows))

    def _last_keys(self) -> tuple[Expr, ...]:
        """The last key that is visible, as scalars of which the smallest counts; none that differs between the rows of a task."""
        if self.kernel.score is None:
            return ()
        _, head, query, key = self.kernel.score_vars
        highs = visible(self.kernel.score, key).bounds.highs
        return tuple(high for high in highs if is_free_of(high, head) and is_free_of(high, query))

    def _each_panel(self, block: Index, first: Index, rows: int, body: Callable[[Index, Index], Stmt | None]) -> Stmt:
        b = self.builder

        def seen(panel: Index, column: Index) -> Stmt | None:
            statement = body(panel, column)
            for last in self._last if statement is not None else ():
                statement = b.when(tir.cast(b.index(panel * self.panel), "int64") <= last, statement)
            return statement

        return super()._each_panel(block, first, rows, seen)

    def _buffers(self) -> tuple[TirBuffer, ...]:
        return (self.q, self.scores, self.out, self.maximum, self.sum)

    def _pack(self, batch: Index, head: Index) -> Stmt | None:
        return None

    def _scores(self, batch: Index, head: Index, first: Index, rows: int, panel: Index, column: Index) -> Stmt:
        """scores[row][column ...] = q k^T for one panel, masked."""
        b, group = self.builder, max(1, _ACCUMULATORS // rows)

        def of(keys: Dim) -> Stmt:
            whole = keys // group
            left = keys - whole * group

            def dots(start: Index, count: int) -> Stmt:
                return self._dots(batch, head, rows, panel * self.panel + start, column + start, count)

            groups = b.loop(whole, lambda g: dots(g * group, group), name="g") if whole != 0 else None
            rest = b.loop(left, lambda i: dots(i + whole * group, 1), name="g") if left != 0 else None
            return b.seq(groups, rest, self._score(batch, head, first, rows, panel, column, keys))

        return self._over_keys(panel, of)

    def _dots(self, batch: Index, head: Index, rows: int, key: Index, column: Index, count: int) -> Stmt:
        """scores[row][column + i] = q[row] . k[key + i] for i in 0 .. count-1."""
        b, kernel = self.builder, self.kernel
        assert isinstance(self.depth, int)
        tile = RegisterTile(b, self.printer, count, rows, self.lanes, self.dtype)

        def step(d: Index, way: int) -> Stmt | None:
            def k(row: int, lane: Index) -> TirExpr:
                return self.read(kernel.k, kernel.k_vars, batch, head * self.shared, key + row, d * self.lanes + lane)

            def q(row: int, lane: Index) -> TirExpr:
                return b.load(self.q, d * self.lanes + lane + row * self.depth)

            before, keys = self._once(tile, partials(k, count), self.key_update)
            return b.seq(before, tile.accumulate(keys, partials(q, rows), way))

        stores = [
            b.store(self.scores, column + i + row * self.stride, tile.at(i, row, 0))
            for i in range(count)
            for row in range(rows)
        ]
        return b.seq(
            tile.declare(), tile.clear(), tile.reduce(self.depth // self.lanes, step), tile.sum_lanes(), *stores
        )

    def _once(
        self, tile: RegisterTile, elements: list[LaneFn], update: CacheUpdate | None
    ) -> tuple[Stmt | None, list[LaneFn]]:
        """Elements of keys or values for all rows, and what goes before: where some are new, each is chosen once."""
        return (None, elements) if update is None else tile.held(elements)

    def _add_products(self, tile: RegisterTile, weights: list[LaneFn], values: list[LaneFn], way: int) -> Stmt | None:
        before, once = self._once(tile, values, self.value_update)
        return self.builder.seq(before, tile.accumulate(weights, once, way))

    def _groups(self) -> list[tuple[int, int]]:
        """(first, count) of the value vectors that are summed together: four at a time."""
        return [(v, min(4, self.value_vectors - v)) for v in range(0, self.value_vectors, 4)]

    def _over_keys(self, panel: Index, body: Callable[[Dim], Stmt]) -> Stmt | None:
        return self.by_panel(panel, body)

    def _value(self, batch: Index, head: Index, panel: Index, t: Index, vector: int, lane: Index) -> TirExpr:
        kernel = self.kernel
        key, e = panel * self.panel + t, lane + vector * self.lanes
        return self.read(kernel.v, kernel.v_vars, batch, head * self.shared, key, e)
