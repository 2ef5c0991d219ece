"""Winograd convolution of 3x3 kernels with stride 1: F(2x2, 3x3) and F(4x4, 3x3).

Pattern: a `Winograd` weight of m outputs, transformed ahead (`winograd_transform`). Tiles of m x m outputs of all images are
numbered through; a task takes a run of them, a group of the convolution and some of its output channels:
1. Input transform: B^T d B of each tile and input channel into a buffer (position, channel block, tile, lane). Vector lanes are channels.
   Where a tile reaches outside the input, elements are zero.
2. For each part of the output channels and each of the (m + 2)^2 positions: a matrix product (tiles x input channels) @ (input channels x
   output channels) in register tiles. Weights stream in the order of their packing: while a panel of them is multiplied, the tiles ask for
   the next one, a share each. In a network larger than the caches they come from memory in every call.
3. Output transform A^T m A of each tile, then the epilogue.
An infinity or NaN among the inputs would spread over its tile: sums of what is subtracted in the transform are NaN. The corners of B^T d B are
made of all of d, so they tell of it. A task that has seen one transforms its tiles again with zeros in such places, and adds what these are
times the signs of their taps to the outputs that they reach.
A task has as many tiles as fit the second-level cache after step 1: what one step writes the next reads from there, and weights are read
once per task.
Sources: Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016; fused by tiles as in Jia et al., "Optimizing
N-dimensional, Winograd-based convolution for manycore CPUs", PPoPP 2018.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from torch_hybrid_backend.engines.cpu.operands.winograd_cost import winograd_tasks
from torch_hybrid_backend.engines.cpu.operands.winograd_transform import POINTS, even_polynomial, tile_size
from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import Axis
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import (
    LaneFn,
    RegisterTile,
    by_tall_height,
    lanes_of,
    partials,
)
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES
from torch_hybrid_backend.engines.cpu.tile_sizes import Split, max_rows, split_at_most
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.math import is_finite, is_nan, opaque
from torch_hybrid_backend.engines.cpu.weights import Winograd
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, known_at_most, known_int, known_less, size_hint

# The value at a position along one side of a tile, and where a transformed one goes.
Read = Callable[[int], TirExpr]
Write = Callable[[int, TirExpr], Stmt]


def winograd(parts: ConvParts) -> Stmt:
    """The kernel's body."""
    return _Winograd(parts).emit()


class _Winograd:
    """The emission of one kernel."""

    def __init__(self, parts: ConvParts) -> None:
        self.parts, self.builder, self.target = parts, parts.builder, parts.target
        weight = parts.kernel.weight
        assert isinstance(weight, Winograd)
        self.m, self.dtype, self.lanes = weight.outputs, parts.dtype, parts.block
        self.n = tile_size(self.m)
        all_parts, panels, self.channels, self.width = map(known_int, parts.packed.shape)
        self.positions = panels - 1  # the last one has the signs
        self.groups = parts.kernel.groups
        self.out_parts, self.out_channels = all_parts // self.groups, parts.out_channels // self.groups  # of a group
        self.vectors = self.width // self.lanes
        self.tile_rows, self.tile_columns = ceil_div(parts.rows.out, self.m), ceil_div(parts.columns.out, self.m)
        self.total = parts.images * (self.tile_rows * self.tile_columns)
        size = (parts.rows.out, parts.columns.out)
        tasks = winograd_tasks(parts.images, self.out_channels, self.channels, size, self.m, self.target, self.groups)
        self.tiles, self.runs, self.channel_groups = tasks.tiles, tasks.runs, tasks.channel_groups
        self.per_run = tasks.per_run
        by_element = self.target.isa.loads_apart and lanes_of(self.target, self.dtype) == self.lanes
        self.by_element, self.most_rows = by_element, max_rows(self.vectors, self.target, by_element=by_element)
        if isinstance(self.per_run, Size):
            self.tiles += self.most_rows - 1  # a register tile may begin with the last one
        self.channel_blocks = self.channels // self.lanes  # `winograd_cost` takes whole blocks only
        # One vector more than full: a power of two would put all positions of a tile into one set of the cache.
        self.v_stride = (self.channel_blocks * self.tiles + 1) * self.lanes
        self.m_stride = (self.tiles * self.vectors + 1) * self.lanes

    def emit(self) -> Stmt:
        b = self.builder
        per_task = -(-self.out_parts // self.channel_groups)

        def task(at: tuple[Index, ...]) -> Stmt:
            group, run, channel_group = at
            transformed = b.local(self.positions * self.v_stride, self.dtype, "v")
            products = b.local(self.positions * self.m_stride, self.dtype, "m")
            self.unusual = b.local(
                self.lanes, self.dtype, "unusual"
            )  # 0, or NaN where infinities or NaN have been seen

            def part(i: Index) -> Stmt:
                out_part = channel_group * per_task + i
                body = b.seq(
                    self._multiply(transformed, products, group, out_part),
                    self._output(products, run, group, out_part),
                )
                if out_part.high < self.out_parts:
                    return body
                return b.when(b.index(out_part) < self.out_parts, body)

            return b.seq(
                b.alloc(transformed),
                b.alloc(products),
                b.alloc(self.unusual),
                self._vector(lambda lane: b.store(self.unusual, lane, tir.const(0, self.dtype))),
                self._input(transformed, run, group),
                b.loop(self.lanes - 1, lambda i: self._seen(as_index(0), b.load(self.unusual, i + 1)), name="l"),
                b.when(self._has_unusual(), self._input(transformed, run, group, only_finite=True)),
                b.loop(per_task, part, name="o"),
            )

        return b.fused((self.groups, self.runs, self.channel_groups), task)

    def _each_tile(self, run: Index, body: Callable[[Index, Index, Index, Index], Stmt]) -> Stmt:
        """`body(tile of the run, image, tile row, tile column)` for the tiles of a run that exist."""
        b = self.builder

        def at(t: Index) -> Stmt:
            number = run * self.per_run + t
            bounded, bind = b.bound(b.index(number), self.total, "tile")
            row = bounded // self.tile_columns
            image = row // self.tile_rows if self.parts.images != 1 else as_index(0)
            statement = b.seq(bind, body(t, image, row % self.tile_rows, bounded % self.tile_columns))
            if isinstance(self.total, int) and self.runs * self.tiles == self.total:
                return statement
            return b.when(b.index(number) < b.size(self.total), statement)

        return b.loop(self.per_run, at, name="t")

    # Step 1.

    def _seen(self, lane: Index, value: TirExpr) -> Stmt:
        """Notes in a lane whether a value is infinite or NaN."""
        noted = self.builder.load(self.unusual, lane) + value * opaque(tir.const(0, self.dtype), self.dtype)
        return self.builder.store(self.unusual, lane, noted)

    def _has_unusual(self) -> TirExpr:
        return is_nan(self.builder.load(self.unusual, 0), self.dtype)

    def _input(self, out: TirBuffer, run: Index, group: Index, only_finite: bool = False) -> Stmt:
        """The transform of a run of tiles; `only_finite`: of the finite elements alone, with zeros for the others."""
        b = self.builder

        def tile(t: Index, image: Index, tile_row: Index, tile_column: Index) -> Stmt:
            def blocks(is_masked: bool) -> Stmt:
                def block(number: Index) -> Stmt:
                    def read(column: TirBuffer, j: Index) -> Stmt:
                        source = group * self.channel_blocks + number
                        return self._read(column, image, source, tile_row, tile_column, j, is_masked, only_finite)

                    start = (number * self.tiles + t) * self.lanes
                    transformed = self._transform_block(out, start, read)
                    return transformed if only_finite else b.seq(transformed, self._corners(out, start))

                return b.loop(self.channel_blocks, block, name="cb")

            inside = [
                test
                for first, axis in ((tile_row, self.parts.rows), (tile_column, self.parts.columns))
                for i in (0, self.n - 1)
                for test in _tests(self.parts, self._source(axis, first, as_index(i)), axis.size)
            ]
            if not inside or only_finite:
                return blocks(is_masked=bool(inside))
            return b.when(functools.reduce(tir.logical_and, inside), blocks(is_masked=False), blocks(is_masked=True))

        return self._each_tile(run, tile)

    def _source(self, axis: Axis[Dim], first: Index, i: Index) -> Index:
        """The input position of element `i` of tile `first`; may lie outside."""
        return first * self.m + i - axis.padding

    def _read(
        self,
        column: TirBuffer,
        image: Index,
        block: Index,
        tile_row: Index,
        tile_column: Index,
        j: Index,
        is_masked: bool,
        only_finite: bool,
    ) -> Stmt:
        """column = column `j` of the input tile of one block of channels; masked: zero outside the input; finite: zero for what is not."""
        b, parts = self.builder, self.parts
        binds: list[Stmt] = []

        def position(axis: Axis[Dim], first: Index, i: Index) -> tuple[Index, list[TirExpr]]:
            """The position, moved inside the input, and the tests that it was there."""
            source = self._source(axis, first, i)
            if not is_masked:
                # What `low` and `high` say of all tiles is not so of this one: it lies inside.
                return source, []
            tests = _tests(parts, source, axis.size)
            if tests:
                inside = tir.maximum(tir.minimum(b.index(source), b.size(axis.size - 1)), b.size(0))
                source, bind = b.bound(inside, axis.size, "at")
                binds.append(bind)
            return source, tests

        x, x_tests = position(parts.columns, tile_column, j)
        rows = [position(parts.rows, tile_row, as_index(i)) for i in range(self.n)]

        def load(i: int, lane: Index) -> Stmt:
            row, tests = rows[i]

            def put(values: list[TirExpr]) -> Stmt:
                value = values[0]
                conditions = [*tests, *x_tests, *([is_finite(value, self.dtype)] if only_finite else [])]
                if conditions:
                    value = tir.select(functools.reduce(tir.logical_and, conditions), value, tir.const(0, self.dtype))
                return b.store(column, lane + i * self.lanes, value)

            env = parts.x_env(image, block * self.lanes + lane, row, x)
            return parts.printer.evaluate([parts.kernel.x], env, put)

        loads = self._vector(lambda lane: b.seq(*[load(i, lane) for i in range(self.n)]))
        return b.seq(*binds, loads)

    def _corners(self, out: TirBuffer, start: Index) -> Stmt:
        """Notes what was unusual in a block that has been transformed."""
        b, ends = self.builder, (0, self.n - 1)
        places = [start + (i * self.n + j) * self.v_stride for i in ends for j in ends]

        def note(lane: Index) -> Stmt:
            first, *others = (b.load(out, place + lane) for place in places)
            return self._seen(lane, functools.reduce(operator.add, others, first))

        return self._vector(note)

    def _transform_block(self, out: TirBuffer, start: Index, read: Callable[[TirBuffer, Index], Stmt]) -> Stmt:
        """B^T d B of one tile and one block of channels, to `out` from `start` on; `read` fills a buffer with a column of d.

        Rows and columns are loops: unrolled, the tile of F(4x4) would not fit the registers either, and compile for a second.
        """
        b, n, lanes = self.builder, self.n, self.lanes
        half = b.local(n * n * lanes, self.dtype, "half")
        column = b.local(n * lanes, self.dtype, "d")

        def first(j: Index) -> Stmt:
            transformed = self._vector(
                lambda lane: self._input_1d(
                    lambda i: b.load(column, lane + i * lanes),
                    lambda i, value: b.store(half, lane + (j + i * n) * lanes, value),
                )
            )
            return b.seq(b.alloc(column), read(column, j), transformed)

        def second(i: Index) -> Stmt:
            return self._vector(
                lambda lane: self._input_1d(
                    lambda j: b.load(half, lane + (i * n + j) * lanes),
                    lambda j, value: b.store(out, start + lane + (i * n + j) * self.v_stride, value),
                )
            )

        return b.seq(b.alloc(half), b.loop(n, first, name="j"), b.loop(n, second, name="i"))

    def _input_1d(self, x: Read, put: Write) -> Stmt:
        """B^T of one column: the polynomial without the factor of each point."""
        points, last = POINTS[self.m], self.n - 1
        c = even_polynomial([p * p for p in points])
        statements = [put(0, self._sum([(c[k], x(2 * k)) for k in range(len(c))]))]
        for number, p in enumerate(points):
            c = even_polynomial([q * q for q in points if q != p])
            even = self._sum([(c[k], x(2 * k + 2)) for k in range(len(c))])
            odd = self._sum([(p * c[k], x(2 * k + 1)) for k in range(len(c))])
            statements += [put(2 * number + 1, even + odd), put(2 * number + 2, even - odd)]
        c = even_polynomial([p * p for p in points])
        statements.append(put(last, self._sum([(c[k], x(2 * k + 1)) for k in range(len(c))])))
        return self.builder.seq(*statements)

    # Step 2.

    def _multiply(self, transformed: TirBuffer, products: TirBuffer, group: Index, out_part: Index) -> Stmt:
        b, parts = self.builder, self.parts
        part = group * self.out_parts + out_part

        def position(p: Index, split: Split) -> Stmt:
            def rows(number: Index, first: Index, count: int) -> Stmt:
                tile = RegisterTile(
                    b, parts.printer, count, self.vectors, self.lanes, self.dtype, by_element=self.by_element
                )

                def scalar(block: Index, channel: Index, row: int) -> TirExpr:
                    start = p * self.v_stride + block * (self.tiles * self.lanes) + first * self.lanes
                    return b.load(transformed, start + channel + row * self.lanes)

                def multiplied(block: Index, channel: Index, scalars: Sequence[LaneFn]) -> Stmt | None:
                    def vector(v: int, lane: Index) -> TirExpr:
                        return parts.weight(part, p, block * self.lanes + channel, lane + v * self.lanes)

                    return tile.accumulate(scalars, partials(vector, self.vectors))

                def step(block: Index, channel: Index) -> Stmt | None:
                    return multiplied(block, channel, partials(lambda row, _: scalar(block, channel, row), count))

                def several(block: Index, channel: Index) -> Stmt:
                    values = partials(lambda row, lane: scalar(block, channel + lane, row), count)
                    return tile.in_vectors(values, lambda s, scalars: multiplied(block, channel + s, scalars))

                def steps(block: Index) -> Stmt:
                    # Behind the last position is the first one of the next part.
                    panel = part * (self.positions + 1) + (p + 1) + (p + 1) // self.positions
                    begin, ahead = self._prefetching(tile, panel, block, number, split.parts)
                    products = tile.steps(
                        self.lanes, lambda channel, _: step(block, channel), ahead, partial(several, block)
                    )
                    return b.seq(begin, products)

                return b.seq(
                    tile.declare(),
                    tile.clear(),
                    b.loop(self.channel_blocks, steps, name="cb"),
                    tile.spill(products, p * self.m_stride + first * self.width, self.width),
                )

            def run(tile: int, count: Dim, size: int) -> Stmt:
                return b.loop(count, lambda i: rows(i + tile, i * size + split.start(tile), size), name="r")

            if isinstance(self.per_run, Size):
                return run(0, ceil_div(self.per_run, split.size), split.size)
            return b.seq(*[run(*each) for each in split.runs()])

        def positions(split: Split) -> Stmt:
            return b.loop(self.positions, lambda p: position(p, split), name="p")

        if isinstance(self.per_run, Size):
            parts_of = -(-size_hint(self.per_run) // self.most_rows)
            return by_tall_height(
                b, self.per_run, self.most_rows, lambda height: positions(Split(parts_of, height, parts_of))
            )
        return positions(split_at_most(self.tiles, self.most_rows))

    def _prefetching(
        self, tile: RegisterTile, panel: Index, block: Index, number: Index, tiles: int
    ) -> tuple[Stmt, Callable[[Index], Stmt]]:
        """A statement before the steps of a block of channels, and what goes before each unrolled one: the share of tile `number` of `tiles`
        in the next panel of weights, which comes from memory while this one is multiplied."""
        b, unroll = self.builder, tile.unrolled(self.lanes)
        array = self.parts.printer.arguments[self.parts.packed][0]
        line = LINE_BYTES // 4
        share = -(-unroll * self.width // (line * tiles))
        each, per_block = self.channels // unroll * (share * line), self.lanes // unroll * (share * line)
        start = b.variable("next", "int32")
        first = panel * (self.channels * self.width) + number * each + block * per_block
        begin = b.bind(start, b.index(first))

        def ahead(k: Index) -> Stmt:
            return b.seq(*[b.prefetch(array, start + b.index(k * (share * line) + i * line)) for i in range(share)])

        return begin, ahead

    # Step 3.

    def _output(self, products: TirBuffer, run: Index, group: Index, out_part: Index) -> Stmt:
        """A^T m A of each tile and the epilogue."""
        b, parts, m, lanes = self.builder, self.parts, self.m, self.lanes
        result = b.local(m * m * self.width, self.dtype, "y")
        half = b.local(m * self.n * lanes, self.dtype, "half")
        tail = self.out_channels - (self.out_parts - 1) * self.width
        tail_widths = [min(lanes, tail - v * lanes) for v in range(self.vectors) if tail > v * lanes]

        def transform(t: Index, v: int) -> Stmt:
            def first(j: Index) -> Stmt:
                start = t * self.width + j * self.m_stride + v * lanes
                return self._vector(
                    lambda lane: self._output_1d(
                        lambda i: b.load(products, start + lane + i * (self.n * self.m_stride)),
                        lambda i, value: b.store(half, lane + (j + i * self.n) * lanes, value),
                    )
                )

            def second(i: Index) -> Stmt:
                return self._vector(
                    lambda lane: self._output_1d(
                        lambda j: b.load(half, lane + (i * self.n + j) * lanes),
                        lambda j, value: b.store(result, lane + ((i * m + j) * self.vectors + v) * lanes, value),
                    )
                )

            return b.seq(b.loop(self.n, first, name="j"), b.loop(m, second, name="i"))

        def tile(t: Index, image: Index, tile_row: Index, tile_column: Index) -> Stmt:
            def write(widths: Sequence[int]) -> Stmt:
                def pixel(i: Index, j: Index) -> Stmt:
                    row, column = tile_row * m + i, tile_column * m + j

                    def place(vector: int, lane: Index) -> tuple[Index, ...]:
                        channel = group * self.out_channels + out_part * self.width + vector * lanes
                        return image, channel + lane, row, column

                    body = parts.write_vectors(result, (i * m + j) * self.width, lanes, widths, place)
                    tests = [*_tests(parts, row, parts.rows.out), *_tests(parts, column, parts.columns.out)]
                    return b.when(functools.reduce(tir.logical_and, tests), body) if tests else body

                return b.loop(m, lambda i: b.loop(m, lambda j: pixel(i, j), name="j"), name="i")

            body = write([lanes] * self.vectors)
            if tail != self.width:
                body = (
                    b.when(b.index(out_part) < self.out_parts - 1, body, write(tail_widths))
                    if self.out_parts > 1
                    else write(tail_widths)
                )
            reached = self._unusual_products(
                result, group * self.out_parts + out_part, group, image, tile_row, tile_column
            )
            return b.seq(*[transform(t, v) for v in range(self.vectors)], b.when(self._has_unusual(), reached), body)

        return b.seq(b.alloc(result), b.alloc(half), self._each_tile(run, tile))

    def _unusual_products(
        self, result: TirBuffer, part: Index, group: Index, image: Index, tile_row: Index, tile_column: Index
    ) -> Stmt:
        """Adds the products of a tile's infinite and NaN elements to the outputs that they reach."""
        b, parts, m = self.builder, self.parts, self.m

        def element(place: tuple[Index, ...]) -> Stmt:
            i, j, block, lane = place
            row, column = self._source(parts.rows, tile_row, i), self._source(parts.columns, tile_column, j)
            channel = block * self.lanes + lane

            def product(of: tuple[Index, ...], value: TirExpr) -> Stmt:
                r, c, output = of
                to = (r * m + c) * self.width + output
                tap = b.index((i - r) * 3 + (j - c))
                signs = tir.cast(parts.weight(part, as_index(self.positions), channel, output), "int32")
                sign = ((signs >> (tap * 2)) & tir.const(3, "int32")) - 1
                added = b.store(result, to, b.load(result, to) + value * tir.cast(sign, self.dtype))
                reaches = [t for offset in (i - r, j - c) for t in (b.index(offset) >= 0, b.index(offset) < 3)]
                return b.when(functools.reduce(tir.logical_and, reaches), added)

            def products(values: list[TirExpr]) -> Stmt:
                (value,) = values
                outputs = b.nest((m, m, self.width), lambda of: product(of, value), name="r")
                return b.when(tir.logical_not(is_finite(value, self.dtype)), outputs)

            env = parts.x_env(image, group * (self.channel_blocks * self.lanes) + channel, row, column)
            body = parts.printer.evaluate([parts.kernel.x], env, products)
            tests = [*_tests(parts, row, parts.rows.size), *_tests(parts, column, parts.columns.size)]
            return b.when(functools.reduce(tir.logical_and, tests), body) if tests else body

        return b.nest((self.n, self.n, self.channel_blocks, self.lanes), element, name="u")

    def _output_1d(self, x: Read, put: Write) -> Stmt:
        """A^T of one column: powers of the points."""
        points = POINTS[self.m]
        both = [(p, x(2 * k + 1) + x(2 * k + 2), x(2 * k + 1) - x(2 * k + 2)) for k, p in enumerate(points)]
        statements = []
        for power in range(self.m):
            terms = [(p**power, odd if power % 2 else even) for p, even, odd in both]
            if power == 0:
                terms.append((Fraction(1), x(0)))
            if power == self.m - 1:
                terms.append((Fraction(1), x(self.n - 1)))
            statements.append(put(power, self._sum(terms)))
        return self.builder.seq(*statements)

    def _sum(self, terms: Sequence[tuple[Fraction, TirExpr]]) -> TirExpr:
        """The sum of coefficients times values; coefficients of one need no product."""
        total: TirExpr = None
        for coefficient, value in sorted(terms, key=lambda term: abs(term[0]) != 1):
            if total is None:
                total = value if coefficient == 1 else value * tir.const(float(coefficient), self.dtype)
            elif abs(coefficient) == 1:
                total = total + value if coefficient == 1 else total - value
            else:
                total = total + value * tir.const(float(coefficient), self.dtype)
        return total

    def _vector(self, body: Callable[[Index], Stmt]) -> Stmt:
        return self.parts.printer.vector_loop(self.lanes, body)


def _tests(parts: ConvParts, position: Index, size: Dim) -> list[TirExpr]:
    """The tests that tell whether 0 <= position < size."""
    b, tests = parts.builder, []
    if not known_at_most(0, position.low):
        tests.append(b.index(position) >= 0)
    if not known_less(position.high, size):
        tests.append(b.index(position) < b.size(size))
    return tests
