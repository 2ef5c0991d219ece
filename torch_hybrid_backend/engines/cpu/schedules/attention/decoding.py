"""Attention of few queries, as a decoder with a cache of keys and values asks: every key and value is read once, where it lies.

Pattern: an `AttentionKernel` of at most 8 queries, those of all heads that share keys, whose heads are whole vectors. Steps, for each (batch,
head of keys):
1. Scores: a group of keys times the queries, in registers, along the head; a horizontal sum ends each score. Packing the keys, as
   `tiled` does, would cost as much as the products themselves.
2. Softmax as in `tiled`, in blocks of keys where they are many.
3. Weights times values: a row of values is a vector operand as it is.
Keys before the first and behind the last one that are visible, where the mask tells them, are not read: a static cache is mostly empty.
Time is that of reading keys and values from memory: 2 T D elements for 4 T D operations a query.

Where there are fewer heads of keys than cores, or heads that cores cannot share evenly, the visible keys are divided too: each task has a part
of them, with maxima and sums of its own, which a second loop puts together by the maximum of all.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch_hybrid_backend.engines.cpu.schedules.attention.parts import FEW_QUERIES
from torch_hybrid_backend.engines.cpu.schedules.attention.tiled import TiledAttention
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import LaneFn, RegisterTile, by_part, partials
from torch_hybrid_backend.engines.cpu.tile_sizes import split_at_most
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.loops.attention_scores import Bounds, is_free_of, visible
from torch_hybrid_backend.loops.cache_updates import CacheUpdate
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Expr, Load
from torch_hybrid_backend.sizes.size import Dim, known_int, size_hint

# Accumulators of a group of keys times the queries: enough to hide the latency of multiply-adds, and few enough for 16 registers.
_ACCUMULATORS = 8
# Fewer keys in a part do not pay for a second loop.
_LEAST_KEYS_OF_PART = 256
# A row's share of the time of a task, over that of reading its keys and values; where rows are more than few, that of packing these.
_ROW, _PACKING = 1 / 8, 1.0
# Multiplications of putting parts together that a core has done sooner than two cores have begun.
_SERIAL = 8192


class DecodingAttention(TiledAttention):
    """The emission of one kernel."""

    # Of the row tile at hand: the first panel that is read, and the one behind the last. None: all are.
    _seen: tuple[TirExpr, TirExpr] | None = None

    def serves(self) -> bool:
        """True if the kernel is of this kind."""
        lanes = self.lanes
        few = isinstance(self.queries, int) and self.queries <= FEW_QUERIES
        vectors = isinstance(self.depth, int) and self.depth % lanes == 0 and self.width % lanes == 0
        return few and vectors and isinstance(self.packed_keys, Load) and isinstance(self.packed_values, Load)

    def _sharing(self) -> tuple[int, int]:
        whole, cores = super()._sharing(), self.target.cores
        queries, keys = self.queries, size_hint(self.kernel.k_vars[2].extent)
        if self.kernel.causal or not isinstance(queries, int) or queries > FEW_QUERIES:
            return whole
        heads = size_hint(self.batch * self.heads)

        def time(way: tuple[int, int]) -> float:
            together, parts = way
            rows = together * queries
            return (
                -(-heads // together * parts // cores)
                / parts
                * (1 + rows * _ROW + (_PACKING if rows > FEW_QUERIES else 0))
            )

        most = min(cores, keys // _LEAST_KEYS_OF_PART)
        few = [n for n in self._heads_together() if n * queries <= FEW_QUERIES]
        ways = [(together, parts) for together in few for parts in range(2, most + 1)]
        best = min(ways, key=time, default=whole)
        # Of parts that are about as good, the fewest.
        best = next((way for way in ways if way[0] == best[0] and time(way) < 1.1 * time(best)), best)
        return best if time(best) < 0.9 * time(whole) else whole

    # Keys in parts.

    def emit(self) -> Stmt:
        if self.key_parts == 1:
            return super().emit()
        b, rows = self.builder, split_at_most(known_int(self.queries), self.most_rows)
        width, of_task = self.value_vectors * self.lanes, known_int(self.queries)
        of_tasks = self.batch * self.heads * self.key_parts * of_task
        outs = b.workspace(of_tasks * width, self.dtype, "outs")
        maxima, sums = (b.workspace(of_tasks, self.dtype, name) for name in ("maxima", "sums"))

        def places(batch: Index, head: Index, part: Index, first: Index) -> tuple[Index, Index]:
            """Places of what a row tile has found: in `outs`, and in the two others."""
            at = ((batch * self.heads + head) * self.key_parts + part) * of_task + first
            return at * width, at

        def each_tile(body: Callable[[Index, int], Stmt]) -> Stmt:
            return b.loop(rows.parts, lambda number: by_part(b, rows, number, body), name="tile")

        def part_of(position: tuple[Index, ...]) -> Stmt:
            batch, part, head = position

            def tile(first: Index, count: int) -> Stmt:
                out, row = places(batch, head, part, first)

                def copy(to: TirBuffer, start: Index, source: TirBuffer, size: int) -> Stmt:
                    return self.along(size, lambda i: b.store(to, start + i, b.load(source, i)))

                return b.seq(
                    self._see(batch, head, first, count, part),
                    self._sums_of_rows(batch, head, first, count),
                    copy(outs, out, self.out, count * width),
                    copy(maxima, row, self.maximum, count),
                    copy(sums, row, self.sum, count),
                )

            return b.seq(*map(b.alloc, self._buffers()), each_tile(tile))

        def together(position: tuple[Index, ...]) -> Stmt:
            batch, head = position

            def tile(first: Index, count: int) -> Stmt:
                def found(part: Index) -> tuple[Index, Index]:
                    return places(batch, head, part, first)

                def row(r: Index) -> Stmt:
                    return b.seq(
                        self._put_together(outs, maxima, sums, found, count, r),
                        self._write_row(batch, head, first, count, r),
                    )

                return b.loop(count, row, name="r")

            return b.seq(*map(b.alloc, (self.out, self.maximum, self.sum)), each_tile(tile))

        is_small = isinstance(of_tasks, int) and of_tasks * width <= _SERIAL
        return b.seq(
            *map(b.alloc_on_heap, (outs, maxima, sums)),
            b.fused((self.batch, self.key_parts, self.heads), part_of),
            b.fused((self.batch, self.heads), together, "serial" if is_small else "parallel"),
        )

    def _put_together(
        self,
        outs: TirBuffer,
        maxima: TirBuffer,
        sums: TirBuffer,
        found: Callable[[Index], tuple[Index, Index]],
        rows: int,
        r: Index,
    ) -> Stmt:
        """out[group][r] and sum[r], of the parts, each at the places `found(part)` and brought to the maximum of all."""
        b, dtype = self.builder, self.dtype
        maximum, shift = b.load(self.maximum, r), b.variable("shift", dtype)
        zero, lowest = tir.const(0, dtype), tir.const(-math.inf, dtype)

        def larger(part: Index) -> Stmt:
            return b.store(self.maximum, r, tir.maximum(maximum, b.load(maxima, found(part)[1] + r)))

        def part_of_sums(part: Index) -> Stmt:
            start, at = found(part)
            return self._exp(b.load(maxima, at + r) - shift, partial(add, start, at))

        def add(start: Index, at: Index, factor: TirExpr) -> Stmt:
            def group(first: int, vectors: int) -> Stmt:
                def one(i: Index) -> Stmt:
                    place = r * (vectors * self.lanes) + i + first * self._held(rows) * self.lanes
                    return b.store(self.out, place, b.load(self.out, place) + b.load(outs, start + place) * factor)

                return self.along(vectors * self.lanes, one)

            total = b.load(self.sum, r) + b.load(sums, at + r) * factor
            return b.seq(b.store(self.sum, r, total), *[group(*each) for each in self._groups()])

        def clear(first: int, vectors: int) -> Stmt:
            start = r * (vectors * self.lanes) + first * self._held(rows) * self.lanes
            return self.fill(self.out, start, vectors * self.lanes, zero)

        return b.seq(
            b.store(self.maximum, r, lowest),
            b.loop(self.key_parts, larger, name="part"),
            # Parts of which every key is masked: subtract zero, so that their factors are zero and not NaN.
            b.bind(shift, tir.select(tir.equal(maximum, lowest), zero, maximum)),
            b.store(self.sum, r, zero),
            *[clear(*each) for each in self._groups()],
            b.loop(self.key_parts, part_of_sums, name="part"),
        )

    # Visible keys.

    def _row_tile(self, batch: Index, head: Index, first: Index, rows: int) -> Stmt:
        seen = self._see(batch, head, first, rows, as_index(0))
        return self.builder.seq(seen, super()._row_tile(batch, head, first, rows))

    def _see(self, batch: Index, head: Index, first: Index, rows: int, part: Index) -> Stmt | None:
        """Statements that find the panels which a part of the keys has of those that a row tile sees."""
        b, kernel, bounds = self.builder, self.kernel, self._bounds()
        self._seen = None
        if not (bounds.lows or bounds.highs or kernel.causal or self.key_parts > 1):
            return None
        keys, panel = b.size(self.keys, "int64"), tir.const(self.panel, "int64")

        def number(key: Expr) -> TirExpr:
            return self.read(key, kernel.score_vars, batch, *self.place(head, first), as_index(0))

        begin, end = tir.const(0, "int64"), b.size(self.panels, "int64")
        one, none = tir.const(1, "int64"), tir.const(0, "int64")
        for low in bounds.lows:
            begin = tir.maximum(begin, tir.minimum(tir.maximum(number(low), none), keys) // panel)
        for high in bounds.highs:
            behind = tir.maximum(tir.minimum(number(high), keys - one), -one) + one
            end = tir.minimum(end, (behind + (panel - one)) // panel)
        if kernel.causal:
            end = tir.minimum(end, (b.index(first + rows, "int64") + (panel - one)) // panel)
        lowest, count = b.variable("lowest", b.address), b.variable("count", b.address)
        binds = [
            b.bind(lowest, tir.cast(begin, b.address)),
            b.bind(count, tir.maximum(tir.cast(end, b.address) - lowest, b.size(0))),
        ]
        names = b.variable("begin", b.address), b.variable("end", b.address)
        for name, at in zip(names, (part, part + 1), strict=True):
            share = count * b.index(at) // b.size(self.key_parts) if self.key_parts > 1 else b.index(at) * count
            binds.append(b.bind(name, lowest + share))
        self._seen = names
        return b.seq(*binds)

    def _bounds(self) -> Bounds:
        """Keys that are visible, between scalars of which the nearest count; none that differs between the rows of a task."""
        if self.kernel.score is None:
            return Bounds()
        _, head, query, key = self.kernel.score_vars
        bounds = visible(self.kernel.score, key).bounds

        def alike(scalars: tuple[Expr, ...]) -> tuple[Expr, ...]:
            return tuple(each for each in scalars if is_free_of(each, head) and is_free_of(each, query))

        return Bounds(alike(bounds.lows), alike(bounds.highs))

    def _each_block(self, block: Callable[[Index], Stmt]) -> Stmt:
        if self._seen is None or not self.is_online:
            return super()._each_block(block)
        b, (begin, end) = self.builder, self._seen
        blocks = (end - begin + b.size(self.block_panels - 1)) // b.size(self.block_panels)
        return b.loop_until(blocks, self.blocks, block, "block")

    def _each_panel(self, block: Index, first: Index, rows: int, body: Callable[[Index, Index], Stmt | None]) -> Stmt:
        if self._seen is None:
            return super()._each_panel(block, first, rows, body)
        b, (begin, end) = self.builder, self._seen
        start = begin + b.index(block * self.block_panels)

        def at(i: Index) -> Stmt | None:
            panel, bind = b.bound(start + b.index(i), self.panels, "panel")
            statement = body(panel, i * self.panel)
            return None if statement is None else b.seq(bind, statement)

        return b.loop_until(tir.minimum(end - start, b.size(self.block_panels)), self.block_panels, at, name="p")

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
        """(first, count) of the value vectors that are summed together: four at a time, or two where four have no registers."""
        most = 4 if self.tallest * 4 < self.target.isa.registers - 4 else 2
        return [(v, min(most, self.value_vectors - v)) for v in range(0, self.value_vectors, most)]

    def _over_keys(self, panel: Index, body: Callable[[Dim], Stmt]) -> Stmt | None:
        return self.by_panel(panel, body)

    def _value(self, batch: Index, head: Index, panel: Index, t: Index, vector: int, lane: Index) -> TirExpr:
        kernel = self.kernel
        key, e = panel * self.panel + t, lane + vector * self.lanes
        return self.read(kernel.v, kernel.v_vars, batch, head * self.shared, key, e)
