"""1x1 convolution of a computed input: what is computed element by element in front of it never goes to memory.

Pattern: a `ConvKernel` with stride 1, no padding and one group whose input is an expression: relu(batch_norm(concat(...))) in DenseNet, an
image scaled channel by channel in squeeze-and-excitation. `fuses_input` (engines/tvm/tiles.py) says for which convolutions kernels are made so.

Strategy
1. One parallel loop over (image, tile of pixels).
2. A task computes the input of its pixels, all channels of them, into a panel of its own that stays in the caches of its core: blocks of
   channels, in each the pixels, in each the lanes.
3. Then register tiles of those pixels times some blocks of output channels, one after the other, until all are done: the weight, which
   `fuses_input` keeps below the second-level cache, is what streams.

Not used: computing the input where it is read. Each element is read once for every tile of output channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch_hybrid_backend.core.size import known, typical
from torch_hybrid_backend.engines.tvm.builder import Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.tvm.schedules.axes import Env, vectors
from torch_hybrid_backend.engines.tvm.schedules.conv_parts import ConvParts
from torch_hybrid_backend.engines.tvm.schedules.registers import RegisterTile, by_part, lanes_of, tile_time
from torch_hybrid_backend.engines.tvm.tiles import Split, max_rows, register_count, split_into
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Call, Expr, FromIndex, Load

# Multiply-adds in one body of the loop over input channels: enough to hide the loop itself.
_UNROLLED_MULTIPLY_ADDS = 56


def pointwise(parts: ConvParts) -> Stmt | None:
    """The kernel's body; None where the input lies in memory already or the kernel is not 1x1."""
    if isinstance(parts.kernel.x, Load) or parts.kernel.groups != 1:
        return None
    if not (parts.rows.is_pointwise and parts.columns.is_pointwise):
        return None
    return _Pointwise(parts).emit()


class _Pointwise:
    """The emission of one kernel."""

    def __init__(self, parts: ConvParts) -> None:
        self.parts, self.builder, self.target = parts, parts.builder, parts.target
        _, self.blocks, _, self.channels, _, self.block = map(known, parts.kernel.packed.shape)
        self.pixels = parts.rows.out * parts.columns.out
        self.lanes = lanes_of(self.target, parts.dtype)
        self.output_blocks, self.tiles = self._choose()

    def _choose(self) -> tuple[Split, Split]:
        """Blocks of output channels and pixels of the register tiles: the kernel's `choice` of those there are, by estimated time."""
        cores, wide = self.target.cores, max(1, self.block // self.lanes)
        found: dict[tuple[Split, Split], float] = {}
        for most in range(1, min(self.blocks, register_count(self.target) // 4) + 1):
            blocks = split_into(self.blocks, -(-self.blocks // most))
            fewest = -(-self.pixels // max_rows(blocks.size * wide, self.target))
            for tiles in {fewest, min(self.pixels, -(-fewest // cores) * cores)}:
                pixels = split_into(self.pixels, tiles)
                tasks = typical(self.parts.images) * tiles
                work = sum(
                    n_blocks * n_tiles * tile_time(b * wide, p)
                    for _, n_blocks, b in blocks.runs()
                    for _, n_tiles, p in pixels.runs()
                )
                found.setdefault((blocks, pixels), work * (-(-tasks // cores) * cores / max(1, tasks)))
        return self.builder.choose(found)

    def emit(self) -> Stmt:
        """One parallel loop over images and tiles of pixels."""
        b = self.builder

        def task(at: tuple[Index, ...]) -> Stmt:
            return by_part(b, self.tiles, at[1], lambda first, pixels: self._task(at[0], first, pixels))

        return b.fused((self.parts.images, self.tiles.parts), task)

    def _task(self, image: Index, first: Index, pixels: int) -> Stmt:
        b = self.builder
        panel = b.local(-(-self.channels // self.lanes) * pixels * self.lanes, self.parts.dtype, "panel")
        tiles = []
        for part, count, blocks in self.output_blocks.runs():
            start = self.output_blocks.start(part)
            tiles.append(b.loop(count, partial(self._tile, panel, image, first, pixels, start, blocks), name="o"))
        return b.seq(b.alloc(panel), self._fill(panel, image, first, pixels), *tiles)

    def _pixel(self, position: Index) -> tuple[Index, Index]:
        width = self.parts.columns.out
        return position // width, position % width

    def _fill(self, panel: TirBuffer, image: Index, first: Index, pixels: int) -> Stmt:
        """panel[channel block, pixel, lane] = the input."""
        b, printer, lanes, x = self.builder, self.parts.printer, self.lanes, self.parts.kernel.x

        def of_block(block: Index, channels: int) -> Stmt:
            def put(base: Index, lane: Index, _: int) -> Stmt:
                place = base + lane

                def env(pixel: Index) -> Env:
                    return self.parts.x_env(image, block * lanes + place, *self._pixel(first + pixel))

                def at(pixel: Index, exprs: Sequence[Expr]) -> Stmt:
                    offset = (block * pixels + pixel) * lanes + place
                    return printer.evaluate(exprs, env(pixel), lambda values: b.store(panel, offset, values[0]))

                if self._guards_by_channel():
                    # Which part of a concatenation is read: a branch around the pixels, not one for each.
                    return printer.cases(
                        [x], env(as_index(0)), lambda exprs: b.loop(pixels, lambda pixel: at(pixel, exprs), name="p")
                    )
                return b.loop(
                    pixels, lambda pixel: printer.cases([x], env(pixel), lambda exprs: at(pixel, exprs)), name="p"
                )

            return vectors(b, printer, channels, lanes, put)

        whole, rest = divmod(self.channels, lanes)
        blocks = b.loop(whole, lambda block: of_block(block, lanes), name="cb") if whole else None
        return b.seq(blocks, of_block(as_index(whole), rest) if rest else None)

    def _guards_by_channel(self) -> bool:
        """Whether every guard of the input depends on the channel alone."""
        stack, seen, inside = [(self.parts.kernel.x, False)], set[tuple[int, bool]](), list[Index]()
        while stack:
            e, is_condition = stack.pop()
            if (id(e), is_condition) in seen:
                continue
            seen.add((id(e), is_condition))
            if isinstance(e, Call):
                guards = e.op == "guard"
                stack += [(a, is_condition or (guards and n == 0)) for n, a in enumerate(e.args)]
            elif is_condition and isinstance(e, FromIndex):
                inside.append(e.index)
            elif is_condition and isinstance(e, Load):
                return False
        channel = self.parts.kernel.x_vars[1]
        return all(leaf == channel for index in inside for leaf in index.leaves())

    def _tile(
        self, panel: TirBuffer, image: Index, first: Index, pixels: int, start: int, blocks: int, number: Index
    ) -> Stmt:
        """Register tile `number` of those with `blocks` blocks of output channels, the first from block `start` on, to its stores."""
        b, parts = self.builder, self.parts
        block = number * blocks + start
        tile = RegisterTile(b, parts.printer, pixels, blocks, self.block, parts.dtype)
        unroll = max(1, min(self.lanes, _UNROLLED_MULTIPLY_ADDS // (pixels * blocks)))

        def step(channel_block: Index, lane: Index) -> Stmt | None:
            def x(pixel: int, _: Index) -> TirExpr:
                return b.load(panel, (channel_block * pixels + pixel) * self.lanes + lane)

            def weight(vector: int, out: Index) -> TirExpr:
                return parts.weight(as_index(0), block + vector, as_index(0), channel, as_index(0), out)

            channel = channel_block * self.lanes + lane
            return tile.accumulate([partial(x, p) for p in range(pixels)], [partial(weight, v) for v in range(blocks)])

        def channels(channel_block: Index, count: int) -> Stmt:
            n = min(unroll, count)
            whole = b.loop(
                count // n,
                lambda i: b.seq(*[step(channel_block, i * n + u) for u in range(n)]),
                name="ic",
            )
            return b.seq(whole, *[step(channel_block, as_index(count - count % n + u)) for u in range(count % n)])

        whole, rest = divmod(self.channels, self.lanes)
        loop = b.loop(whole, lambda cb: channels(cb, self.lanes), name="cb") if whole else None
        reduce = b.seq(loop, channels(as_index(whole), rest) if rest else None)

        def place(vector: int, lane: Index, pixel: int | Index) -> tuple[Index, ...]:
            return image, (block + vector) * self.block + lane, *self._pixel(first + pixel)

        def written(real: int) -> Stmt:
            return parts.write_tile(tile, real, place)

        tail = parts.out_channels - (self.blocks - 1) * self.block
        if tail == self.block or (block.is_const and block.const + blocks < self.blocks):
            write = written(self.block)
        elif block.is_const:
            write = written(tail)
        else:
            write = b.when(b.index(block) + blocks < self.blocks, written(self.block), written(tail))
        return b.seq(tile.declare(), tile.clear(), reduce, write)
