"""Depthwise convolution: every output channel reads its own input channel.

Pattern: `Panels` that are (channel blocks, kh, kw, block): groups == input channels == output channels > 1.
Steps:
1. Vector lanes are the channels of a block, in input, weight and output alike: with a blocked layout every access is one whole vector.
2. One parallel loop over (image, channel block, output row).
3. A tile of output columns is held in registers over the whole window, which is unrolled; columns that read padding at a kernel column
   leave that step out (`conv_geometry`), rows that read padding skip a kernel row.
4. Where a load is an instruction of its own (`Isa.loads_apart`), a tile of a small window has several output rows, which share pixels; rows
   that read padding are computed one by one.
The work is one load per multiply-add: the schedule runs at the speed of the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import (
    ColumnTiles,
    column_tiles,
    is_wide,
    open_column_tiles,
)
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile, by_height, by_part
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks, max_rows, split_at_most
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirExpr
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import Size, known_int

# Windows up to this many taps are unrolled whole; larger ones keep a loop over kernel rows.
_UNROLLED_TAPS = 9
# Output rows of a register tile of such a window, where rows share what they read: of more, tiles would be too narrow.
_SHARING_ROWS = 4


def depthwise(parts: ConvParts) -> Stmt | None:
    """The kernel's body, or None where it is no depthwise convolution."""
    if len(parts.packed.shape) != 4:
        return None
    b, most = parts.builder, _most_rows(parts)
    top, end = (0, 0) if most == 1 else parts.rows.known().interior()
    if top == end:
        order = (parts.images, _blocks(parts), parts.rows.out)

        def body(tiles: Sequence[ColumnTiles]) -> Stmt:
            return b.fused(order, lambda at: _rows(parts, tiles, at[0], at[1], at[2], 1))

        if not isinstance(parts.columns.out, Size):
            return body(_tiles_of(parts, 1))
        widest = max_rows(1, parts.target)
        return by_height(b, parts.columns.out, widest, 1, lambda width: body(open_column_tiles(parts.columns, width)))
    heights, outside = split_at_most(end - top, most), known_int(parts.rows.out) - (end - top)

    def task(position: tuple[Index, ...]) -> Stmt:
        image, block, part = position
        inside = by_part(
            b,
            heights,
            part - outside,
            lambda first, height: _rows(parts, _tiles_of(parts, height), image, block, first + top, height),
        )
        if not outside:
            return inside
        # Rows that read padding come first, those at the top before those at the bottom.
        row = tir.select(b.index(part) < top, b.index(part), b.index(part + (end - top)))
        single, bind = b.bound(row, parts.rows.out, "row")
        return b.when(
            b.index(part) < outside, b.seq(bind, _rows(parts, _tiles_of(parts, 1), image, block, single, 1)), inside
        )

    return b.fused((parts.images, _blocks(parts), outside + heights.parts), task)


def depthwise_row(parts: ConvParts) -> Callable[[Index, Index], Stmt] | None:
    """All channels of one output row of an image, or None where it is no depthwise convolution."""
    if len(parts.packed.shape) != 4:
        return None
    return lambda image, row: parts.builder.loop(
        _blocks(parts), lambda block: _rows(parts, _tiles_of(parts, 1), image, block, row, 1), name="b"
    )


def _blocks(parts: ConvParts) -> int:
    return known_int(parts.packed.shape[0])


def _most_rows(parts: ConvParts) -> int:
    """Output rows of a register tile, which share the input rows that they read."""
    is_open = parts.rows.is_open or parts.columns.is_open
    if not parts.target.isa.loads_apart or is_open or parts.rows.kernel * parts.columns.kernel > _UNROLLED_TAPS:
        return 1
    return max(1, _SHARING_ROWS // parts.rows.stride)


def _most_columns(parts: ConvParts, height: int) -> int:
    """Output columns of a register tile of `height` rows; where rows share pixels, beside the window and pixels of one input row.

    With a stride, LLVM loads the first pixels of the next row while the last of one are multiplied.
    """
    if _most_rows(parts) == 1:
        return max_rows(1, parts.target)
    columns = parts.columns
    room = parts.target.isa.registers - 1 - parts.rows.kernel * columns.kernel
    return next((c for c in range(room, 0, -1) if height * c + columns.width(c) + 2 * (columns.stride - 1) <= room), 1)


def _tiles_of(parts: ConvParts, height: int) -> list[ColumnTiles]:
    """The output columns, of known number, in register tiles of `height` rows."""
    return column_tiles(parts.columns.known(), -(-known_int(parts.columns.out) // _most_columns(parts, height)))


def _rows(
    parts: ConvParts, tiles: Sequence[ColumnTiles], image: Index, block: Index, first: Index, height: int
) -> Stmt:
    """Compute `height` output rows of a channel block."""
    b, blocks = parts.builder, _blocks(parts)
    tail = parts.out_channels - (blocks - 1) * parts.block

    def lanes(start: int, width: int) -> Stmt:
        of = _tiles if height == 1 else partial(_tall_tiles, height=height)
        return b.seq(*[of(parts, tile, image, block, first, start, width) for tile in tiles])

    last = b.seq(*[lanes(start, width) for start, width in lane_chunks(tail, parts.block)])
    if tail == parts.block or blocks == 1:
        return last
    return b.when(b.index(block) < blocks - 1, lanes(0, parts.block), last)


def _tall_tiles(
    parts: ConvParts,
    tiles: ColumnTiles,
    image: Index,
    block: Index,
    out_row: Index,
    start: int,
    lanes: int,
    height: int,
) -> Stmt:
    """All tiles of one kind in `height` output rows that read no padding above or below: an input row at a time, for all that read it."""
    b, rows, columns = parts.builder, parts.rows, parts.columns

    def channel(lane: Index) -> Index:
        return block * parts.block + lane + start

    def one(number: Index) -> Stmt:
        first = number * tiles.columns + tiles.first
        of_rows = [RegisterTile(b, parts.printer, tiles.columns, 1, lanes, parts.dtype) for _ in range(height)]
        begun = [[False] * tiles.columns for _ in range(height)]

        def input_row(offset: int) -> Stmt | None:
            """Input row `offset` of those that the tile reads."""
            source = rows.source(out_row, 0) + offset
            taps = [(r, kh) for r in range(height) for kh in range(rows.kernel) if offset == rows.place(r, kh)]

            def x(kw: int, column: int, lane: Index) -> TirExpr:
                return parts.x(image, channel(lane), source, columns.source(first + column, kw))

            def tap(r: int, kh: int, kw: int) -> Stmt | None:
                pixels = [partial(x, kw, c) if inside else None for c, inside in enumerate(tiles.inside[kw])]
                weight = [lambda lane: parts.weight(block, as_index(kh), as_index(kw), lane + start)]
                step = of_rows[r].accumulate(pixels, weight, begun=begun[r])
                begun[r] = [done or bool(inside) for done, inside in zip(begun[r], tiles.inside[kw], strict=True)]
                return step

            steps = [tap(r, kh, kw) for kw in columns.in_order() for r, kh in taps]
            return b.seq(*steps) if any(s is not None for s in steps) else None

        steps = [input_row(offset) for offset in range(rows.width(height))]
        # A column that reads nothing but padding has no product.
        never = [tile.clear() if not all(done) else None for tile, done in zip(of_rows, begun, strict=True)]

        def place(r: int, _: int, lane: Index, c: int | Index) -> tuple[Index, ...]:
            return image, channel(lane), out_row + r, first + c

        write = [parts.write_tile(tile, lanes, partial(place, r)) for r, tile in enumerate(of_rows)]
        return b.seq(*[tile.declare() for tile in of_rows], *never, *steps, *write)

    return b.loop(tiles.count, one, name="t")


def _tiles(
    parts: ConvParts, tiles: ColumnTiles, image: Index, block: Index, out_row: Index, start: int, lanes: int
) -> Stmt:
    """All tiles of one kind in one output row, for channels `start` .. `start + lanes - 1` of a block."""
    b, rows, columns = parts.builder, parts.rows, parts.columns

    def one(first: Index) -> Stmt:
        tile = RegisterTile(b, parts.printer, tiles.columns, 1, lanes, parts.dtype)

        def channel(lane: Index) -> Index:
            return block * parts.block + lane + start

        def tap(kh: Index, kw: Index, read: Sequence[bool | None]) -> Stmt | None:
            source = rows.source(out_row, kh)

            def x(column: int, lane: Index) -> TirExpr:
                return parts.x(image, channel(lane), source, columns.source(first + column, kw))

            return tile.accumulate(
                [partial(x, c) if inside else None for c, inside in enumerate(read)],
                [lambda lane: parts.weight(block, kh, kw, lane + start)],
            )

        def tested(kh: Index, kw: Index, c: int) -> Stmt:
            """The tap of one column, where it reads inside the input."""
            alone = tap(kh, kw, [c == i for i in range(tiles.columns)])
            return parts.inside(columns, columns.source(first + c, kw), alone)

        def unrolled(kh: Index, kw: int) -> list[Stmt | None]:
            inside = tiles.inside[kw]
            unknown = [c for c, is_there in enumerate(inside) if is_there is None]
            return [tap(kh, as_index(kw), inside), *[tested(kh, as_index(kw), c) for c in unknown]]

        def looped(kh: Index, kw: Index) -> Stmt:
            return b.seq(*[tested(kh, kw, c) for c in range(tiles.columns)])

        def kernel_row(kh: Index) -> Stmt | None:
            if is_wide(columns):
                body = b.loop(columns.kernel, lambda kw: looped(kh, kw), name="kw")
            else:
                taps = [step for kw in range(columns.kernel) for step in unrolled(kh, kw)]
                if all(t is None for t in taps):
                    return None
                body = b.seq(*taps)
            return parts.inside(rows, rows.source(out_row, kh), body)

        if rows.kernel * columns.kernel <= _UNROLLED_TAPS:
            window = [kernel_row(as_index(kh)) for kh in range(rows.kernel)]
        elif is_wide(columns) or any(is_there is not False for inside in tiles.inside for is_there in inside):
            window = [b.loop(rows.kernel, kernel_row, name="kh")]
        else:
            window = []
        write = parts.write_tile(tile, lanes, lambda _, lane, c: (image, channel(lane), out_row, first + c))
        return b.seq(tile.declare(), tile.clear(), *window, write)

    return parts.each_tile(tiles, one)
