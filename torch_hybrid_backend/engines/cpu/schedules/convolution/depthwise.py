"""Depthwise convolution: every output channel reads its own input channel.

Pattern: `Panels` that are (channel blocks, kh, kw, block): groups == input channels == output channels > 1.
Steps:
1. Vector lanes are the channels of a block, in input, weight and output alike: with a blocked layout every access is one whole vector.
2. One parallel loop over (image, channel block, output row).
3. A tile of output columns is held in registers over the whole window, which is unrolled; columns that read padding at a kernel column
   leave that step out (`conv_geometry`), rows that read padding skip a kernel row.
The work is one load per multiply-add: the schedule runs at the speed of the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import ColumnTiles, column_tiles, is_wide
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks, max_rows
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirExpr
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import known_int

# Windows up to this many taps are unrolled whole; larger ones keep a loop over kernel rows.
_UNROLLED_TAPS = 9


def depthwise(parts: ConvParts) -> Stmt | None:
    """The kernel's body, or None where it is no depthwise convolution."""
    row = _row(parts)
    return None if row is None else parts.builder.fused((parts.images, _blocks(parts), parts.rows.out), row)


def depthwise_row(parts: ConvParts) -> Callable[[Index, Index], Stmt] | None:
    """All channels of one output row of an image, or None where it is no depthwise convolution."""
    row = _row(parts)
    if row is None:
        return None
    return lambda image, out_row: parts.builder.loop(
        _blocks(parts), lambda block: row((image, block, out_row)), name="b"
    )


def _blocks(parts: ConvParts) -> int:
    return known_int(parts.packed.shape[0])


def _row(parts: ConvParts) -> Callable[[tuple[Index, ...]], Stmt] | None:
    """Compute one output row of a channel block: (image, block, output row)."""
    if len(parts.packed.shape) != 4:
        return None
    b, blocks = parts.builder, _blocks(parts)
    tail = parts.out_channels - (blocks - 1) * parts.block
    tiles = column_tiles(parts.columns, -(-parts.columns.out // max_rows(1, parts.target)))

    def row(position: tuple[Index, ...]) -> Stmt:
        image, block, out_row = position

        def lanes(start: int, width: int) -> Stmt:
            return b.seq(*[_tiles(parts, tile, image, block, out_row, start, width) for tile in tiles])

        chunks = lane_chunks(tail, parts.block)
        last = b.seq(*[lanes(start, width) for start, width in chunks])
        if tail == parts.block or blocks == 1:
            return last
        return b.when(b.index(block) < blocks - 1, lanes(0, parts.block), last)

    return row


def _tiles(
    parts: ConvParts, tiles: ColumnTiles, image: Index, block: Index, out_row: Index, start: int, lanes: int
) -> Stmt:
    """All tiles of one kind in one output row, for channels `start` .. `start + lanes - 1` of a block."""
    b, rows, columns = parts.builder, parts.rows, parts.columns

    def one(number: Index) -> Stmt:
        first = number * tiles.columns + tiles.first
        tile = RegisterTile(b, parts.printer, tiles.columns, 1, lanes, parts.dtype)

        def channel(lane: Index) -> Index:
            return block * parts.block + lane + start

        def tap(kh: Index, kw: Index, read: Sequence[bool]) -> Stmt | None:
            source = rows.source(out_row, kh)

            def x(column: int, lane: Index) -> TirExpr:
                return parts.x(image, channel(lane), source, columns.source(first + column, kw))

            return tile.accumulate(
                [partial(x, c) if inside else None for c, inside in enumerate(read)],
                [lambda lane: parts.weight(block, kh, kw, lane + start)],
            )

        def looped(kh: Index, kw: Index) -> Stmt:
            count = tiles.columns
            return b.seq(
                *[
                    parts.inside(columns, columns.source(first + c, kw), tap(kh, kw, [c == i for i in range(count)]))
                    for c in range(count)
                ]
            )

        def kernel_row(kh: Index) -> Stmt | None:
            if is_wide(columns):
                body = b.loop(columns.kernel, lambda kw: looped(kh, kw), name="kw")
            else:
                taps = [tap(kh, as_index(kw), tiles.inside[kw]) for kw in range(columns.kernel)]
                if all(t is None for t in taps):
                    return None
                body = b.seq(*taps)
            return parts.inside(rows, rows.source(out_row, kh), body)

        if rows.kernel * columns.kernel <= _UNROLLED_TAPS:
            window = [kernel_row(as_index(kh)) for kh in range(rows.kernel)]
        elif is_wide(columns) or any(any(inside) for inside in tiles.inside):
            window = [b.loop(rows.kernel, kernel_row, name="kh")]
        else:
            window = []
        write = parts.write_tile(tile, lanes, lambda _, lane, c: (image, channel(lane), out_row, first + c))
        return b.seq(tile.declare(), tile.clear(), *window, write)

    return b.loop(tiles.count, one, name="t")
