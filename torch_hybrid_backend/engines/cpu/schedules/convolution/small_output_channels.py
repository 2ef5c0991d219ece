"""Convolution to few output channels: the last layer of denoisers, of super-resolution, of segmentation, flow or depth networks.

Pattern: `Panels` of one group whose output channels fill half a vector or less, and whose input channels fill whole ones, blocked.
With output channels as lanes most of a vector would be empty: 3 of 16. Steps:
1. Vector lanes are the input channels of a block, of input and weight alike; each accumulator is one output channel at one pixel.
2. A task is a strip of rows of an image. It copies the weight first, input channels innermost: small, for the outputs are few.
3. A vector's worth of neighbouring columns is computed in register tiles of some columns by all outputs, over the whole window; columns
   that read padding at a kernel column leave that step out (`conv_geometry`), rows that read padding skip a kernel row.
4. The accumulators of an output, one for each column, are transposed and added: a vector along the row for the epilogue.
The same sums as of the direct rule, in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import (
    ColumnTiles,
    column_tiles,
    is_wide,
    open_column_tiles,
)
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import (
    IN_FLIGHT,
    RegisterTile,
    by_height,
    by_part,
    partials,
)
from torch_hybrid_backend.engines.cpu.schedules.transposition import transposed
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks, split_into, strips
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import loads_of
from torch_hybrid_backend.loops.layout import Blocked
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, size_hint

# [tap][column of a tile]: `ColumnTiles.inside`.
Inside = tuple[tuple[bool | None, ...], ...]
# Cycles of transposing and adding an accumulator, and of copying an element of the weight, by instructions.
_SUM_CYCLES, _COPY_CYCLES = 6, 2
# It must be that much faster than a direct sum by estimate.
_GAIN = 1.25


def small_output_channels(parts: ConvParts) -> Stmt | None:
    """The kernel's body, or None where it is no such convolution, or is computed as fast by the direct rule."""
    return _FewOutputs(parts).emit() if _serves(parts) else None


def _serves(parts: ConvParts) -> bool:
    kernel, lanes, outputs = parts.kernel, parts.target.lanes, parts.out_channels
    if parts.dot is not None or kernel.groups > 1 or parts.dtype != "float32" or lanes % 4 or parts.in_channels % lanes:
        return False
    if outputs > lanes or is_wide(parts.columns) or _tile_columns(parts) is None:
        return False
    layouts = [parts.printer.arguments[load.buffer][1] for load in loads_of(kernel.x)]
    if not layouts or not all(isinstance(layout, Blocked) and layout.block == lanes for layout in layouts):
        return False
    steps = parts.rows.kernel * parts.columns.kernel * parts.in_channels
    rows, columns = parts.rows.typical().out, parts.columns.typical().out
    pixels = columns * -(-rows // strips(parts.images, rows, parts.target))
    per_pixel = outputs * (steps / (2 * lanes) + _SUM_CYCLES + _COPY_CYCLES * steps / max(1, pixels))
    return size_hint(parts.images) > 0 and per_pixel * _GAIN < steps / 2


def _tile_columns(parts: ConvParts) -> int | None:
    """Columns of a register tile: a power of two, beside the outputs' weights and the pixels that several columns read at different taps."""
    outputs, most = parts.out_channels, parts.target.isa.registers - 1

    def fits(columns: int) -> bool:
        return columns * outputs + outputs + parts.columns.shared(columns) <= most

    return next((c for c in (16, 8, 4, 2) if c <= parts.target.lanes and fits(c)), None)


class _FewOutputs:
    """The emission of one kernel."""

    def __init__(self, parts: ConvParts) -> None:
        self.parts, self.builder, self.lanes = parts, parts.builder, parts.target.lanes
        self.outputs, self.blocks = parts.out_channels, parts.in_channels // parts.target.lanes
        self.taps = parts.rows.kernel * parts.columns.kernel
        found = _tile_columns(parts)
        assert found is not None
        self.columns = found
        self.strips = strips(parts.images, parts.rows.typical().out, parts.target)
        size = self.taps * parts.in_channels * self.outputs
        self.weight = parts.builder.workspace(size, parts.dtype, "copied")

    def emit(self) -> Stmt:
        columns = self.parts.columns
        if isinstance(columns.out, Size):
            return by_height(
                self.builder, columns.out, self.lanes, 1, lambda width: self._tasks(open_column_tiles(columns, width))
            )
        return self._tasks(column_tiles(columns.known(), -(-columns.out // self.lanes)))

    def _tasks(self, kinds: Sequence[ColumnTiles]) -> Stmt:
        b, out = self.builder, self.parts.rows.out

        def task(at: tuple[Index, ...]) -> Stmt:
            image, strip = at

            def row(position: Index) -> Stmt:
                return b.seq(*[self._chunks(kind, image, position) for kind in kinds])

            def rows(start: Index, count: int) -> Stmt:
                return b.loop(count, lambda r: row(start + r), name="row")

            def open_rows(height: Dim) -> Stmt:
                def at(r: Index) -> Stmt:
                    position = strip * height + r
                    return b.when(b.index(position) < b.size(out), row(position))

                return b.loop(height, at, name="row")

            every = (
                open_rows(ceil_div(out, self.strips))
                if isinstance(out, Size)
                else by_part(b, split_into(out, self.strips), strip, rows)
            )
            return b.seq(b.alloc_on_heap(self.weight), self._copy(), every)

        return b.fused((self.parts.images, self.strips), task)

    def _weight_at(self, block: Index, kh: Index, kw: Index | int, output: Index | int, lane: Index) -> Index:
        tap = kh * self.parts.columns.kernel + kw
        return ((block * self.taps + tap) * self.outputs + output) * self.lanes + lane

    def _copy(self) -> Stmt:
        """copied[block, kh, kw, output, lane] = the weight."""
        b, parts = self.builder, self.parts
        extents = (self.blocks, parts.rows.kernel, parts.columns.kernel, self.outputs, self.lanes)

        def element(at: tuple[Index, ...]) -> Stmt:
            block, kh, kw, output, lane = at
            zero = as_index(0)
            value = parts.weight(zero, zero, kh, block * self.lanes + lane, kw, output)
            return b.store(self.weight, self._weight_at(*at), value)

        return b.nest(extents, element, name="w")

    def _chunks(self, kind: ColumnTiles, image: Index, row: Index) -> Stmt:
        """All vectors' worths of columns of one kind in an output row."""
        b = self.builder

        def chunk(first: Index) -> Stmt:
            sums = b.local(self.outputs * self.lanes * self.lanes, self.parts.dtype, "sums")

            def of(start: int, count: int, inside: Inside) -> Stmt:
                return b.loop(
                    count,
                    lambda t: self._tile(sums, inside, t * self.columns + start, image, row, first),
                    name="u",
                )

            tiles = [of(*run) for run in self._tiles(kind)]
            write = b.loop(
                self.outputs, lambda output: self._finish(sums, kind.columns, image, output, row, first), name="o"
            )
            return b.seq(b.alloc(sums), *tiles, write)

        return self.parts.each_tile(kind, chunk)

    def _tiles(self, kind: ColumnTiles) -> list[tuple[int, int, Inside]]:
        """(first column, number of tiles, `inside` of each) of the runs of register tiles of a chunk that need the same code."""
        found: list[tuple[int, int, Inside]] = []
        for start in range(0, kind.columns, self.columns):
            inside = tuple(tap[start : start + self.columns] for tap in kind.inside)
            if found and found[-1][2] == inside:
                found[-1] = (found[-1][0], found[-1][1] + 1, inside)
            else:
                found.append((start, 1, inside))
        return found

    def _tile(self, sums: TirBuffer, inside: Inside, start: Index, image: Index, row: Index, first: Index) -> Stmt:
        """The sums, lane by lane, of the columns from the chunk's column `start` on: sums[output, column, lane]."""
        b, parts, columns, count = self.builder, self.parts, self.parts.columns, len(inside[0])
        # Few accumulators: each is several, or an addition would wait for the one before it.
        read = [any(is_there is not False for is_there in tap) for tap in inside]
        steps = self.blocks * sum(read)
        ways = RegisterTile.ways_for(count * self.outputs, steps) if count * self.outputs < IN_FLIGHT else 1
        tile = RegisterTile(b, parts.printer, count, self.outputs, self.lanes, parts.dtype, ways)

        def tap(block: Index, kh: Index, source: Index, kw: int, way: int) -> list[Stmt | None]:
            def at(column: int) -> Index:
                return columns.source(first + start + column, kw)

            def x(column: int) -> Callable[[Index], TirExpr]:
                return lambda lane: parts.x(image, block * self.lanes + lane, source, at(column))

            def weight(output: int, lane: Index) -> TirExpr:
                return b.load(self.weight, self._weight_at(block, kh, kw, output, lane))

            def add(reads: Sequence[bool | None]) -> Stmt | None:
                scalars = [x(column) if is_there else None for column, is_there in enumerate(reads)]
                return tile.accumulate(scalars, partials(weight, self.outputs), way)

            def tested(column: int) -> Stmt:
                return parts.inside(columns, at(column), b.seq(add([c == column for c in range(count)])))

            unknown = [column for column, is_there in enumerate(inside[kw]) if is_there is None]
            return [add(inside[kw]), *map(tested, unknown)]

        def kernel_row(kh: Index) -> Stmt:
            source = parts.rows.source(row, kh)

            def block(number: Index) -> Stmt:
                return b.seq(*[step for kw in range(columns.kernel) for step in tap(number, kh, source, kw, kw % ways)])

            return parts.inside(parts.rows, source, b.loop(self.blocks, block, name="cb"))

        window = b.loop(parts.rows.kernel, kernel_row, name="kh") if any(read) else None
        places = [
            (column, output, (start + (output * self.lanes + column)) * self.lanes)
            for column in range(count)
            for output in range(self.outputs)
        ]
        spill = parts.printer.vector_loop(
            self.lanes, lambda lane: b.seq(*[b.store(sums, lane + to, tile.at(c, o, lane)) for c, o, to in places])
        )
        return b.seq(tile.declare(), tile.clear(), window, tile.merge(), spill)

    def _finish(self, sums: TirBuffer, count: int, image: Index, output: Index, row: Index, first: Index) -> Stmt:
        """The stores of `count` columns of one output channel."""
        b, lanes, dtype = self.builder, self.lanes, self.parts.dtype
        vectors, binds = [], []
        for column in range(lanes):
            vectors.append(b.variable("sum", f"{dtype}x{lanes}"))
            place = (output * lanes + min(column, count - 1)) * lanes  # columns that are not there repeat the last
            load = b.load_vector(sums, place, lanes)
            binds.append(b.bind(vectors[-1], load))
        found = transposed(vectors)
        while len(found) > 1:
            found = [a + c for a, c in zip(found[::2], found[1::2], strict=True)]
        out = b.local(lanes, dtype, "out")
        put = b.store_vector(out, 0, found[0], lanes)

        def written(start: int, width: int) -> Stmt:
            def store(lane: Index) -> Stmt:
                return self.parts.stores(b.load(out, lane + start), image, output, row, first + (lane + start))

            return self.parts.printer.vector_loop(width, store)

        writes = [written(*chunk) for chunk in lane_chunks(count, lanes)]
        return b.seq(*binds, b.alloc(out), put, *writes)
