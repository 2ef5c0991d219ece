"""Depthwise convolution of 8-bit integers by dot products of neighbouring pixels.

Pattern: a weight in `Taps`, (channel blocks, kh, groups of 4 taps, 16, 4) (`operands/vnni_packing.py`):
groups == channels, of 8 bits by int8, the input in blocks of 16 channels. Steps:
1. One parallel loop over (image, channel block, output row); a tile of output columns is held in registers over the whole window.
2. Four neighbouring pixels of a block are one vector of memory. A permutation puts the four bytes of each channel together, and one dot product
   adds their products by four taps: of a 3x3 window there are three of each, where float32 takes nine multiply-adds and converts every pixel.
3. Signed pixels are moved up by 128, as the instruction wants: their sign's bit is turned over. What that and a zero point add to a channel's
   sums, so many times the sum of its weights, is taken off where they start.
4. Pixels outside of the image are masked when they are loaded: they count as the zero point, and no memory outside of the image is touched.
   Lines outside of it are left out, unless sums start at what counts on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import ColumnTiles, column_tiles, open_column_tiles
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile, by_height
from torch_hybrid_backend.engines.cpu.tile_sizes import max_rows
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.x86 import dot_taps
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Load
from torch_hybrid_backend.sizes.size import Size, known_int

_LANES, _TAPS = 16, 4
# Lines of a window up to which they are unrolled.
_UNROLLED_LINES = 3


def depthwise_taps(parts: ConvParts) -> Stmt:
    """The kernel's body."""
    b, blocks = parts.builder, known_int(parts.packed.shape[0])
    tail = parts.out_channels - (blocks - 1) * _LANES
    most, out = max_rows(1, parts.target), parts.columns.out

    def body(tiles: Sequence[ColumnTiles]) -> Stmt:
        def row(position: tuple[Index, ...]) -> Stmt:
            def lanes(width: int) -> Stmt:
                return b.seq(*[_tiles(parts, tile, position, width) for tile in tiles])

            if tail == _LANES or blocks == 1:
                return lanes(tail)
            return b.when(b.index(position[1]) < blocks - 1, lanes(_LANES), lanes(tail))

        return b.fused((parts.images, blocks, parts.rows.out), row)

    if isinstance(out, Size):
        return by_height(b, out, most, 1, lambda width: body(open_column_tiles(parts.columns, width)))
    return body(column_tiles(parts.columns.known(), -(-out // most)))


def _tiles(parts: ConvParts, tiles: ColumnTiles, position: tuple[Index, ...], lanes: int) -> Stmt:
    """All tiles of one kind in one output row, for the first `lanes` channels of a block."""
    b, rows, columns, packed = parts.builder, parts.rows, parts.columns, parts.packed
    x, (image, block, out_row) = parts.kernel.x, position
    assert isinstance(x, Load)
    is_moved = parts.starts is not None
    image_array, weight_array = parts.printer.arguments[x.buffer][0], parts.printer.arguments[packed][0]

    def one(first: Index) -> Stmt:
        tile = RegisterTile(b, parts.printer, tiles.columns, 1, _LANES, parts.dtype)

        def products(kh: Index, source: Index | None) -> list[Stmt]:
            """A line of the window, which reads line `source` of the image; None: one outside of it."""
            steps = []
            for word in range(known_int(packed.shape[2])):
                at = parts.printer.offset(packed, (block, kh, as_index(word), as_index(0), as_index(0)), {})
                weights = b.load_vector(weight_array, at, _LANES * _TAPS)
                whole = [t for t in range(_TAPS) if word * _TAPS + t < columns.kernel]
                for column in range(tiles.columns):
                    inside = [source is not None and tiles.inside[word * _TAPS + t][column] for t in whole]
                    steps.append(product(weights, source, word, column, inside))
            return [step for step in steps if step is not None]

        def product(
            weights: TirExpr, source: Index | None, word: int, column: int, inside: Sequence[bool | None]
        ) -> Stmt | None:
            """A column's products with a word of taps. `inside`: the taps that read a pixel; those that may are tested one after the other."""
            if None in inside:
                tap = inside.index(None)
                there, outside = (
                    product(weights, source, word, column, [*inside[:tap], known, *inside[tap + 1 :]])
                    for known in (True, False)
                )
                at = columns.source(first + column, word * _TAPS + tap)
                return parts.inside(columns, at, b.seq(there), other=outside)
            taps = [t for t, is_there in enumerate(inside) if is_there]
            pixels, read = as_index(0), range(0)
            if taps and source is not None:
                # Counted from a pixel of the image: of a dimension of one, indices say nothing else.
                source_column = columns.source(first + column, word * _TAPS + taps[0])
                place = parts.x_env(image, block * _LANES, source, source_column)
                pixels = parts.printer.offset(x.buffer, x.index, place) - taps[0] * _LANES
                read = range(taps[0], taps[-1] + 1)
            elif not is_moved:
                return None
            # Where all taps are there, what lies beside them has weights of 0.
            border = 0 if len(taps) == len(inside) else parts.kernel.border
            return tile.update(column, 0, partial(dot_taps, b, image_array, b.index(pixels), read, border, weights))

        def line(kh: Index) -> Stmt | None:
            source = rows.source(out_row, kh)
            steps = products(kh, source)
            if not steps:
                return None
            outside = b.seq(*products(kh, None)) if is_moved else None
            return parts.inside(rows, source, b.seq(*steps), other=outside)

        if rows.kernel <= _UNROLLED_LINES:
            window = [line(as_index(kh)) for kh in range(rows.kernel)]
        elif is_moved or any(is_there is not False for inside in tiles.inside for is_there in inside):
            window = [b.loop(rows.kernel, line, name="kh")]
        else:
            window = []
        write = parts.write_tile(tile, lanes, lambda _, lane, c: (image, block * _LANES + lane, out_row, first + c))
        begin = tile.fill(lambda _, __, lane: parts.start(block * _LANES + lane)) if is_moved else tile.clear()
        return b.seq(tile.declare(), begin, *window, write)

    return parts.each_tile(tiles, one)
