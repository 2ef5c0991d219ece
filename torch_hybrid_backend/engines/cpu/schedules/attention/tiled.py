"""Attention: softmax(score(q k^T * scale)) v per batch and head, without the scores ever reaching memory.

Pattern: an `AttentionKernel`. Steps:
1. One parallel loop over (batch, head), and pieces of the query rows where there are fewer heads than cores. A task packs its keys,
   transposed, into panels of two vectors of keys, and its values, dense and padded, into a workspace. Transposing (squares of vectors in
   registers, where a head's dimension is dense) makes both products the register-tiled outer product of `matmul`, for any head size; a dot
   product over D lanes would end every score in a horizontal sum.
2. Query rows go in register tiles: scores of a tile against every panel, then row maximum, exponential, sum, then times the values.
3. Longer than 1024 keys: in blocks of keys with a running maximum and sum, so that the scores stay in the second-level cache.
4. Causal: panels wholly in the future are skipped, those wholly in the past are not masked. The last panel has as many vectors as its keys
   need; keys beyond the last are masked with minus infinity.
5. Few queries of heads that read the same keys and values (grouped heads) are the rows of one task: keys are packed and read once for them.
A row whose every score is minus infinity gives zeros, as eager's scaled_dot_product_attention does, or NaN, as a softmax that is written out.
Source: online softmax, Milakov & Gimelshein 2018; FlashAttention-2, Dao 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch_hybrid_backend.engines.cpu.schedules.attention.parts import AttentionParts
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import (
    LaneFn,
    RegisterTile,
    by_height,
    by_part,
    partials,
    tile_start,
)
from torch_hybrid_backend.engines.cpu.tile_sizes import Split, split_at_most
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Call, parts
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, known_less, size_hint


class TiledAttention(AttentionParts):
    """The emission of one kernel."""

    # Tasks.

    def emit(self) -> Stmt:
        b = self.builder
        buffers = self._buffers()
        if isinstance(self.queries, Size):
            pieces = -(-self.target.cores // max(1, min(size_hint(self.batch * self.heads), self.target.cores)))
            tiles = partial(self._tiles_of_any_number, pieces)
        else:
            rows = split_at_most(self.queries, self.most_rows)
            per_piece = -(-rows.parts // self._pieces(rows))
            pieces = -(-rows.parts // per_piece)
            tiles = partial(self._tiles, rows, per_piece)

        def task(position: tuple[Index, ...]) -> Stmt:
            batch, head, piece = position
            allocations = [b.alloc(buffer) for buffer in buffers]
            return b.seq(*allocations, self._pack(batch, head * self.shared), tiles(batch, head, piece), self._end())

        return b.fused((self.batch, self.heads, pieces), task)

    def _buffers(self) -> tuple[TirBuffer, ...]:
        """Declare the buffers of one task."""
        return (self.packed_k, self.packed_v, self.q, self.scores, self.out, self.maximum, self.sum)

    def _pack(self, batch: Index, head: Index) -> Stmt | None:
        return self.builder.seq(self.pack_k(batch, head), self.pack_v(batch, head))

    def _tiles(self, split: Split, per_piece: int, batch: Index, head: Index, piece: Index) -> Stmt:
        """The row tiles of one piece."""
        b = self.builder

        def part(i: Index) -> Stmt:
            number = piece * per_piece + i
            body = by_part(b, split, number, lambda first, rows: self._row_tile(batch, head, first, rows))
            is_last = isinstance(number.high, int) and number.high >= split.parts
            return b.when(b.index(number) < split.parts, body) if is_last else body

        return b.loop(per_piece, part, name="part")

    def _tiles_of_any_number(self, pieces: int, batch: Index, head: Index, piece: Index) -> Stmt:
        """The row tiles of one piece, where the number of rows is only known at run time."""
        b = self.builder

        def of_height(rows: int) -> Stmt:
            parts = ceil_div(self.queries, rows)
            per_piece = ceil_div(parts, pieces)

            def part(i: Index) -> Stmt:
                number = piece * per_piece + i
                first, begin = tile_start(b, self.queries, rows, number)
                body = b.seq(begin, self._row_tile(batch, head, first, rows))
                return b.when(b.index(number) < b.size(parts), body)

            return b.loop(per_piece, part, name="part")

        return by_height(b, self.queries, self.most_rows, 2, of_height)

    def _pieces(self, split: Split) -> int:
        """Pieces of the rows per head: enough for the cores, as few as may be, because each packs keys and values anew."""
        heads = size_hint(self.batch * self.heads)

        def time(pieces: int) -> float:
            # 32 multiply-adds a cycle, twice; about one cycle per element packed.
            return -(-heads * pieces // self.target.cores) * (size_hint(self.queries) / pieces / 16 + 1)

        return min(range(1, min(split.parts, 4 * self.target.cores) + 1), key=time)

    def _end(self) -> Stmt | None:
        """Statements at the end of a task."""
        return None

    # One tile of query rows.

    def _copy_q(self, batch: Index, head: Index, query: Index, r: Index) -> Stmt | None:
        """q[r][d] = the query, scaled."""
        b, kernel = self.builder, self.kernel
        scale = tir.const(kernel.scale, self.dtype)

        def scaled(d: Index) -> Stmt:
            value = self.read(kernel.q, kernel.q_vars, batch, head, query, d) * scale
            return b.store(self.q, r * self.depth + d, value)

        return self.along(self.depth, scaled)

    def _row_tile(self, batch: Index, head: Index, first: Index, rows: int) -> Stmt:
        write = self.builder.loop(rows, lambda r: self._write_row(batch, head, first, rows, r), name="r")
        return self.builder.seq(self._sums_of_rows(batch, head, first, rows), write)

    def _sums_of_rows(self, batch: Index, head: Index, first: Index, rows: int) -> Stmt:
        """out[group][row], `sum` and `maximum` of a tile's rows."""
        b = self.builder

        def start(r: Index) -> Stmt:
            return b.seq(
                self._copy_q(batch, *self.place(head, first + r), r),
                b.store(self.maximum, r, tir.const(-math.inf, self.dtype)),
                b.store(self.sum, r, tir.const(0, self.dtype)),
            )

        def block(number: Index) -> Stmt:
            def each_panel(body: Callable[[Index, Index], Stmt | None]) -> Stmt:
                return self._each_panel(number, first, rows, body)

            scores = each_panel(lambda panel, column: self._scores(batch, head, first, rows, panel, column))
            softmax = b.loop(rows, lambda r: self._softmax_row(r, rows, each_panel), name="r")
            return b.seq(scores, softmax, self._times_v(batch, head, rows, each_panel))

        width = self.value_vectors * self.lanes
        held = self._held(rows) * width
        clear = self.fill(self.out, as_index(0), held, tir.const(0, self.dtype)) if self.is_online else None
        return b.seq(b.loop(rows, start, name="r"), clear, self._each_block(block))

    def _each_block(self, block: Callable[[Index], Stmt]) -> Stmt:
        """`block(number)` for the blocks of keys that some row of the tile sees."""
        return self.builder.loop(self.blocks, block, name="block")

    def _each_panel(self, block: Index, first: Index, rows: int, body: Callable[[Index, Index], Stmt | None]) -> Stmt:
        """`body(panel, its first column in the scores)` for the panels of a block that some row of the tile sees."""
        b = self.builder

        def at(i: Index) -> Stmt:
            panel = block * self.block_panels + i
            statement = body(panel, i * self.panel)
            if self.kernel.causal:
                statement = b.when(b.index(panel * self.panel) < b.index(first + rows), statement)
            if isinstance(self.panels, int) and not known_less(panel.high, self.panels):
                statement = b.when(b.index(panel) < self.panels, statement)
            return statement

        if isinstance(self.panels, int):
            return b.loop(self.block_panels, at, name="p")
        left = b.size(self.panels) - b.index(block * self.block_panels)
        return b.loop_until(tir.minimum(left, tir.const(self.block_panels, "int32")), self.block_panels, at, name="p")

    def _tile(self, rows: int, vectors: int, extent: Dim) -> RegisterTile:
        ways = RegisterTile.ways_for(rows * vectors, extent)
        return RegisterTile(self.builder, self.printer, rows, vectors, self.lanes, self.dtype, ways)

    def _scores(self, batch: Index, head: Index, first: Index, rows: int, panel: Index, column: Index) -> Stmt:
        """scores[row][column ...] = score(q k^T) for one panel."""
        score = partial(self._score, batch, head, first, rows, panel, column)
        products = self.by_length(panel, partial(self._products, rows, panel, column))
        return self.builder.seq(products, self.by_panel(panel, score))

    def _products(self, rows: int, panel: Index, column: Index, keys: Dim) -> Stmt:
        """scores[row][column ...] = q k^T for the first `keys` keys of a panel, in whole vectors."""
        b = self.builder
        tile = self._tile(rows, self.vectors_of(keys), self.depth)

        def step(d: Index, way: int) -> Stmt | None:
            start = panel * (self.depth * self.panel) + d * self.panel

            def q(row: int, _: Index) -> TirExpr:
                return b.load(self.q, d + row * self.depth)

            def k(vector: int, lane: Index) -> TirExpr:
                return b.load(self.packed_k, start + lane + vector * self.lanes)

            return tile.accumulate(partials(q, rows), partials(k, tile.vectors), way)

        compute = b.seq(tile.declare(), tile.clear(), tile.reduce(self.depth, step))
        return b.seq(compute, tile.spill(self.scores, column, self.stride))

    def _score(
        self, batch: Index, head: Index, first: Index, rows: int, panel: Index, column: Index, keys: Dim
    ) -> Stmt | None:
        """Puts a panel's scores where its products are; the first `keys` of its keys exist, the others get minus infinity."""
        b, kernel = self.builder, self.kernel
        is_changed = kernel.score is not None or kernel.causal
        if not is_changed and keys == self.vectors_of(keys) * self.lanes:
            return None
        never = tir.const(-math.inf, self.dtype)

        def row(r: Index) -> Stmt:
            start = r * self.stride + column

            def one(i: Index) -> Stmt:
                key = panel * self.panel + i
                product = b.load(self.scores, start + i)

                def stored(values: list[TirExpr]) -> Stmt:
                    (value,) = values
                    if kernel.causal:
                        value = tir.select(b.index(key) <= b.index(first + r), value, never)
                    return b.store(self.scores, start + i, value)

                if kernel.score is None:
                    return stored([product])
                scaled = self._scaled(product)
                self.printer.locals[kernel.product] = lambda _: scaled
                point = (batch, *self.place(head, first + r), key)
                if not any(isinstance(e, Call) and e.op == "round" for e in parts([kernel.score])):
                    return stored([self.read(kernel.score, kernel.score_vars, *point)])
                # Values that roundings use several times are bound by statements: TVM puts those of `Let`s into every place.
                return self.printer.evaluate([kernel.score], dict(zip(kernel.score_vars, point, strict=True)), stored)

            missing = self.vectors_of(keys) * self.lanes - keys
            beyond = self.fill(self.scores, start + keys, missing, never) if missing != 0 else None
            return b.seq(self.along(keys, one) if is_changed else None, beyond)

        statement = b.loop(rows, row, name="r")
        if kernel.causal and kernel.score is None and keys == self.panel:
            # Panels wholly in the past are seen by every row.
            return b.when(b.index(panel * self.panel + (self.panel - 1)) > b.index(first), statement)
        return statement

    def _scaled(self, product: TirExpr) -> TirExpr:
        """A scaled product, of one in `scores`: queries are scaled already."""
        return product

    def _operand_of_softmax(self, score: TirExpr) -> TirExpr:
        """The operand of the softmax, read from the `scores` that `_score` has written."""
        return score if self.kernel.score is not None else self._scaled(score)

    def _horizontal(self, vector: TirBuffer, combine: Callable[[TirExpr, TirExpr], TirExpr]) -> Stmt:
        """vector[0] = all of its lanes combined, by halves."""
        b = self.builder

        def halve(width: int) -> Stmt:
            return self.vector(
                width, lambda lane: b.store(vector, lane, combine(b.load(vector, lane), b.load(vector, lane + width)))
            )

        return b.seq(*[halve(self.panel >> step) for step in range(1, self.panel.bit_length())])

    def _exp(self, value: TirExpr, use: Callable[[TirExpr], Stmt]) -> Stmt:
        """A statement that uses e^value, of a value that is not positive."""
        self.printer.locals[self._operand] = lambda _: value
        return self.printer.evaluate(
            [ops.call("exp_nonpositive", self._operand.at(()))], {}, lambda values: use(values[0])
        )

    def _softmax_row(
        self, r: Index, rows: int, each_panel: Callable[[Callable[[Index, Index], Stmt | None]], Stmt]
    ) -> Stmt:
        """scores = e^(scores - maximum); the row's running maximum and sum, and what it has summed so far, follow."""
        b, dtype = self.builder, self.dtype
        top, total = b.local(self.panel, dtype, "top"), b.local(self.panel, dtype, "total")
        old, shift = b.variable("old", dtype), b.variable("shift", dtype)

        def each_vector(
            body: Callable[[Index, Index], Stmt | None], after: Callable[[Index, int], Stmt | None] | None = None
        ) -> Stmt:
            def at(panel: Index, column: Index) -> Stmt | None:
                start = r * self.stride + column

                def vector(first: int) -> Stmt:
                    return self.vector(self.lanes, lambda lane: body(lane + first, start + lane + first))

                def of(keys: Dim) -> Stmt:
                    count = self.vectors_of(keys)
                    behind = None if after is None else after(start, count)
                    return b.seq(*[vector(v * self.lanes) for v in range(count)], behind)

                return self.by_length(panel, of)

            return each_panel(at)

        def raise_top(lane: Index, at: Index) -> Stmt:
            return b.store(top, lane, tir.maximum(b.load(top, lane), self._operand_of_softmax(b.load(self.scores, at))))

        def exponential(lane: Index, at: Index) -> Stmt:
            return self._exp(
                self._operand_of_softmax(b.load(self.scores, at)) - shift,
                lambda e: b.seq(self._keep(lane, at, e), b.store(total, lane, b.load(total, lane) + e)),
            )

        lowest = tir.const(-math.inf, dtype)
        maximum = tir.maximum(old, b.load(top, 0))
        # Nothing but masked keys so far: subtract zero, so that their exponentials are zero and not NaN.
        finite = tir.select(b.load(self.maximum, r) == lowest, tir.const(0, dtype), b.load(self.maximum, r))
        return b.seq(
            b.alloc(top), b.alloc(total), *map(b.alloc, self._row_locals()),
            self.fill(top, as_index(0), self.panel, lowest),
            self.fill(total, as_index(0), self.panel, tir.const(0, dtype)),
            each_vector(raise_top),
            self._horizontal(top, tir.maximum),
            b.bind(old, b.load(self.maximum, r)),
            b.store(self.maximum, r, maximum),
            b.bind(shift, finite),
            each_vector(exponential, self._kept),
            self._horizontal(total, lambda x, y: x + y),
            self._exp(old - shift, lambda e: self._rescale(r, rows, e, b.load(total, 0)))
            if self.is_online
            else b.store(self.sum, r, b.load(total, 0)),
        )  # fmt: skip

    def _row_locals(self) -> tuple[TirBuffer, ...]:
        """Further registers of the softmax of one row."""
        return ()

    def _keep(self, lane: Index, at: Index, weight: TirExpr) -> Stmt:
        """Keeps a weight, of number `lane` in its panel, where the score at `at` was."""
        return self.builder.store(self.scores, at, weight)

    def _kept(self, start: Index, vectors: int) -> Stmt | None:
        """Statements after the weights of a row's panel of so many vectors, whose scores begin at `start`."""
        return None

    def _rescale(self, r: Index, rows: int, factor: TirExpr, added: TirExpr) -> Stmt:
        """The row's sum and output so far, brought to the new maximum."""
        b = self.builder

        def group(first: int, vectors: int) -> Stmt:
            def one(i: Index) -> Stmt:
                at = r * (vectors * self.lanes) + i + first * self._held(rows) * self.lanes
                return b.store(self.out, at, b.load(self.out, at) * factor)

            return self.along(vectors * self.lanes, one)

        return b.seq(
            b.store(self.sum, r, b.load(self.sum, r) * factor + added),
            *[group(first, vectors) for first, vectors in self._groups()],
        )

    def _held(self, rows: int) -> int:
        """Rows that `out` has for a tile of `rows` rows."""
        return rows

    def _groups(self) -> list[tuple[int, int]]:
        """(first, count) of the value vectors that are summed together: two at a time."""
        return [(v, min(2, self.value_vectors - v)) for v in range(0, self.value_vectors, 2)]

    def _times_v(
        self, batch: Index, head: Index, rows: int, each_panel: Callable[[Callable[[Index, Index], Stmt | None]], Stmt]
    ) -> Stmt:
        """out[group][row] += scores v."""
        b = self.builder

        def group(first: int, vectors: int) -> Stmt:
            tile = self._tile(rows, vectors, self.panel)
            start = first * rows * self.lanes
            begin = tile.restore(self.out, start) if self.is_online else None
            add = partial(self._add_values, tile, batch, head, first)
            return b.seq(
                tile.declare(), tile.clear(), begin, each_panel(add), tile.merge(), tile.spill(self.out, start)
            )

        return b.seq(*[group(first, vectors) for first, vectors in self._groups()])

    def _add_values(
        self, tile: RegisterTile, batch: Index, head: Index, first: int, panel: Index, column: Index
    ) -> Stmt | None:
        """tile += a panel's weights times the value vectors from `first` on."""

        def weight(t: Index, row: int, _: Index) -> TirExpr:
            return self.builder.load(self.scores, column + t + row * self.stride)

        def values(t: Index) -> list[LaneFn]:
            return [partial(self._value, batch, head, panel, t, first + vector) for vector in range(tile.vectors)]

        def step(t: Index, way: int) -> Stmt | None:
            return self._add_products(tile, partials(partial(weight, t), tile.rows), values(t), way)

        return self._over_keys(panel, lambda keys: tile.steps(keys, step))

    def _add_products(self, tile: RegisterTile, weights: list[LaneFn], values: list[LaneFn], way: int) -> Stmt | None:
        return tile.accumulate(weights, values, way)

    def _over_keys(self, panel: Index, body: Callable[[Dim], Stmt]) -> Stmt | None:
        """`body` with how many values of a panel there are to sum."""
        return self.by_length(panel, body)

    def _value(self, batch: Index, head: Index, panel: Index, t: Index, vector: int, lane: Index) -> TirExpr:
        """Read one element of the values of a panel's key `t`."""
        padded = self.value_vectors * self.lanes
        return self.builder.load(self.packed_v, panel * (self.panel * padded) + t * padded + vector * self.lanes + lane)

    def _write_row(self, batch: Index, head: Index, first: Index, rows: int, r: Index) -> Stmt:
        """The kernel's stores for one query row, normalised."""
        b, dtype = self.builder, self.dtype
        inverse = b.variable("inverse", dtype)
        total = b.load(self.sum, r)
        of_nothing = tir.const(math.nan if self.kernel.nan_rows else 0.0, dtype)
        factor = tir.select(total == tir.const(0, dtype), of_nothing, tir.const(1.0, dtype) / total)

        def group(first_vector: int, vectors: int) -> Stmt:
            def one(i: Index) -> Stmt:
                at = r * (vectors * self.lanes) + i + first_vector * self._held(rows) * self.lanes
                value = b.load(self.out, at) * inverse
                self.printer.locals[self.kernel.accumulator] = lambda _: value
                point = (batch, *self.place(head, first + r), i + first_vector * self.lanes)
                return self.printer.stores(self.kernel.stores, dict(zip(self.kernel.domain, point, strict=True)))

            return self.along(min(vectors * self.lanes, self.width - first_vector * self.lanes), one)

        return b.seq(b.bind(inverse, factor), *[group(v, n) for v, n in self._groups()])
