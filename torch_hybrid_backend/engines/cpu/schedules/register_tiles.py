"""Register tiles: the accumulators of an outer-product microkernel, and how they are written out.

A tile has `rows` x `vectors` vector accumulators of `lanes` elements, all in registers: every access is at a constant position, so that
LLVM turns the local array into registers. `accumulate` adds `scalar[row] * vector[v]` to each; matmul, convolution and attention differ only
in what rows and vectors mean.

    tile = RegisterTile(builder, printer, rows=14, vectors=2, lanes=16, dtype="float32")
    b.seq(tile.declare(), tile.clear(), b.loop(K, lambda k: tile.accumulate(a_of(k), b_of(k))), tile.write(...))

Source: Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import Split
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.dot import dot_product
from torch_hybrid_backend.engines.cpu.tir.math import UNARY
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.storage import storage_dtype
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Call, count_calls, parts
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, size_hint

# Multiply-adds in flight that keep both units of a core busy: latency 4, two units (Zen 3-5, Skylake and later).
IN_FLIGHT = 8
# Steps emitted one after the other, unless that is more multiply-adds than the second number: they hide the loop by themselves.
_UNROLL, _UNROLLED_MULTIPLY_ADDS = 4, 64

# An epilogue of more scalar operations than this is emitted once as a loop over a spilled tile, not once per register.
_LONG_EPILOGUE = 4

# lane index -> the scalar of that lane
LaneFn = Callable[[Index], TirExpr]


def lanes_of(target: Target, dtype: str) -> int:
    """Elements of a compute dtype in one vector register."""
    width = max(4, tir.itemsize(dtype))
    return max(1, target.lanes * 4 // width)


def count_operations(stores: Sequence[Store]) -> int:
    """The number of scalar operations in what follows a tile."""
    return sum(count_calls(store.value) for store in stores)


def has_long_epilogue(stores: Sequence[Store]) -> bool:
    """True if what follows the tile of a product is spilled first: too long to be repeated for each register."""
    return count_operations(stores) > _LONG_EPILOGUE


def has_polynomial(stores: Sequence[Store]) -> bool:
    """True if what follows a tile approximates a function: a dozen constants in registers."""
    return any(isinstance(e, Call) and e.op in UNARY for e in parts(store.value for store in stores))


def by_part(builder: Builder, split: Split, part: Index, body: Callable[[Index, int], Stmt]) -> Stmt:
    """`body(start, size)` of a part known when the kernel runs: two variants where parts differ in size."""
    large = body(part * split.size, split.size)
    if split.large == split.parts:
        return large
    small = body(part * (split.size - 1) + split.large, split.size - 1)
    return builder.when(builder.index(part) < split.large, large, small)


def by_tile(builder: Builder, split: Split, part: Index, body: Callable[[Index, int], Stmt]) -> Stmt:
    """Like `by_part`, with one variant alone where the last part can have the size of the others and overlap the part before: what both compute
    is equal. That costs up to 1/64 of the work, and saves half of the code."""
    total = split.start(split.parts)
    if split.parts == 1 or (split.parts - split.large) * 64 > total:
        return by_part(builder, split, part, body)
    start, begin = tile_start(builder, total, split.size, part)
    return builder.seq(begin, body(start, split.size))


def by_height(builder: Builder, total: Dim, tall: int, vectors: int, body: Callable[[int], Stmt]) -> Stmt:
    """`body(height)` of row tiles for a count of rows that only the running kernel knows: one variant per height, one of which runs.

    Tile i of `ceil(total / height)` begins at `tile_start`: the last may overlap the one before (what both compute is equal), so none
    is ragged. Of the three tallest heights the one that computes the fewest rows; below `tall` rows what a core does fastest.
    """
    heights = sorted({max(1, round(tall * share)) for share in (4 / 7, 11 / 14, 1)})
    small = [height for height in (1, 2, 4) if height < heights[0]]
    rows, count = builder.size(total), builder.size
    chosen = builder.variable("height", "int32")
    best = _least_rows(builder, total, heights)

    def time(few: int, height: int) -> float:
        # A step of k in a short tile takes the latency of a multiply-add, however few rows it has.
        return -(-few // height) * max(height * vectors, height + vectors, IN_FLIGHT)

    for few in range(1, tall):
        fastest = min((h for h in (*small, *heights) if h <= few), key=lambda h: time(few, h))
        best = tir.select(tir.equal(rows, count(few)), tir.const(fastest, "int32"), best)
    variants = [builder.when(tir.equal(chosen, tir.const(h, "int32")), body(h)) for h in (*small, *heights)]
    return builder.seq(builder.bind(chosen, best), *variants)


def by_tall_height(builder: Builder, total: Dim, tall: int, body: Callable[[int], Stmt]) -> Stmt:
    """`by_height` where tiles may have rows behind the last: of the four tallest heights the one that computes the fewest rows."""
    heights = sorted({max(1, round(tall * share / 7)) for share in (4, 5, 6, 7)})
    chosen = builder.variable("height", "int32")
    variants = [builder.when(tir.equal(chosen, tir.const(height, "int32")), body(height)) for height in heights]
    return builder.seq(builder.bind(chosen, _least_rows(builder, total, heights)), *variants)


def _least_rows(builder: Builder, total: Dim, heights: Sequence[int]) -> TirExpr:
    """The height, an int32, whose tiles compute the fewest rows; of equal ones the tallest."""
    count = builder.size
    best, least = tir.const(heights[-1], "int32"), count(ceil_div(total, heights[-1]) * heights[-1])
    for height in reversed(heights[:-1]):
        computed = count(ceil_div(total, height) * height)
        best = tir.select(computed < least, tir.const(height, "int32"), best)
        least = tir.minimum(computed, least)
    return best


def tile_start(builder: Builder, total: Dim, height: int, part: Index) -> tuple[Index, Stmt]:
    """The first row of row tile `part`, and the statement that computes it."""
    last = total - height
    start = tir.minimum(builder.index(part * height), builder.size(last))
    return builder.bound(start, last + 1, "row")


def partials(of: Callable[[int, Index], TirExpr], count: int) -> list[LaneFn]:
    """Functions of the lane: `of(0, lane)`, `of(1, lane)`, ..."""
    return [partial(of, number) for number in range(count)]


def element(vector: LaneFn, lane: int) -> LaneFn:
    """Lane `lane` of a vector as a scalar."""
    return lambda _: vector(as_index(lane))


class RegisterTile:
    """`rows` x `vectors` accumulators of `lanes` elements of `dtype`; `ways` independent copies hide the latency of short tiles.

    With fewer accumulators than latency x width of the multiply-add units (8 on current x86 cores) one addition waits for the last:
    `accumulate(..., way=w)` adds to copy w, and `merge` sums the copies.
    """

    def __init__(
        self,
        builder: Builder,
        printer: Printer,
        rows: int,
        vectors: int,
        lanes: int,
        dtype: str,
        ways: int = 1,
        *,
        by_element: bool = False,
    ) -> None:
        self.builder, self.printer = builder, printer
        self.rows, self.vectors, self.lanes, self.dtype, self.ways = rows, vectors, lanes, dtype, ways
        self.by_element = by_element
        self.size = rows * vectors * lanes
        self.buffer = builder.local(self.size * ways, dtype, "acc")

    def declare(self) -> Stmt:
        return self.builder.alloc(self.buffer)

    def offset(self, row: int, vector: int, way: int = 0) -> int:
        """The offset of an accumulator in `buffer`."""
        return way * self.size + (row * self.vectors + vector) * self.lanes

    def _lanes(self, body: Callable[[Index], Stmt]) -> Stmt:
        return self.printer.vector_loop(self.lanes, body)

    def at(self, row: int, vector: int, lane: Index | int) -> TirExpr:
        return self.builder.load(self.buffer, lane + self.offset(row, vector))

    def set(self, row: int, vector: int, lane: Index, value: TirExpr) -> Stmt:
        return self.builder.store(self.buffer, lane + self.offset(row, vector), value)

    def _each(self, body: Callable[[int, int, Index], Stmt], ways: int = 1) -> Stmt:
        return self._lanes(
            lambda lane: self.builder.seq(
                *[
                    body(row, vector, lane + way * self.size)
                    for way in range(ways)
                    for row in range(self.rows)
                    for vector in range(self.vectors)
                ]
            )
        )

    def clear(self) -> Stmt:
        return self._each(lambda row, vector, lane: self.set(row, vector, lane, tir.const(0, self.dtype)), self.ways)

    def fill(self, value: Callable[[int, int, Index], TirExpr]) -> Stmt:
        """acc[row, vector, lane] = value(row, vector, lane)."""
        return self._each(lambda row, vector, lane: self.set(row, vector, lane, value(row, vector, lane)))

    def accumulate(
        self,
        scalars: Sequence[LaneFn | None],
        vectors: Sequence[LaneFn],
        way: int = 0,
        begun: Sequence[bool] | None = None,
    ) -> Stmt | None:
        """acc[row, v] += scalars[row] * vectors[v], lane by lane; a row whose scalar is None is left alone. `begun`: whether a row has a sum
        yet; the first product of one that has not is stored."""
        if all(scalar is None for scalar in scalars):
            return None

        def body(lane: Index) -> Stmt:
            steps = []
            values = [vector(lane) for vector in vectors]
            for row, scalar in enumerate(scalars):
                if scalar is None:
                    continue
                left = scalar(lane)
                for v, value in enumerate(values):
                    position = lane + self.offset(row, v, way)
                    total = left * value
                    if begun is None or begun[row]:
                        total = self.builder.load(self.buffer, position) + total
                    steps.append(self.builder.store(self.buffer, position, total))
            return self.builder.seq(*steps)

        return self._lanes(body)

    def held(self, values: Sequence[LaneFn]) -> tuple[Stmt, list[LaneFn]]:
        """Statements that compute `values` into registers, and the values as registers hold them.

        TVM's vectoriser takes an expression that binds variables only once; operands of `accumulate` are there for every row or vector.
        """
        array = self.builder.local(len(values) * self.lanes, self.dtype, "held")

        def hold(lane: Index) -> Stmt:
            return self.builder.seq(
                *[self.builder.store(array, lane + n * self.lanes, value(lane)) for n, value in enumerate(values)]
            )

        loads = partials(lambda n, lane: self.builder.load(array, lane + n * self.lanes), len(values))
        return self.builder.seq(self.builder.alloc(array), self._lanes(hold)), loads

    def in_vectors(self, values: Sequence[LaneFn], step: Callable[[int, list[LaneFn]], Stmt | None]) -> Stmt:
        """`step(s, scalars)` for each of `lanes` steps, whose scalars are element s of `values`: vectors that are loaded once for all."""
        begin, loads = self.held(values)

        steps = [step(s, [element(load, s) for load in loads]) for s in range(self.lanes)]
        return self.builder.seq(begin, *steps)

    def words_in_vectors(self, vectors: Sequence[TirExpr], step: Callable[[int, list[TirExpr]], Stmt | None]) -> Stmt:
        """`step(s, words)` for each of `lanes` steps, whose words are element s of `vectors`, int32, in every lane."""
        b, names = self.builder, [self.builder.variable("words", f"int32x{self.lanes}") for _ in vectors]
        begin = [b.bind(name, vector) for name, vector in zip(names, vectors, strict=True)]
        lanes = range(self.lanes)
        return b.seq(*begin, *[step(s, [tir.splat(name, s, self.lanes) for name in names]) for s in lanes])

    def accumulate_words(
        self,
        words: Sequence[TirExpr | None],
        vectors: Sequence[TirExpr],
        dot: DotProduct,
        way: int = 0,
        one_by_one: bool = False,
    ) -> Stmt | None:
        """acc[row, v] += the dot products of words[row] and vectors[v]; a row whose word is None is left alone.

        one_by_one: each of `vectors` is loaded where it is multiplied with all words, for they are too many to be in registers together.
        """
        if all(word is None for word in words):
            return None
        b, steps = self.builder, []

        def bound(value: TirExpr, dtype: str) -> TirExpr:
            name = b.variable("word", dtype)
            steps.append(b.bind(name, value))
            return name

        kind = f"{storage_dtype(dot.right)}x{self.lanes // dot.rows * dot.group}"
        if one_by_one:
            left = [bound(word, f"int32x{self.lanes}") for word in words if word is not None]
            for v, vector in enumerate(vectors):
                name = bound(vector, kind)
                for row, word in enumerate(left):
                    place = self.offset(row, v, way)
                    total = dot_product(b, dot, self.lanes, b.load_vector(self.buffer, place, self.lanes), word, name)
                    steps.append(b.store_vector(self.buffer, place, total, self.lanes))
            return b.seq(*steps)
        right = [bound(vector, kind) for vector in vectors]
        for row, word in enumerate(words):
            if word is None:
                continue
            left = bound(word, f"int32x{self.lanes}")
            for v, vector in enumerate(right):
                place = self.offset(row, v, way)
                total = dot_product(b, dot, self.lanes, b.load_vector(self.buffer, place, self.lanes), left, vector)
                steps.append(b.store_vector(self.buffer, place, total, self.lanes))
        return b.seq(*steps)

    def update(self, row: int, vector: int, value: Callable[[TirExpr], TirExpr]) -> Stmt:
        """acc[row, vector] = value(acc[row, vector]), as a whole vector."""
        b, place = self.builder, self.offset(row, vector)
        return b.store_vector(self.buffer, place, value(b.load_vector(self.buffer, place, self.lanes)), self.lanes)

    def merge(self) -> Stmt | None:
        """Sums the copies into the first."""
        if self.ways == 1:
            return None

        def value(row: int, vector: int, lane: Index) -> TirExpr:
            parts = [self.builder.load(self.buffer, lane + self.offset(row, vector, way)) for way in range(self.ways)]
            while len(parts) > 1:  # pairwise: half the latency, and half the rounding error
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            return parts[0]

        return self.fill(value)

    def sum_lanes(self) -> Stmt | None:
        """Every accumulator's first lane = all of its lanes, summed by halves; the others are lost."""
        b = self.builder

        def halve(row: int, vector: int, width: int) -> Stmt:
            def add(lane: Index) -> Stmt:
                return self.set(row, vector, lane, self.at(row, vector, lane) + self.at(row, vector, lane + width))

            return self.printer.vector_loop(width, add)

        widths = [self.lanes >> step for step in range(1, self.lanes.bit_length())]
        tiles = [(row, vector) for row in range(self.rows) for vector in range(self.vectors)]
        return b.seq(*[halve(*at, width) for width in widths for at in tiles]) if widths else None

    @staticmethod
    def ways_for(accumulators: int, steps: Dim) -> int:
        """Copies that hide the latency of multiply-adds, where there are steps enough to share among them."""
        ways = 1
        while ways * accumulators < IN_FLIGHT and ways < 4 and size_hint(steps) >= 16 * ways:
            ways *= 2
        return ways

    def reduce(
        self,
        extent: Dim,
        step: Callable[[Index, int], Stmt | None],
        ahead: Callable[[Index], Stmt | None] | None = None,
        several: Callable[[Index], Stmt] | None = None,
    ) -> Stmt:
        """`step(k, way)` for k in 0 .. extent-1, and the copies summed; `ahead` and `several` as for `steps`."""
        return self.builder.seq(self.steps(extent, step, ahead, several), self.merge())

    def unrolled(self, extent: Dim) -> int:
        """Steps emitted one after the other: enough to hide the loop and to use every copy; or a vector of them, whose elements are scalars."""
        if self._has_vectors(extent):
            vectors = max(1, min(_UNROLL, 2 * _UNROLLED_MULTIPLY_ADDS // (self.rows * self.vectors * self.lanes)))
            return self.lanes * (min(vectors, extent // self.lanes) if isinstance(extent, int) else vectors)
        most = min(_UNROLL, _UNROLLED_MULTIPLY_ADDS // (self.rows * self.vectors))
        return max(self.ways, min(most, extent) if isinstance(extent, int) else max(most, 1))

    def _has_vectors(self, extent: Dim) -> bool:
        return self.by_element and (isinstance(extent, Size) or extent >= self.lanes)

    def steps(
        self,
        extent: Dim,
        step: Callable[[Index, int], Stmt | None],
        ahead: Callable[[Index], Stmt | None] | None = None,
        several: Callable[[Index], Stmt] | None = None,
    ) -> Stmt:
        """`step(k, way)` for k in 0 .. extent-1; `ahead(i)`, prefetches say, before the i-th `unrolled` of them. `several(k)`: `lanes` steps
        from k on, of a tile `by_element`."""
        b, unroll = self.builder, self.unrolled(extent)
        whole = extent // unroll

        def steps_at(k: Index) -> Stmt:
            before = None if ahead is None else ahead(k)
            if several is not None and self._has_vectors(extent):
                return b.seq(before, *[several(k * unroll + u) for u in range(0, unroll, self.lanes)])
            return b.seq(before, *[step(k * unroll + u, u % self.ways) for u in range(unroll)])

        main = b.loop(whole, steps_at, name="k")
        left = extent - whole * unroll
        if isinstance(left, Size):
            return b.seq(main, b.loop(left, lambda k: step(k + whole * unroll, 0), name="k"))
        vectors = left // self.lanes if several is not None and self.by_element else 0
        rest = [several(as_index(whole * unroll + v * self.lanes)) for v in range(vectors)] if several else []
        rest += [step(as_index(whole * unroll + u), 0) for u in range(vectors * self.lanes, left)]
        return b.seq(main if whole != 0 else None, *rest)

    def spill(self, buffer: TirBuffer, offset: Index | int = 0, row_stride: int = 0) -> Stmt:
        """buffer[offset + row * row_stride + vector * lanes + lane] = the tile, in the buffer's dtype; `row_stride` 0 is a dense tile."""
        start, dense, dtype = as_index(offset), self.vectors * self.lanes, str(buffer.dtype)
        return self._each(
            lambda row, vector, lane: self.builder.store(
                buffer,
                start + lane + (row * (row_stride or dense) + vector * self.lanes),
                self.at(row, vector, lane) if dtype == self.dtype else tir.cast(self.at(row, vector, lane), dtype),
            )
        )

    def restore(self, buffer: TirBuffer, offset: Index | int) -> Stmt:
        """The tile = buffer[offset ...], dense: the inverse of `spill`."""
        start = as_index(offset)
        return self.fill(lambda row, vector, lane: self.builder.load(buffer, start + lane + self.offset(row, vector)))


def unzipped(tile: RegisterTile, start: Callable[[int, Index], TirExpr] | None) -> tuple[RegisterTile, Stmt]:
    """A tile of rows for one of blocks of 2 x 2 (`dot_products`), and the statement that declares and fills it: vector v of rows 2 r and
    2 r + 1 is made of blocks 2 v and 2 v + 1 of row r. `start(vector, lane)`: what is added to a column's sums."""
    b, lanes = tile.builder, tile.lanes
    rows = RegisterTile(b, tile.printer, 2 * tile.rows, tile.vectors // 2, lanes, tile.dtype)
    steps = [rows.declare()]
    for row in range(tile.rows):
        for vector in range(rows.vectors):
            blocks = [b.load_vector(tile.buffer, tile.offset(row, 2 * vector + second), lanes) for second in range(2)]
            for side in range(2):
                both = tir.shuffle(blocks, [4 * block + 2 * side + column for block in range(2) for column in range(2)])
                steps.append(b.store_vector(rows.buffer, rows.offset(2 * row + side, vector), both, lanes))
    if start is not None:
        steps.append(rows.fill(lambda row, vector, lane: rows.at(row, vector, lane) + start(vector, lane)))
    return rows, b.seq(*steps)
