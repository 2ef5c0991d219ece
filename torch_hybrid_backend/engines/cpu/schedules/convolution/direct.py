"""Direct convolution in blocked channels, with any number of groups.

Pattern: `Panels` that are (groups, channel blocks, kh, input channels of the group, kw, block). Steps:
1. Vector lanes are the output channels of a block. A register tile is some output columns of one row times some channel blocks, chosen by
   counting multiply-adds, loads and tasks (`conv_tiling`): small images need several blocks to have enough accumulators.
2. A 1x1 kernel with stride 1 sees one long row: its tiles are cut from height x width.
   Where the processor multiplies by an element of a vector, pixels are loaded as vectors of channels, or of columns.
3. One parallel loop over (image, group, blocks, row), ordered so that the smaller of weight and input stays in the cache (`weight_stream`).
4. Around the registers: kernel rows, input channels, and, unrolled, kernel columns: the order in which the weight is packed, so it streams.
   The input is read as broadcast scalars, so its layout is free.
5. Padding: columns that read outside leave the step out (`conv_geometry`), rows outside skip a kernel row. Where around an image of integers
   lies another number than 0, columns multiply that, and a kernel row's products with it are summed once for all columns.
6. Where the weight of one tile's blocks exceeds the cache, input channels are cut into chunks, and the whole image goes through each chunk
   with its partial sums in a buffer. While rows go through a chunk, they ask for the next one, a share each.
Source: NeoCPU (Liu et al., USENIX ATC 2019); Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD
Architectures", SC 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import (
    Axis,
    ColumnTiles,
    column_tiles,
    is_wide,
    open_column_tiles,
)
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.convolution.tiling import (
    channel_block,
    choose_tiling,
    most_columns,
    reads_one_long_row,
    vectors_along,
)
from torch_hybrid_backend.engines.cpu.schedules.convolution.weight_stream import (
    Task,
    WeightChunks,
    WeightStream,
    streams,
)
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import (
    LaneFn,
    RegisterTile,
    by_height,
    by_part,
    by_tile,
    element,
    has_polynomial,
    lanes_of,
    partials,
    tile_start,
)
from torch_hybrid_backend.engines.cpu.tile_sizes import split_into
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.expressions import word_of
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, known_int, known_less, size_hint

# Multiply-adds in one body of the loop over input channels: enough to hide it.
_UNROLLED_MULTIPLY_ADDS = 56
# A sum of so few becomes one piece of code, of which LLVM does not know that it runs more often than what is around it: the constants of a
# polynomial in the epilogue keep their registers, and accumulators lose theirs (16 channels of 8 bits before SiLU: a store and a load for
# every dot product).
_SHORT_SUM = 256
# Tests of single columns in a kernel row of a tile; where there are more, tiles inside the image have code of their own (a 7x7 kernel with
# stride 2: 1.4 times as fast).
_MOST_TESTS = 4


def direct(parts: ConvParts) -> Stmt:
    """The kernel's body."""
    kernel = _Direct(parts)
    if not isinstance(kernel.columns.out, Size):
        return kernel.emit()
    vectors = kernel.tiling.blocks.size * max(1, parts.block // lanes_of(parts.target, parts.dtype))
    most = most_columns(parts, kernel.columns, vectors)
    return by_height(parts.builder, kernel.columns.out, most, vectors, kernel.with_columns)


def direct_row(parts: ConvParts) -> Callable[[Index, Index], Stmt]:
    """All channels of one output row of an image."""
    return _Direct(parts, is_flat=False).whole_row


def _even(most: int, step: int, count: int) -> int:
    """The largest multiple of `step`, at most `most`, of which `count` is one; `most` where there is none but small ones."""
    return next((size for size in range(most, most // 2, -step) if count % size == 0), most)


# [kernel column][column of a tile]: `ColumnTiles.inside`.
Inside = tuple[tuple[bool | None, ...], ...]


class _Direct:
    """The emission of one kernel."""

    def __init__(self, parts: ConvParts, is_flat: bool = True) -> None:
        self.parts, self.builder, self.target = parts, parts.builder, parts.target
        self.groups, self.blocks, _, self.channels, _, self.block = map(known_int, parts.packed.shape[:6])
        self.per_group = parts.out_channels // self.groups
        self.tail = self.per_group - (self.blocks - 1) * self.block
        self.is_flat = is_flat and reads_one_long_row(parts)
        self.rows, self.columns = parts.rows, parts.columns
        if self.is_flat:
            pixels = parts.rows.out * parts.columns.out
            one: Axis[Dim] = Axis(1, 1, 1, 1, 0, 1)
            self.rows, self.columns = one, Axis(pixels, pixels, 1, 1, 0, 1)
        self.tiling = choose_tiling(parts, self.rows, self.columns, self.is_flat)
        self.kinds: list[ColumnTiles] = []
        if not (self.columns.is_open or self.is_flat):
            self.kinds = column_tiles(self.columns.known(), self.tiling.column_tiles)
        self.channel_block = channel_block(parts)
        self.along = vectors_along(parts)

    # Emission.

    def with_columns(self, columns: int) -> Stmt:
        """The kernel in tiles of that many columns, of which there are as many or more."""
        self.kinds = open_column_tiles(self.columns, columns)
        return self.emit()

    def emit(self) -> Stmt:
        parts, tiling = self.parts, self.tiling
        if tiling.chunk_rows:
            pieces = ceil_div(self.rows.out, tiling.chunk_rows)
            return self.builder.fused(
                (parts.images, self.groups, tiling.blocks.parts, pieces),
                lambda at: self._by_blocks(at[0], at[1], at[2], partial(self._chunked, piece=at[3])),
            )
        inner = self.rows.out if not self.is_flat else self.kinds[0].count if self.kinds else tiling.column_tiles

        def task(image: Index, group: Index, part: Index, position: Index) -> Stmt:
            def at(where: Task) -> Stmt:
                return self._flat_tile(where, position) if self.is_flat else self._row(where, position)

            return self._by_blocks(image, group, part, at)

        if not streams(parts):
            order = (parts.images, inner, self.groups, tiling.blocks.parts)
            return self.builder.fused(order, lambda at: task(at[0], at[2], at[3], at[1]))
        by_weight = (parts.images, self.groups, tiling.blocks.parts, inner)
        return self.builder.fused(by_weight, lambda at: task(*at))

    def whole_row(self, image: Index, row: Index) -> Stmt:
        """Compute one output row, all groups and blocks of channels one after the other."""
        return self.builder.nest(
            (self.groups, self.tiling.blocks.parts),
            lambda at: self._by_blocks(image, at[0], at[1], lambda task: self._row(task, row)),
            name="o",
        )

    def _by_blocks(self, image: Index, group: Index, part: Index, body: Callable[[Task], Stmt]) -> Stmt:
        """`body` for a part of the channel blocks."""
        return by_part(
            self.builder,
            self.tiling.blocks,
            part,
            lambda first, blocks: body(Task(image, group, first, blocks, part)),
        )

    def _flat_tile(self, task: Task, part: Index) -> Stmt:
        """Compute one tile of the single long row of a 1x1 kernel."""
        if isinstance(self.columns.out, Size):
            (tiles,) = self.kinds
            first, begin = tile_start(self.builder, self.columns.out, tiles.columns, part)
            return self.builder.seq(begin, self._tile(task, as_index(0), first, tiles.columns, tiles.inside, part))
        columns = split_into(known_int(self.columns.out), self.tiling.column_tiles)
        return by_tile(
            self.builder,
            columns,
            part,
            lambda first, count: self._tile(task, as_index(0), first, count, ((True,) * count,), part),
        )

    def _row(self, task: Task, row: Index) -> Stmt:
        """Compute one output row: its column tiles, kind by kind."""
        b = self.builder

        def of(kind: ColumnTiles) -> Stmt:
            return self.parts.each_tile(
                kind, lambda first: self._tile(task, row, first, kind.columns, kind.inside, row)
            )

        return b.seq(*[of(kind) for kind in self.kinds])

    def _register_tile(self, task: Task, columns: int) -> RegisterTile:
        return RegisterTile(self.builder, self.parts.printer, columns, task.blocks, self.block, self.parts.dtype)

    def _tile(self, task: Task, row: Index, first: Index, columns: int, inside: Inside, turn: Index) -> Stmt:
        """Compute one register tile, from zero to its stores; `turn`: the inner loop's over the input."""
        b = self.builder
        tile = self._register_tile(task, columns)

        def ahead(kh: Index, channel: Index) -> Stmt | None:
            return self._fetch_weight(task, turn, kh, channel)

        reduce = self._reduce(tile, task, row, first, inside, as_index(0), self.channels, ahead)
        if sum(is_there is None for tap in inside for is_there in tap) > _MOST_TESTS:
            whole = ((True,) * columns,) * self.columns.kernel
            interior = self._reduce(tile, task, row, first, whole, as_index(0), self.channels, ahead)
            begin, end = (
                self.columns.source(first + c, kw) for c, kw in ((0, 0), (columns - 1, self.columns.kernel - 1))
            )
            reduce = self.parts.inside(self.columns, begin, self.builder.seq(interior), end, reduce)

        def place(vector: int, lane: Index, column: int | Index) -> tuple[Index, ...]:
            return task.image, self._channel(task, vector, lane), *self.pixel(row, first + column)

        write = self._with_tail(task, lambda channels: self.parts.write_tile(tile, channels, place))
        return b.seq(tile.declare(), self._begin(tile, task), reduce, write)

    def _begin(self, tile: RegisterTile, task: Task) -> Stmt:
        """Begin the sums of a tile."""
        if self.parts.starts is None:
            return tile.clear()
        block = task.group * self.blocks + task.first_block
        return tile.fill(lambda _, vector, lane: self.parts.start((block + vector) * self.block + lane))

    def _with_tail(self, task: Task, body: Callable[[int], Stmt]) -> Stmt:
        """`body(channels of the task's last block)`: the very last block may be padded."""
        parts = self.tiling.blocks.parts
        if self.tail == self.block or parts == 1:
            return body(self.tail)
        return self.builder.when(self.builder.index(task.part) < parts - 1, body(self.block), body(self.tail))

    def _channel(self, task: Task, vector: int, lane: Index) -> Index:
        return task.group * self.per_group + (task.first_block + vector) * self.block + lane

    def pixel(self, row: Index, column: Index) -> tuple[Index, Index]:
        """Row and column of the image."""
        if not self.is_flat:
            return row, column
        width = self.parts.columns.out
        return column // width, column % width

    def weight_words(
        self, task: Task, tile: RegisterTile, dot: DotProduct, kh: Index, channel: Index, kw: Index
    ) -> list[TirExpr]:
        """Weight of a tap and a channel in words, a vector for each block of a tile."""
        return [
            self.parts.weight_words(dot, task.group, task.first_block + v, kh, channel, kw, as_index(0))
            for v in range(tile.vectors)
        ]

    def weight_vectors(self, task: Task, tile: RegisterTile, kh: Index, channel: Index, kw: Index) -> list[LaneFn]:
        """Weight of a tap and a channel, a vector for each block of a tile."""

        def weight(vector: int, lane: Index) -> TirExpr:
            return self.parts.weight(task.group, task.first_block + vector, kh, channel, kw, lane)

        return partials(weight, tile.vectors)

    def _reduce(
        self,
        tile: RegisterTile,
        task: Task,
        row: Index,
        first: Index,
        inside: Inside,
        first_channel: Index,
        channels: int,
        ahead: Callable[[Index, Index], Stmt | None],
    ) -> Stmt | None:
        """Adds the sums over the window and `channels` input channels to a tile; `ahead(kernel row, channel)`: before a block of channels."""
        b, parts = self.builder, self.parts
        dot, border = parts.dot, parts.kernel.border
        around = None if dot is None or not border else word_of(border, dot.group, self.block)
        wide = is_wide(self.columns)
        columns_of = range(self.columns.kernel) if not wide else ()
        taps = [kw for kw in columns_of if border or any(is_there is not False for is_there in inside[kw])]
        if not wide and not taps:
            return None

        def step(
            kh: Index, source_row: Index, channel: Index, kw: Index, columns: Sequence[bool | None]
        ) -> Stmt | None:
            """Add one tap and channel. `columns`: True for each column that reads a pixel; None leaves the sum alone."""
            if dot is not None:

                def word(c: int) -> TirExpr | None:
                    if columns[c]:
                        pixel = self.pixel(source_row, self.columns.source(first + c, kw))
                        return parts.word(dot, task.image, task.group * self.channels + channel, *pixel)
                    return None if columns[c] is None else around

                words = [word(c) for c in range(tile.rows)]
                return tile.accumulate_words(words, self.weight_words(task, tile, dot, kh, channel, kw), dot)

            def x(column: int, _: Index) -> TirExpr:
                pixel = self.pixel(source_row, self.columns.source(first + column, kw))
                return parts.x(task.image, task.group * self.channels + channel, *pixel)

            scalars = [partial(x, c) if columns[c] else None for c in range(tile.rows)]
            return tile.accumulate(scalars, self.weight_vectors(task, tile, kh, channel, kw))

        def unrolled(kh: Index, source: Index) -> Stmt:
            multiply_adds = len(taps) * tile.rows * tile.vectors

            def of_tap(channel: Index, kw: int) -> list[Stmt | None]:
                add = partial(step, kh, source, channel, as_index(kw))
                unknown = [c for c, is_there in enumerate(inside[kw]) if is_there is None]
                return [add(inside[kw]), *[self._tested(tile.rows, c, as_index(kw), first, add) for c in unknown]]

            def single(channel: Index) -> Stmt:
                return b.seq(*[part for kw in taps for part in of_tap(channel, kw)])

            def fetches(channel: Index, is_last: TirExpr) -> list[Stmt | None]:
                return [
                    self._fetch_ahead(tile.rows, task, source, first, first_channel, channel, is_last),
                    ahead(kh, channel),
                ]

            vectors = _VectorSteps(self, tile, task, kh, source, first, inside, taps)
            if body := vectors.body(around):
                each = tile.lanes if self.along == "channels" else 1
                return self._each_vector(first_channel, channels, each, multiply_adds, body, single, fetches)
            unroll = max(1, _UNROLLED_MULTIPLY_ADDS // multiply_adds)
            return self._each_channel(
                first_channel,
                channels,
                unroll,
                multiply_adds,
                single,
                fetches,
            )

        def looped(kh: Index, source: Index) -> Stmt:
            def tap(kw: Index) -> Stmt:
                def add(columns: Sequence[bool | None]) -> Stmt:
                    multiply_adds = sum(column is not None for column in columns) * tile.vectors
                    unroll = max(1, _UNROLLED_MULTIPLY_ADDS // multiply_adds)
                    return self._each_channel(
                        first_channel,
                        channels,
                        unroll,
                        multiply_adds,
                        lambda channel: step(kh, source, channel, kw, columns),
                    )

                begin, end = self.columns.source(first, kw), self.columns.source(first + (tile.rows - 1), kw)

                singly = [self._tested(tile.rows, c, kw, first, add) for c in range(tile.rows)]
                return parts.inside(self.columns, begin, add([True] * tile.rows), end, b.seq(*singly))

            return b.loop(self.columns.kernel, tap, name="kw")

        def outside(kh: Index) -> Stmt | None:
            """A kernel row outside of the image: the same for all columns."""
            if dot is None or around is None:
                return None
            one = self._register_tile(task, 1)

            def add(position: tuple[Index, ...]) -> Stmt | None:
                kw, channel = position
                return one.accumulate_words(
                    [around], self.weight_words(task, one, dot, kh, first_channel + channel, kw), dot
                )

            def with_sum(column: int, vector: int) -> Stmt:
                total = b.load_vector(one.buffer, one.offset(0, vector), self.block)
                return tile.update(column, vector, lambda old: old + total)

            sums = b.nest((self.columns.kernel, channels), add, name="ic")
            added = [with_sum(c, v) for v in range(tile.vectors) for c in range(tile.rows)]
            return b.seq(one.declare(), one.clear(), sums, *added)

        def kernel_row(kh: Index) -> Stmt:
            source = self.rows.source(row, kh)
            there = (looped if wide else unrolled)(kh, source)
            return parts.inside(self.rows, source, there, other=outside(kh))

        return b.loop(self.rows.kernel, kernel_row, name="kh")

    def _tested(
        self, columns: int, c: int, kw: Index, first: Index, add: Callable[[Sequence[bool | None]], Stmt | None]
    ) -> Stmt:
        """`add` at a tap for column `c` alone of a tile from column `first` on: it reads a pixel, or what lies around the image."""
        there = add([True if c == i else None for i in range(columns)])
        other = add([False if c == i else None for i in range(columns)]) if self.parts.kernel.border else None
        return self.parts.inside(self.columns, self.columns.source(first + c, kw), there, other=other)

    def _each_vector(
        self,
        first: Index,
        count: int,
        each: int,
        multiply_adds: int,
        body: Callable[[Index], Stmt],
        single: Callable[[Index], Stmt | None],
        ahead: Callable[[Index, TirExpr], Sequence[Stmt | None]],
    ) -> Stmt:
        """`body`, of `each` channels, or `single`, of one, for `count` channels from `first`, each of `multiply_adds`; `ahead` as for
        `_each_channel`."""
        b, block = self.builder, self.channel_block
        length = _even(max(each, 4 * _UNROLLED_MULTIPLY_ADDS // multiply_adds // each * each), each, count)
        unit = max(block, _even(length // block * block, block, count))
        last = count // block * block - block

        def run(start: Index, size: int) -> Stmt | None:
            def vectors(start: Index, size: int) -> list[Stmt | None]:
                whole = size // each * each
                single_ones = [single(start + at) for at in range(whole, size)]
                return [*[body(start + at) for at in range(0, whole, each)], *single_ones]

            step = min(length, size)
            loop = b.loop(size // step, lambda i: b.seq(*vectors(start + i * step, step)), name="ic")
            return b.seq(loop, *vectors(start + (size - size % step), size % step))

        def blocks(done: Index, size: int) -> Stmt:
            starts = [done + at for at in range(0, size, block)]
            begin = [s for at in starts for s in ahead(first + at, b.index(at) == last)]
            return b.seq(*begin, run(first + done, size))

        loop = b.loop(count // unit, lambda i: blocks(i * unit, unit), name="cb") if count >= unit else None
        left = count % unit
        return b.seq(loop, blocks(as_index(count - left), left) if left else None)

    def _each_channel(
        self,
        first: Index,
        count: int,
        unroll: int,
        multiply_adds: int,
        body: Callable[[Index], Stmt | None],
        ahead: Callable[[Index, TirExpr], Sequence[Stmt | None]] = lambda channel, is_last: (),
    ) -> Stmt:
        """`body`, of `multiply_adds`, for `count` channels from `first`, block by block. `ahead(channel, is_last)`: prefetches, before the
        block of `channel`."""
        b, block = self.builder, self.channel_block

        def run(start: Index, length: int) -> Stmt:
            step = min(unroll, length)
            is_short = count * multiply_adds <= _SHORT_SUM
            loop = b.rolled if is_short and has_polynomial(self.parts.kernel.stores) else b.loop
            whole = loop(length // step, lambda i: b.seq(*[body(start + i * step + u) for u in range(step)]), name="ic")
            return b.seq(whole, *[body(start + (length - length % step + u)) for u in range(length % step)])

        def whole_block(i: Index) -> Stmt:
            channel = first + i * block
            return b.seq(*ahead(channel, b.index(i) == blocks - 1), run(channel, block))

        loop = b.loop(blocks, whole_block, name="cb") if (blocks := count // block) else None
        return b.seq(loop, run(first + blocks * block, count % block) if count % block else None)

    def _fetch_ahead(
        self, columns: int, task: Task, row: Index, first: Index, channels: Index, channel: Index, is_last: TirExpr
    ) -> Stmt | None:
        """Asks for what a tile of `columns` reads after the block of `channel`: the next block, or the first of the next kernel row."""
        axis, group = self.columns, task.group * self.channels
        width = axis.width(columns)

        def at(row: Index, channel: Index) -> Callable[[int], tuple[Index, ...]]:
            return lambda i: (task.image, group + channel, *self.pixel(row, axis.source(first, 0) + i))

        behind = at(row, channel + self.channel_block)
        if self.along:  # a choice of address takes as long as four products of a short block
            return self.parts.fetch(width, None, behind, behind)
        return self.parts.fetch(width, is_last, at(row + self.rows.dilation, channels), behind)

    def _fetch_weight(self, task: Task, turn: Index, kh: Index, channel: Index) -> Stmt | None:
        """A share of the weight that this core reads next, unless it stays in the cache. All tiles of a row ask for the same."""
        if not streams(self.parts):
            return None
        turns = self.tiling.column_tiles if self.is_flat else size_hint(self.rows.out)
        channel_steps = max(1, self.channels // self.channel_block)
        stream = WeightStream(self.parts, self.tiling.blocks.parts, turns, self.rows.kernel * channel_steps)
        step = (turn * self.rows.kernel + kh) * channel_steps + channel // self.channel_block
        return stream.prefetch(task, step)

    # Weights larger than the cache.

    def _chunked(self, task: Task, piece: Index) -> Stmt:
        """Some output rows of a task, input channels chunk by chunk, partial sums in a buffer."""
        b, tiling, columns = self.builder, self.tiling, self.columns.out
        width = task.blocks * self.block
        sums = b.local(tiling.chunk_rows * columns * width, self.parts.dtype, "sums")

        def each_row(body: Callable[[Index, Index], Stmt]) -> Stmt:
            def at(r: Index) -> Stmt:
                row = piece * tiling.chunk_rows + r
                statement = body(row, r)
                if known_less(row.high, self.rows.out):
                    return statement
                return b.when(b.index(row) < b.size(self.rows.out), statement)

            return b.loop(tiling.chunk_rows, at, name="r")

        def add(chunk: Index, row: Index, r: Index, kind: ColumnTiles) -> Stmt:
            def at(first: Index) -> Stmt:
                tile = self._register_tile(task, kind.columns)
                start = (r * columns + first) * width
                ahead = partial(chunks.prefetch, task, chunk, r)
                reduce = self._reduce(tile, task, row, first, kind.inside, chunk * tiling.chunk, tiling.chunk, ahead)
                return b.seq(tile.declare(), tile.restore(sums, start), reduce, tile.spill(sums, start))

            return self.parts.each_tile(kind, at)

        def write(row: Index, r: Index) -> Stmt:
            return self._with_tail(
                task,
                lambda channels: b.loop(
                    columns,
                    lambda column: self.parts.write_vectors(
                        sums,
                        (r * columns + column) * width,
                        self.block,
                        [self.block] * (task.blocks - 1) + [channels],
                        lambda vector, lane: (task.image, self._channel(task, vector, lane), row, column),
                    ),
                    name="c",
                ),
            )

        pieces = -(-size_hint(self.rows.out) // tiling.chunk_rows)
        chunks = WeightChunks(self.parts, self.channels // tiling.chunk, tiling.chunk_rows, pieces, self.channel_block)
        first = task.group * self.blocks + task.first_block
        begin = b.loop(
            tiling.chunk_rows * columns * task.blocks,
            lambda i: self.parts.begin(sums, i * self.block, first + i % task.blocks),
            name="z",
        )
        each_chunk = b.loop(
            self.channels // tiling.chunk,
            lambda chunk: each_row(lambda row, r: b.seq(*[add(chunk, row, r, kind) for kind in self.kinds])),
            name="chunk",
        )
        return b.seq(b.alloc(sums), begin, each_chunk, each_row(write))


@dataclass(frozen=True, slots=True)
class _VectorSteps:
    """Steps of a tile in one row of the kernel and the input, whose pixels are loaded in vectors and multiplied element by element."""

    direct: _Direct
    tile: RegisterTile
    task: Task
    kh: Index
    source: Index
    first: Index
    inside: Inside
    taps: Sequence[int]

    def body(self, around: TirExpr | None) -> Callable[[Index], Stmt] | None:
        """A function of the channel for the steps of a vector of channels, or of one channel; None where scalars are loaded one by one.
        `around`: the word of what lies around the image."""
        if self.direct.along == "channels":
            return (
                self._scalars_of_channels if self.direct.parts.dot is None else partial(self._words_of_channels, around)
            )
        if self.direct.along == "columns" and len(self._columns()) >= self.tile.lanes:
            return partial(self._words_of_columns, around)
        return None

    def _columns(self) -> range:
        """The columns from the first to the last that the tile reads, counted as `Axis.place` does."""
        read = [place for kw in self.taps for place in self._places(kw) if place is not None]
        return range(min(read), max(read) + 1) if read else range(0)

    def _places(self, kw: int) -> list[int | None]:
        """The column that each of the tile's outputs reads at a tap; None of one outside."""
        inside = self.inside[kw]
        return [self.direct.columns.place(c, kw) if inside[c] else None for c in range(self.tile.rows)]

    def _pixel(self, place: int) -> tuple[Index, Index]:
        return self.direct.pixel(self.source, self.direct.columns.source(self.first, 0) + place)

    def _words(self, channel: Index, place: int) -> tuple[TirExpr, Stmt]:
        """A variable with the words from one of a column on, and the statement that loads them."""
        direct, dot = self.direct, self.direct.parts.dot
        assert dot is not None
        image, group = self.task.image, self.task.group * direct.channels
        name = direct.builder.variable("words", f"int32x{self.tile.lanes}")
        return name, direct.builder.bind(name, direct.parts.words(dot, image, group + channel, *self._pixel(place)))

    def _multiplied(self, words: Sequence[TirExpr | None], channel: Index, kw: int) -> Stmt | None:
        dot = self.direct.parts.dot
        assert dot is not None
        weights = self.direct.weight_words(self.task, self.tile, dot, self.kh, channel, as_index(kw))
        return self.tile.accumulate_words(words, weights, dot)

    def _scalars_of_channels(self, channel: Index) -> Stmt:
        """Multiply `lanes` channels from one on: a pixel is a vector of them."""
        direct, tile, pixels = self.direct, self.tile, dict[int, LaneFn]()
        image, group = self.task.image, self.task.group * direct.channels

        def x(place: int, lane: Index) -> TirExpr:
            return direct.parts.x(image, group + channel + lane, *self._pixel(place))

        def tap(kw: int) -> Iterator[Stmt | None]:
            places = self._places(kw)
            missing = [place for place in places if place is not None and place not in pixels]
            if missing:
                begin, loads = tile.held([partial(x, place) for place in missing])
                pixels.update(zip(missing, loads, strict=True))
                yield begin
            for s in range(tile.lanes):
                weights = direct.weight_vectors(self.task, tile, self.kh, channel + s, as_index(kw))
                yield tile.accumulate([None if at is None else element(pixels[at], s) for at in places], weights)

        return direct.builder.seq(*[step for kw in direct.columns.in_order(self.taps) for step in tap(kw)])

    def _words_of_channels(self, around: TirExpr | None, channel: Index) -> Stmt:
        """Multiply `lanes` words of channels likewise."""
        tile, pixels = self.tile, dict[int, TirExpr]()

        def tap(kw: int) -> Iterator[Stmt | None]:
            places = self._places(kw)
            for place in places:
                if place is not None and place not in pixels:
                    pixels[place], begin = self._words(channel, place)
                    yield begin
            for s in range(tile.lanes):
                words = [around if place is None else tir.splat(pixels[place], s, tile.lanes) for place in places]
                yield self._multiplied(words, channel + s, kw)

        return self.direct.builder.seq(*[step for kw in self.direct.columns.in_order(self.taps) for step in tap(kw)])

    def _words_of_columns(self, around: TirExpr | None, channel: Index) -> Stmt:
        """Multiply one word of channels, whose neighbouring columns are a vector."""
        columns, lanes = self._columns(), self.tile.lanes
        starts = [min(place, columns.stop - lanes) for place in columns[::lanes]]
        names, begin = zip(*[self._words(channel, start) for start in starts], strict=True)

        def word(place: int) -> TirExpr:
            number = max(n for n, start in enumerate(starts) if start <= place)
            return tir.splat(names[number], place - starts[number], lanes)

        steps = [
            self._multiplied([around if place is None else word(place) for place in self._places(kw)], channel, kw)
            for kw in self.direct.columns.in_order(self.taps)
        ]
        return self.direct.builder.seq(*begin, *steps)
