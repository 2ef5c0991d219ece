"""1x1 convolution by instructions that multiply two pixels by two output channels (AArch64's smmla, ummla, usmmla and bfmmla).

Pattern: `Panels` whose `dot` has two rows, of one group, stride 1 and no padding. As `direct` for such kernels, with these differences:
1. The image is one long row of pixels in blocks of four channels, so two neighbouring pixels of a block are one load. A word of bytes has the
   channels of two blocks: one instruction puts those of a pair of pixels together, for all output channels of a tile.
2. A register of sums is a block of 2 x 2. Behind the sum, shuffles of two neighbouring blocks make a vector of four channels for each pixel.
3. Tiles have an even number of pixels. The last begins where it ends with the image: what it computes once more is equal.
"""

from __future__ import annotations

from functools import partial

from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.convolution.weight_stream import streams
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import (
    IN_FLIGHT,
    RegisterTile,
    by_part,
    tile_start,
    unzipped,
)
from torch_hybrid_backend.engines.cpu.tile_sizes import Split, most_pairs, split_at_most
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.dot import load_words
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Load
from torch_hybrid_backend.sizes.size import known_int, size_hint

# Blocks of channels of a tile: with six of them, a pair of pixels is put together for twelve products.
_MOST_BLOCKS = 6


def pixel_pairs(parts: ConvParts) -> Stmt | None:
    """The kernel's body; None where its products are no blocks of 2 x 2."""
    return None if parts.dot is None or parts.dot.rows == 1 else _PixelPairs(parts).emit()


class _PixelPairs:
    """The emission of one kernel."""

    def __init__(self, parts: ConvParts) -> None:
        self.parts, self.builder = parts, parts.builder
        assert parts.dot is not None
        self.dot = parts.dot
        _, self.all_blocks, _, self.steps, _, self.block, _ = map(known_int, parts.packed.shape)
        self.tail = parts.out_channels - (self.all_blocks - 1) * self.block
        self.pixels = parts.rows.known().out * parts.columns.known().out
        self.blocks, self.pairs = self._tiling()

    def _tiling(self) -> tuple[Split, int]:
        """Parts of the blocks of output channels, and pairs of pixels in a tile: the kernel's `schedule_rank`, by estimated time."""
        found: dict[tuple[Split, int], float] = {}
        cores, images = self.parts.target.cores, size_hint(self.parts.images)
        for most in range(1, min(_MOST_BLOCKS, self.all_blocks) + 1):
            blocks = split_at_most(self.all_blocks, most)
            vectors = 2 * self.all_blocks / blocks.parts  # on average
            for pairs in range(1, most_pairs(2 * blocks.size, self.pixels, self.parts.target) + 1):
                tiles = -(-self.pixels // (2 * pairs))
                # Instructions of a step: products, what puts pairs together, and loads beside them; or the latency of few products.
                time = max(pairs * vectors + pairs, IN_FLIGHT) + (2 * pairs + vectors) / 8
                tasks = images * blocks.parts * tiles
                found.setdefault((blocks, pairs), -(-tasks // cores) * time)
        return self.builder.ranked_choice(found)

    def emit(self) -> Stmt:
        b, parts, height = self.builder, self.parts, 2 * self.pairs
        tiles = -(-self.pixels // height)

        def task(image: Index, part: Index, number: Index) -> Stmt:
            first, begin = tile_start(b, self.pixels, height, number)
            return b.seq(begin, by_part(b, self.blocks, part, partial(self._tile, image, part, first)))

        if streams(parts):
            return b.fused((parts.images, self.blocks.parts, tiles), lambda at: task(*at))
        return b.fused((parts.images, tiles, self.blocks.parts), lambda at: task(at[0], at[2], at[1]))

    def _tile(self, image: Index, part: Index, first: Index, first_block: Index, blocks: int) -> Stmt:
        """Compute one register tile, from zero to its stores."""
        b, parts, lanes = self.builder, self.parts, self.block
        tile = RegisterTile(b, parts.printer, self.pairs, 2 * blocks, lanes, parts.dtype)

        def step(k: Index) -> Stmt:
            words = [self._pair(image, k, first + 2 * pair) for pair in range(self.pairs)]
            weights = [self._weights(first_block + v // 2, k, v % 2) for v in range(tile.vectors)]
            return b.seq(tile.accumulate_words(words, weights, self.dot, one_by_one=True))

        def start(vector: int, lane: Index) -> TirExpr:
            return parts.start((first_block + vector) * lanes + lane)

        rows, unzip = unzipped(tile, None if parts.starts is None else start)

        def place(vector: int, lane: Index, pixel: int | Index) -> tuple[Index, ...]:
            return image, (first_block + vector) * lanes + lane, *self._place(first + pixel)

        def write(channels: int) -> Stmt:
            return parts.write_tile(rows, channels, place)

        if self.tail == lanes or self.blocks.parts == 1:
            stores = write(self.tail)
        else:
            stores = b.when(b.index(part) < self.blocks.parts - 1, write(lanes), write(self.tail))
        # One step at a time: LLVM would begin the next one's loads before this one's products, and keep sums in memory for it.
        sums = b.loop(self.steps, step, name="ic")
        return b.seq(tile.declare(), tile.clear(), sums, unzip, stores)

    def _place(self, pixel: Index) -> tuple[Index, Index]:
        """Row and column of the image."""
        width = self.parts.columns.out
        return pixel // width, pixel % width

    def _pair(self, image: Index, k: Index, pixel: Index) -> TirExpr:
        """The words of two neighbouring pixels, one behind the other."""
        b, load, group, block = self.builder, self.parts.kernel.x, self.dot.group, self.block
        assert isinstance(load, Load)
        array, _ = self.parts.printer.arguments[load.buffer]
        env = self.parts.x_env(image, k, *self._place(pixel))
        channel = self.parts.kernel.x_vars[1]
        blocks = []
        for first in range(0, group, block):
            place = {**env, channel: env[channel] + first}
            offset = b.index(self.parts.printer.offset(load.buffer, load.index, place))
            blocks.append(load_words(array, offset, self.dot, 4 * block // group))
        if len(blocks) == 1:
            return tir.reinterpret(blocks[0], "int32x4")
        return tir.shuffle([tir.reinterpret(both, "int32x2") for both in blocks], (0, 2, 1, 3))

    def _weights(self, block: Index, k: Index, half: int) -> TirExpr:
        """The words of two neighbouring output channels of a block."""
        none = as_index(0)
        position = (none, block, none, k, none, as_index(2 * half), none)
        array = self.parts.printer.arguments[self.parts.packed][0]
        offset = self.parts.printer.offset(self.parts.packed, position, {})
        return load_words(array, self.builder.index(offset), self.dot, self.block)
