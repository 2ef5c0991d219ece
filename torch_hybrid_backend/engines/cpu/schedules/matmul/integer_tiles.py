"""Register tiles of rows of float32, written as integers (`integer_rows`), with a weight of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import by_part, tile_start
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import split_at_most, split_into
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, function, known_int

_SHORT_GROUP = 64  # of k
# Rows of a tile at most, by their bytes, where groups are short. With more, of two bytes, Zen 5 is slower.
_LOW_TILE = {1: 5, 2: 3, 3: 3}

# `body(number in the block, first row, rows)` for each tile of a block of rows.
EachTile = Callable[[Index, Callable[[Index, Index, int], Stmt]], Stmt]


@dataclass(frozen=True, slots=True)
class IntegerForm:
    """Numbers of rows as integers of `parts` bytes, in groups of `group` along k, for products by `dot`."""

    dot: DotProduct
    group: int
    parts: int


@dataclass(frozen=True, slots=True)
class IntegerTiles:
    """`blocks` blocks of `per_block` tiles at most, of `height` rows at most.

    `shares`: of the panels, a task each. `each(block, body)`: `body` for each tile of a block.
    """

    form: IntegerForm
    height: int
    per_block: int
    blocks: Dim
    shares: Dim
    each: EachTile


def integer_tiles(
    builder: Builder, m: Dim, form: IntegerForm, depth: int, vectors: int, panels: int, target: Target
) -> IntegerTiles | None:
    """The tiles of `m` rows of `depth` numbers by `vectors` vectors of columns of each of `panels` panels.

    Of a number of rows that is known only at run time, it must be a tile or more. None where there are no registers for two rows.
    """
    b, cores, parts = builder, target.cores, form.parts
    # A sum for each part of a row and vector of columns; a word of each vector, one of a row, two masks and a spare.
    room = (target.isa.registers - vectors - 4) // vectors
    # Where groups are short, the sums of all groups are in registers beside them. Of an unknown number of rows the last tile overlaps the one
    # before: tiles of few rows take hardly longer, and waste less.
    is_short = form.group <= _SHORT_GROUP or isinstance(m, Size)
    most = min(room // (parts + 1), _LOW_TILE[parts]) if is_short else room // parts
    if most < 2:
        return None
    height = most if isinstance(m, Size) else split_at_most(m, most).size
    tiles = ceil_div(m, height)
    fitting = max(1, target.l2_bytes // 2 // (height * parts * depth))
    # One block, whose panels are shared, or as many as leave every core its part.
    fewest = function("max", ceil_div(tiles, fitting), 1)
    blocks = function("min", fewest - 1, 1) * (ceil_div(fewest, cores) * cores - 1) + 1
    per_block = ceil_div(tiles, blocks)
    if isinstance(m, int):
        blocks = ceil_div(tiles, per_block)  # none is empty
        split = split_into(m, known_int(blocks * per_block))

        def each(block: Index, body: Callable[[Index, Index, int], Stmt]) -> Stmt:
            def tile(inner: Index) -> Stmt:
                part = block * per_block + inner
                return by_part(b, split, part, lambda row, count: body(inner, row, count))

            return b.loop(per_block, tile, name="tile")

        height, most_in_block = split.size, known_int(per_block)
    else:
        most_in_block = fitting

        def each(block: Index, body: Callable[[Index, Index, int], Stmt]) -> Stmt:
            def tile(inner: Index) -> Stmt:
                first, begin = tile_start(b, m, height, block * per_block + inner)
                return b.seq(begin, body(inner, first, height))

            held = tir.minimum(b.size(tiles) - b.index(block * per_block), b.size(per_block))
            return b.loop_until(held, fitting, tile, "tile")

    shares = function("min", function("max", ceil_div(cores, blocks), 1), panels)
    return IntegerTiles(form, height, most_in_block, blocks, shares, each)
