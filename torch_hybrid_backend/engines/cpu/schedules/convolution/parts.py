"""Parts that the convolution rules share: reading input and weight, writing output, all in two spatial dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial

from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import Axis, ColumnTiles, axes
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import (
    RegisterTile,
    count_operations,
    has_long_epilogue,
    tile_start,
)
from torch_hybrid_backend.engines.cpu.schedules.transposition import transposed
from torch_hybrid_backend.engines.cpu.schedules.vector_stores import stored_vector
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES, Target
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.dot import load_neighbours, load_word, load_words
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import Panels, Taps, Winograd
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Buffer, Load, compute_dtype, loads_of
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.loops.layout import Blocked
from torch_hybrid_backend.sizes.size import Dim, known_at_most, known_int, known_less

# Columns of the narrowest register tile that is turned before it is stored.
_FEWEST_TURNED = 4


def _is_looped(stores: Sequence[Store]) -> bool:
    """True if an epilogue is emitted once, as a loop over the spilled tile.

    Repeated for each register it was most of a kernel's code and of LLVM's time, and no faster, but for bfloat16: there a depthwise 3x3 with
    SiLU takes 1.2 to 1.4 times as long in a loop.
    """
    if any(store.buffer.dtype == "bfloat16" for store in stores):
        return has_long_epilogue(stores)
    return count_operations(stores) > 0


class ConvParts:
    """Reads and writes of one convolution kernel over (image, channel, row, column)."""

    def __init__(
        self, kernel: CpuConvKernel[Panels | Winograd | Taps], builder: Builder, printer: Printer, target: Target
    ) -> None:
        self.kernel, self.builder, self.printer, self.target = kernel, builder, printer, target
        weight = kernel.weight
        self.packed, self.block = weight.buffer, weight.width
        self.dot = weight.dot if isinstance(weight, Panels) else None
        self.starts = None if isinstance(weight, Winograd) else weight.start
        self.rows, self.columns = axes(kernel)
        self.images, self.out_channels = kernel.domain[0].extent, known_int(kernel.domain[1].extent)
        self.in_channels = known_int(kernel.x_vars[1].extent)
        self.dtype = compute_dtype(kernel.accumulator.dtype)
        self.loops_epilogue = _is_looped(kernel.stores)
        # Input channels of one step of a sum, and the bytes that one output channel's weight takes for it.
        self.together = 1 if self.dot is None else self.dot.group
        self.weight_bytes = self.together * tir.itemsize(self.packed.dtype)
        self.x_bytes = self.together * max((tir.itemsize(load.buffer.dtype) for load in loads_of(kernel.x)), default=4)

    def _spatial(self, variables: tuple[LoopVar, ...], row: Index, column: Index) -> dict[LoopVar, Index]:
        return dict(zip(variables[2:], (row, column)[4 - len(variables) :], strict=True))

    def x_env(self, image: Index, channel: Index, row: Index, column: Index) -> dict[LoopVar, Index]:
        """The kernel's input variables at a position inside the input; channels are counted by steps of a sum."""
        variables = self.kernel.x_vars
        return {variables[0]: image, variables[1]: channel * self.together, **self._spatial(variables, row, column)}

    def x(self, image: Index, channel: Index, row: Index, column: Index) -> TirExpr:
        """Read one input element; the position must lie inside the input."""
        return self.printer.expr(self.kernel.x, self.x_env(image, channel, row, column))

    def word(self, dot: DotProduct, image: Index, channel: Index, row: Index, column: Index) -> TirExpr:
        """A word of input channels, in every lane; the position must lie inside the input."""
        load = self.kernel.x
        assert isinstance(load, Load)
        array = self.printer.arguments[load.buffer][0]
        offset = self.printer.offset(load.buffer, load.index, self.x_env(image, channel, row, column))
        return load_word(array, self.builder.index(offset), dot, self.block)

    def words(self, dot: DotProduct, image: Index, channel: Index, row: Index, column: Index) -> TirExpr:
        """Neighbouring words, as many as a vector has lanes, from a word of input channels on."""
        load = self.kernel.x
        assert isinstance(load, Load)
        array = self.printer.arguments[load.buffer][0]
        offset = self.printer.offset(load.buffer, load.index, self.x_env(image, channel, row, column))
        return load_neighbours(array, self.builder.index(offset), dot, self.block)

    def weight_words(self, dot: DotProduct, *position: Index) -> TirExpr:
        """A block's words of the packed weight, of which `position` is the first lane's."""
        array = self.printer.arguments[self.packed][0]
        offset = self.printer.offset(self.packed, (*position, as_index(0)), {})
        return load_words(array, self.builder.index(offset), dot, self.block)

    def start(self, channel: Index) -> TirExpr:
        """The first value of the sums of an output channel; channels are counted as in the packed weight."""
        if self.starts is None:
            return tir.const(0, self.dtype)
        return self.printer.expr(Load(self.dtype, self.starts, (channel,)), {})

    def fetch(
        self,
        width: int,
        condition: TirExpr | None,
        then: Callable[[int], tuple[Index, ...]],
        otherwise: Callable[[int], tuple[Index, ...]],
    ) -> Stmt | None:
        """Asks for the cache lines of `width` neighbouring columns of a block of channels, the first of which is at `then(0)` or at
        `otherwise(0)`: (image, channel, row, column), which may lie outside the input. None where the input is not blocked.

        What is behind them lies far away, in the next row or block of channels: hardware has nothing to guess it by, and the first step
        there would wait for all of them.
        """
        load = self.kernel.x
        if not isinstance(load, Load):
            return None
        array, layout = self.printer.arguments[load.buffer]
        if not isinstance(layout, Blocked):
            return None

        def offset(place: tuple[Index, ...]) -> TirExpr:
            return self.builder.index(self.printer.offset(load.buffer, load.index, self.x_env(*place)))

        step = max(1, LINE_BYTES // (layout.block * tir.itemsize(load.buffer.dtype)))
        lines = range(0, width, step)
        choices = [
            offset(otherwise(i)) if condition is None else tir.select(condition, offset(then(i)), offset(otherwise(i)))
            for i in lines
        ]
        return self.builder.seq(*[self.builder.prefetch(array, choice, level=1) for choice in choices])

    def weight(self, *position: Index) -> TirExpr:
        """Read one element of the packed weight."""
        return self.printer.expr(Load(compute_dtype(self.packed.dtype), self.packed, position), {})

    def inside(
        self, axis: Axis[Dim], position: Index, body: Stmt, last: Index | None = None, other: Stmt | None = None
    ) -> Stmt:
        """`body` where input position `position` (to `last`, if given) exists, else `other`; no test where it always does."""
        b, tests, last = self.builder, [], position if last is None else last
        if not known_at_most(0, position.low):
            tests.append(b.index(position) >= 0)
        if not known_less(last.high, axis.size):
            tests.append(b.index(last) < b.size(axis.size))
        return b.when(functools.reduce(tir.logical_and, tests), body, other) if tests else body

    def each_tile(self, tiles: ColumnTiles, body: Callable[[Index], Stmt]) -> Stmt:
        """`body(first column)` for each of some tiles."""
        b, out = self.builder, tiles.out

        def at(number: Index) -> Stmt:
            if out is None:
                return body(tiles.start(number))
            first, begin = tile_start(b, out, tiles.columns, number)
            return b.seq(begin, body(first))

        return b.loop(tiles.count, at, name="t")

    def env(self, image: Index, channel: Index, row: Index, column: Index) -> dict[LoopVar, Index]:
        """The kernel's variables at one output element."""
        domain = self.kernel.domain
        return {domain[0]: image, domain[1]: channel, **self._spatial(domain, row, column)}

    def hold(self, value: TirExpr) -> None:
        """From now on `value` is what the kernel's stores read as the accumulator."""
        self.printer.locals[self.kernel.accumulator] = lambda _: value

    def stores(self, value: TirExpr, image: Index, channel: Index, row: Index, column: Index) -> Stmt:
        """Every store of the kernel at one output element, with `value` as the accumulator."""
        self.hold(value)
        return self.printer.stores(self.kernel.stores, self.env(image, channel, row, column))

    def clear(self, buffer: TirBuffer, offset: Index) -> Stmt:
        """Write a block of zeros."""
        b = self.builder
        return self.printer.vector_loop(
            self.block, lambda lane: b.store(buffer, offset + lane, tir.const(0, self.dtype))
        )

    def begin(self, buffer: TirBuffer, offset: Index, block: Index) -> Stmt:
        """Begin the sums of an output block."""
        b = self.builder
        return self.printer.vector_loop(
            self.block, lambda lane: b.store(buffer, offset + lane, self.start(block * self.block + lane))
        )

    def write_vectors(
        self,
        buffer: TirBuffer,
        offset: Index,
        lanes: int,
        widths: Sequence[int],
        place: Callable[[int, Index], tuple[Index, ...]],
    ) -> Stmt:
        """The stores of neighbouring vectors of `lanes` in a buffer of sums; `widths` says how many lanes of each are real."""
        b = self.builder

        def load(start: int, lane: Index) -> TirExpr:
            return b.load(buffer, offset + lane + start)

        return b.seq(
            *[
                self._vector(partial(load, v * lanes + start), partial(place, v), start, count)
                for v, width in enumerate(widths)
                for start, count in lane_chunks(width, lanes)
            ]
        )

    def _vector(
        self, value: Callable[[Index], TirExpr], place: Callable[[Index], tuple[Index, ...]], start: int, lanes: int
    ) -> Stmt:
        return stored_vector(
            self.printer,
            self.target,
            self.kernel.stores,
            lanes,
            lambda lane: self.env(*place(lane + start)),
            lambda lane: self.hold(value(lane)),
        )

    def write_tile(
        self, tile: RegisterTile, channels: int, place: Callable[[int, Index, int | Index], tuple[Index, ...]]
    ) -> Stmt:
        """The stores of a register tile whose rows are output columns and whose vectors are blocks of channels.

        `channels`: real channels of the last vector. `place(vector, lane, tile row)` is the output position.
        """
        b, width = self.builder, tile.vectors * tile.lanes
        if tile.rows >= _FEWEST_TURNED and tile.lanes % 4 == 0 and self._lies_along_columns(place):
            return self._write_turned(tile, channels, place)

        def at(row: int | Index, vector: int, lane: Index) -> tuple[Index, ...]:
            return place(vector, lane, row)

        if not self.loops_epilogue and channels == tile.lanes:
            return b.seq(
                *[
                    self._vector(partial(tile.at, r, v), partial(at, r, v), 0, tile.lanes)
                    for v in range(tile.vectors)
                    for r in range(tile.rows)
                ]
            )
        spilled = b.local(tile.size, self.dtype, "tile")
        widths = [tile.lanes] * (tile.vectors - 1) + [channels]
        write = b.loop(
            tile.rows, lambda r: self.write_vectors(spilled, r * width, tile.lanes, widths, partial(at, r)), name="c"
        )
        return b.seq(b.alloc(spilled), tile.spill(spilled), write)

    def _lies_along_columns(self, place: Callable[[int, Index, int | Index], tuple[Index, ...]]) -> bool:
        """True if what is written has columns as neighbours in memory, as in a graph's row-major result, and nothing else that is read for it
        lies otherwise."""

        def steps(buffer: Buffer, index: tuple[Index, ...]) -> tuple[Index, Index]:
            """From a channel to the next, from a column to the next."""
            first, channel, column = (
                self.printer.offset(buffer, index, self.env(*place(0, as_index(lane), column)))
                for lane, column in ((0, 0), (1, 0), (0, 1))
            )
            return channel - first, column - first

        none, one = as_index(0), as_index(1)
        for store in self.kernel.stores:
            if store.buffer not in self.printer.arguments:
                return False
            by_channel, by_column = steps(store.buffer, store.index)
            if by_column != one or by_channel == one:
                return False
            for load in loads_of(store.value):
                is_argument = load.buffer in self.printer.arguments
                if is_argument and steps(load.buffer, load.index)[1] not in (none, one):
                    return False
        return True

    def _write_turned(
        self, tile: RegisterTile, channels: int, place: Callable[[int, Index, int | Index], tuple[Index, ...]]
    ) -> Stmt:
        """The same with columns as lanes: a channel's columns are stored together. One by one its pixels would be a channel's image apart,
        often a multiple of what the first-level cache has in a way: each store would drive out the line that the next needs."""
        b, lanes = self.builder, tile.lanes
        turned = b.local(lanes * lanes, self.dtype, "turned")

        def square(vector: int, first: int, count: int) -> Stmt:
            loads = [
                b.load_vector(tile.buffer, tile.offset(first + min(c, count - 1), vector), lanes) for c in range(lanes)
            ]
            rows = [b.variable("row", f"{self.dtype}x{lanes}") for _ in loads]
            binds = [b.bind(row, load) for row, load in zip(rows, loads, strict=True)]
            puts = [b.store_vector(turned, c * lanes, values, lanes) for c, values in enumerate(transposed(rows))]

            def write(channel: Index) -> Stmt:
                def columns(start: int, width: int) -> Stmt:
                    return self._vector(
                        lambda lane: b.load(turned, channel * lanes + (lane + start)),
                        lambda lane: place(vector, channel, lane + first),
                        start,
                        width,
                    )

                return b.seq(*[columns(*chunk) for chunk in lane_chunks(count, lanes)])

            real = channels if vector == tile.vectors - 1 else lanes
            return b.seq(*binds, *puts, b.loop(real, write, name="o"))

        squares = [
            square(vector, first, min(lanes, tile.rows - first))
            for vector in range(tile.vectors)
            for first in range(0, tile.rows, lanes)
        ]
        return b.seq(b.alloc(turned), *squares)
