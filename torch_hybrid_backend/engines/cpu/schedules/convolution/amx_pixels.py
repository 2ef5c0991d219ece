"""Convolution by AMX, by tiles of pixels: every pixel is copied to tiles once, and they are multiplied by the weight's matrix.

It is a product of `schedules/amx` with k of all kernel positions times the channels, and with an A of its own:
1. A task has a block of the result's lines of one image, and copies the lines of the image that they read, padding included, to scratch
   memory: 64 bytes of channels of a pixel, behind them those of the next pixel of the line, behind it the next line, then the next channels.
2. There, rows of A are pixels of the result as if its lines were as wide as those of the image with padding: row q of a kernel position reads
   pixel q + the position's offset, so tiles of any position are 16 neighbouring pixels, and the matrix of k columns never lies in memory. The
   few rows between the lines of the result are computed and not stored. k runs through the positions of one step of channels before the
   next: these read the same pixels, which the first-level cache holds, and leave it room for their part of a panel of B.
3. Where pixels of the result are several pixels of the image apart (stride), the image is copied as one image for each remainder: a position
   reads one of these, without gaps. Those that no position reads are not copied.
4. With a kernel of one pixel, lines of all images follow one another: a panel of rows may have pixels of two. With others, a task may have
   several whole images, one after the other: a panel of B is read for all of them.
5. Groups are convolutions of their own: a task has pixels of one, and copies its channels only.
Sources: Chellapilla, Puri & Simard, "High Performance Convolutional Neural Networks for Document Processing", 2006 (the matrix); Zhang,
Franchetti & Low, "High Performance Zero-Memory Overhead Direct Convolutions", ICML 2018 (why not to make it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS, PANEL
from torch_hybrid_backend.engines.cpu.schedules.amx.blocks import LANES, PART_STEPS, Part, Products
from torch_hybrid_backend.engines.cpu.schedules.amx.product import TileProduct
from torch_hybrid_backend.engines.cpu.schedules.amx.rows import Piece
from torch_hybrid_backend.engines.cpu.schedules.bf16_split import FloatParts
from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import Axis
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.storage import storage_dtype
from torch_hybrid_backend.engines.cpu.weights import AmxTiles
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.sizes.size import known_int, size_hint


@dataclass(frozen=True, slots=True)
class _Axis(Axis[int]):
    """A spatial dimension whose pixels are copied to tiles."""

    @property
    def remainders(self) -> list[int]:
        """Remainders of the kernel's positions by the stride: the images of every `stride`-th pixel that are read."""
        return sorted({tap * self.dilation % self.stride for tap in range(self.kernel)})

    @property
    def images(self) -> int:
        """The number of such images that have a place."""
        return self.remainders[-1] + 1

    @property
    def reach(self) -> int:
        """The largest distance between the first and the last position, in pixels of such an image."""
        return max(tap * self.dilation // self.stride for tap in range(self.kernel))

    def pixel(self, position: Index | int, remainder: Index | int) -> Index:
        """The pixel of the image that is at a position of the image of a remainder; may lie outside."""
        return as_index(position) * self.stride + remainder - self.padding

    def pixels(self, remainder: int, count: int) -> tuple[int, int]:
        """The first of `count` positions of the image of a remainder that is a pixel, and the first behind that is none."""
        first = max(0, -(-(self.padding - remainder) // self.stride))
        behind = (self.size - 1 + self.padding - remainder) // self.stride + 1
        return min(first, count), max(min(first, count), min(behind, count))


class TileConvolution(TileProduct):
    """The emission of one kernel. Rows of a task are counted from its first line of the result on."""

    def __init__(self, kernel: CpuConvKernel[AmxTiles], builder: Builder, printer: Printer, target: Target) -> None:
        images, (outputs, *out) = kernel.domain[0].extent, (known_int(v.extent) for v in kernel.domain[1:])
        self.conv = kernel
        geometry = zip(
            (known_int(variable.extent) for variable in kernel.x_vars[2:]),
            out,
            kernel.kernel,
            kernel.stride,
            kernel.padding,
            kernel.dilation,
            strict=True,
        )
        axes = [_Axis(*numbers) for numbers in geometry]
        self.y, self.x = axes if len(axes) == 2 else (_Axis(1, 1, 1, 1, 0, 1), axes[0])
        self.images, self.groups = images, kernel.groups
        one_pixel = kernel.kernel == (1,) * len(axes) and not any(kernel.padding)
        # Lines of the result, of one image or of all; a line's rows of A.
        merged = images if isinstance(images, int) and self._merges_images() and one_pixel else None
        self.is_one_image, self.lines = merged is not None, self.y.out * (merged or 1)
        # Of a group.
        self.form, self.channels = (
            FORMATS[kernel.weight.tile_format],
            known_int(kernel.x_vars[1].extent) // kernel.groups,
        )
        self.width = self._rows_in_line()
        self.channel_steps, self.taps = self.form.steps(self.channels), math.prod(kernel.kernel)
        k = self.form.conv_depth(self.channels, kernel.kernel)
        batch = images * kernel.groups if merged is None else kernel.groups
        sizes = (batch, self.lines * self.width, k, outputs // kernel.groups)
        super().__init__(Products(kernel, self.form, kernel.x, sizes), builder, printer, target)
        # Whether a line of the image has numbers that cannot be split.
        self.flags = builder.local(self.y.images * self.image_lines * self.task_images, "int32", "flags")

    # Sizes.

    def _b_batches(self) -> int:
        return self.groups

    def _first_column(self, batch: Index) -> Index:
        return self._b_of(batch) * self.n

    def _first_channel(self, batch: Index) -> Index:
        """The first channel of the group that a task multiplies."""
        return self._b_of(batch) * self.channels

    def _merges_images(self) -> bool:
        """True if images of a kernel of one pixel are one."""
        return True

    def _rows_in_line(self) -> int:
        return self.x.out + self.x.reach

    def _a_passes(self) -> bool:
        # Positions of a larger kernel read the same pixels. Of float32 too much of B goes by to stay: the hint made 1x1 layers a tenth slower.
        return self._reads_pixels_once() and super()._a_passes()

    def _reads_pixels_once(self) -> bool:
        """True if the products are those of a matmul of narrow numbers: each panel of columns reads a pixel once."""
        return self.taps == 1 and not self.form.splits

    def _part_lengths(self) -> list[int]:
        if self._reads_pixels_once():
            return super()._part_lengths()
        # Of all positions one or two steps of channels, so that a panel of B stays in the first-level cache; or everything, where it does so
        # anyway, or leaves the second room for A. A's tiles are there for all of k. Six products for each load of float32 hide that cache.
        step_bytes = self.panel_size * self.form.itemsize
        most, is_near = self.target.l2_bytes // 4 // step_bytes, self.steps * step_bytes <= self.target.l1_bytes
        counts = {self.channel_steps} if self.form.splits or is_near else {1, 2, self.channel_steps}
        lengths = sorted({min(self.steps, self.taps * count) for count in counts}, reverse=True)
        return [length for length in lengths if length <= most] or [-(-self.steps // -(-self.steps // PART_STEPS))]

    def _image_counts(self) -> list[int]:
        """Numbers of whole images that a task may have."""
        if self.is_one_image or not isinstance(self.images, int):
            return [1]
        return [n for n in range(1, self.images + 1) if self.images % n == 0]

    @property
    def image_lines(self) -> int:
        """Lines that a task copies of an image of a remainder."""
        return self.block_lines + self.y.reach

    @property
    def image_panels(self) -> int:
        """Panels of rows of a task that are of one image."""
        return self.rows_in_panels(self.block_lines) // PANEL

    def _rows_in(self, lines: int) -> int:
        """Rows of A of so many lines: to the last pixel of the result."""
        return lines * self.width - (self.width - self.x.out)

    def _plane(self, lines: int, images: int) -> int:
        """Pixels of a plane in scratch memory: of lines of some images, and those that the last tile of the last position reads behind them."""
        reach = self.y.reach * self.width + self.x.reach
        image = (lines + self.y.reach) * self.width
        return (images - 1) * image + max(image, self.rows_in_panels(lines) + reach)

    def rows_in_panels(self, lines: int) -> int:
        """`_rows_in`, with the rows that fill the last panel."""
        return -(-self._rows_in(lines) // PANEL) * PANEL

    def _elements(self, lines: int, images: int) -> int:
        """Elements of scratch memory for so many lines of so many images, of all parts of the numbers."""
        pixels = self._plane(lines, images) * self.y.images * self.x.images * self.channel_steps
        return pixels * self.form.parts * self.form.depth

    def _scratch_size(self) -> int:
        return self._elements(self.block_lines, self.task_images)

    def _tiling(self) -> tuple[int, int, int]:
        form = self.form
        # Beside A's tiles there are panels of B, and what is read and written. Float32 takes half: its parts are three times as large, and
        # with few rows in a task B, three times as large too, comes from the last-level cache too often. Narrower numbers lose with half.
        room = self.target.l2_bytes // (2 if form.splits else 4)
        counts = {(-(-self.lines // count), 1) for count in range(1, self.lines + 1)}
        counts |= {(self.lines, images) for images in self._image_counts()}
        fitting = {of for of in counts if self._elements(*of) * form.itemsize <= room} or {(1, 1)}

        def time(steps: int, lines: int, images: int, group: int) -> float:
            tasks = size_hint(self.batch) // images * -(-self.lines // lines) * -(-self.column_panels // group)
            copied = self._elements(lines, images) / form.parts * form.copy_cycles
            panels = images * self.rows_in_panels(lines) // PANEL
            return -(-tasks // self.target.cores) * (copied + self._product_cycles(steps, panels, group))

        estimates = {
            (steps, *of, group): time(steps, *of, group)
            for steps in self._part_lengths()
            for of in sorted(fitting, reverse=True)
            for group in self._groups()
        }
        steps, self.block_lines, self.task_images, group = self.builder.ranked_choice(estimates)
        self.batch = self.batch // self.task_images
        return steps, self.task_images * self.image_panels, group

    def row_blocks(self) -> tuple[int, int]:
        return -(-self.lines // self.block_lines), self.block_lines

    # Rows.

    def _lines_of(self, first: Index) -> TirExpr:
        """The number of lines of a task."""
        return tir.minimum(self.builder.index(self.lines - first), tir.const(self.block_lines, "int32"))

    def _rows_of_task(self, first: Index) -> TirExpr:
        if self.lines % self.block_lines == 0:
            return tir.const(self._rows_in(self.block_lines), "int32")
        return self._lines_of(first) * self.width - (self.width - self.x.out)

    def panels_in(self, first: Index) -> TirExpr | None:
        if self.lines % self.block_lines == 0:
            return None
        return tir.truncdiv(self._rows_of_task(first) + (PANEL - 1), tir.const(PANEL, "int32"))

    def rows_of(self, row: Index, r: Index) -> TirExpr | None:
        left = self._rows_of_task(row) - self.builder.index(r % self.image_panels * PANEL)
        return tir.minimum(left, tir.const(PANEL, "int32"))

    def has_half_panels(self) -> bool:
        last = self.lines % self.block_lines
        counts = [self._rows_in(lines) % PANEL for lines in (self.block_lines, last) if lines]
        return any(0 < count <= PANEL // 2 for count in counts)

    def each_line(
        self, batch: Index, row: Index, r: Index, body: Callable[[Index, dict[LoopVar, Index]], Stmt]
    ) -> Stmt:
        b = self.builder
        # The place of a row is counted, not divided out anew: with few channels that would be half of a row's work.
        extents = [self.width, self.y.out, self.images]
        image, panel = batch // self.groups * self.task_images + r // self.image_panels, r % self.image_panels
        first = [panel * PANEL % self.width, panel * PANEL // self.width + row]
        first[1:] = [first[1] % self.y.out, first[1] // self.y.out] if self.is_one_image else [first[1], image]
        counters = b.local(len(extents), "int32", "place")

        def count(number: int) -> Stmt:
            """Count one more in a place; a place that is full begins again, and the next has one more."""
            more = b.store(counters, number, b.load(counters, number) + 1)
            if number == len(extents) - 1 or (number == 1 and not self.is_one_image):
                return more
            is_full = tir.equal(b.load(counters, number), b.size(extents[number]))
            again = b.store(counters, number, tir.const(0, "int32"))
            return b.seq(more, b.when(is_full, b.seq(again, count(number + 1))))

        def line(at: Index) -> Stmt:
            bound = [b.bound(b.load(counters, n), extent, "at") for n, extent in enumerate(extents)]
            (column, _), (y, _), (image, _) = bound
            places = (image, *(y, column)[-len(self.conv.kernel) :])
            env = dict(zip((self.conv.domain[0], *self.conv.domain[2:]), places, strict=True))
            stores = body(at, {**env, self.conv.x_vars[1]: self._first_channel(batch)})
            if self.width > self.x.out:
                stores = b.when(b.index(column) < self.x.out, stores)
            return b.seq(*[binding for _, binding in bound], stores, count(0))

        begin = [b.store(counters, n, b.index(place)) for n, place in enumerate(first)]
        return b.seq(b.alloc(counters), *begin, self._each(PANEL, self.rows_of(row, r), line, "line"))

    def piece(self, env: dict[LoopVar, Index], unit: Index, within: int) -> Piece:
        conv, b = self.conv, self.builder
        units = self.form.depth // LANES  # of a step
        step = unit // units
        position, block = step % self.taps, step // self.taps * units + unit % units
        own = {conv.x_vars[0]: env[conv.domain[0]]}
        inside: list[TirExpr] = []
        if self.channels < self.channel_steps * self.form.depth:
            inside.append(b.index(block) < self.channels // LANES)
        taps = (position // self.x.kernel, position % self.x.kernel)[-len(conv.kernel) :]
        axes = (self.y, self.x)[-len(conv.kernel) :]
        for variable, out, axis, tap in zip(conv.x_vars[2:], conv.domain[2:], axes, taps, strict=True):
            at = env[out] * axis.stride + tap * axis.dilation - axis.padding
            own[variable] = at
            if axis.padding > 0:
                inside.append(b.index(at) >= 0)
            if (axis.out - 1) * axis.stride + (axis.kernel - 1) * axis.dilation - axis.padding >= axis.size:
                inside.append(b.index(at) < axis.size)
        condition = None
        for test in inside:
            condition = test if condition is None else tir.logical_and(condition, test)
        first = env[conv.x_vars[1]]  # of the group
        return condition, lambda lane: {**own, conv.x_vars[1]: first + block * LANES + within + lane}

    # The image as tiles.

    def a_at(self, r: Index, part: Part, s: Index, number: int) -> Index:
        step, position = (part.start + s) // self.taps, (part.start + s) % self.taps
        y, x = position // self.x.kernel * self.y.dilation, position % self.x.kernel * self.x.dilation
        image, panel = r // self.image_panels, r % self.image_panels
        pixel = panel * PANEL + (image * self.image_lines + y // self.y.stride) * self.width + x // self.x.stride
        return self._place(step, number, y % self.y.stride, x % self.x.stride, pixel)

    def _place(self, step: Index, number: int, y: Index | int, x: Index | int, pixel: Index) -> Index:
        """The address of a pixel's channels of one step: a part of the numbers, in the image of remainders y and x."""
        image = ((step * self.form.parts + number) * self.y.images + y) * self.x.images + x
        return (image * self._plane(self.block_lines, self.task_images) + pixel) * self.form.depth

    def _copies(self, batch: Index, row: Index, part: Part) -> Stmt | None:
        return None

    def _before(self, batch: Index, row: Index) -> Stmt:
        """All lines of the image that the task's lines read, as tiles."""
        b, units = self.builder, self.form.depth // LANES

        def lines(first: Index | int, count: int) -> Stmt:
            """Vectors of 16 channels, `count` of them from number `first` on, of all lines."""
            vectors = as_index(first), count
            extents = self.task_images, self.image_lines
            return b.seq(
                *[b.nest(extents, partial(self._line, batch, row, y, vectors), name="line") for y in self.y.remainders]
            )

        # Step by step of k: in memory, the pixels of 16 channels lie together, and processors fetch ahead what is read in order.
        whole = self.channels // self.form.depth
        steps = b.loop(whole, lambda step: lines(step * units, units), name="step") if whole else None
        copied = b.seq(steps, lines(whole * units, units) if whole < self.channel_steps else None)
        if not self.form.splits:
            return copied
        count = self.y.images * self.image_lines * self.task_images
        none = b.loop(count, lambda at: b.store(self.flags, at, tir.const(0, "int32")), name="line")
        return b.seq(b.alloc(self.flags), none, copied, self._each_row(row, self._mark))

    def _line(self, batch: Index, row: Index, y: int, vectors: tuple[Index, int], place: tuple[Index, ...]) -> Stmt:
        """Write one line of the image of a remainder: its pixels, and the border where the image has none; of some vectors of channels.

        place: which of the task's images, and which of its lines.
        """
        b, conv, (slot, of_image) = self.builder, self.conv, place
        number, line = row + of_image, slot * self.image_lines + of_image
        image = batch // self.groups * self.task_images + slot
        image, position = (number // self.y.out, number % self.y.out) if self.is_one_image else (image, number)
        source = self.y.pixel(position, y)
        own: dict[LoopVar, Index] = {conv.x_vars[0]: image, conv.x_vars[1]: self._first_channel(batch)}
        if len(conv.kernel) == 2:
            own[conv.x_vars[2]] = source
        tests = []
        if self.is_one_image:
            if self.lines % self.block_lines:
                tests.append(b.index(number) < self.lines)
        else:
            tests += [b.index(source) >= 0] if self.y.padding > y else []
            tests.append(b.index(source) < self.y.size)
        condition = None
        for test in tests:
            condition = test if condition is None else tir.logical_and(condition, test)
        splitting = FloatParts(b, self.printer, self.form.parts, self.target) if self.form.splits else None
        there = self._pixels_of(own, line, y, vectors, splitting)
        missing = self._border(line, y, *vectors)
        if splitting is not None:
            flag = y * (self.image_lines * self.task_images) + line
            mark = b.store(self.flags, flag, tir.const(1, "int32"))
            there = b.seq(splitting.begin(), there, splitting.when_outside(mark))
        return there if condition is None else b.when(condition, there, missing)

    def _pixels_of(
        self,
        own: Mapping[LoopVar, Index],
        line: Index,
        y: int,
        vectors: tuple[Index, int],
        splitting: FloatParts | None,
    ) -> Stmt:
        b, conv, (first, count) = self.builder, self.conv, vectors
        # Of the vectors, how many are full of channels; the channels of the one behind them.
        whole, left = count, 0
        if not first.terms:
            whole, left = divmod(min(count * LANES, self.channels - known_int(first.const) * LANES), LANES)

        def vector(number: Index, line_x: int, at: Index, lanes: int) -> Stmt:
            env = {**own, conv.x_vars[-1]: self.x.pixel(at, line_x)} if lanes else None
            return self._vector(first + number, line, y, line_x, at, env, splitting, lanes or LANES)

        def pixel(x: int, start: int, at: Index) -> Stmt:
            pixel = partial(vector, line_x=x, at=at + start)
            parts = [b.loop(whole, partial(pixel, lanes=LANES), name="unit") if whole else None]
            parts.append(pixel(as_index(whole), lanes=left) if left else None)
            beyond = count - whole - (left > 0)
            behind = b.loop(beyond, lambda n: pixel(n + (count - beyond), lanes=0), name="unit") if beyond else None
            return b.seq(*parts, behind)

        def border(x: int, start: int, at: Index) -> Stmt:
            return b.loop(count, partial(vector, line_x=x, at=at + start, lanes=0), name="unit")

        statements = []
        for x in self.x.remainders:
            there, behind = self.x.pixels(x, self.width)
            pieces = ((border, 0, there), (pixel, there, behind), (border, behind, self.width))
            statements += [
                b.loop(end - start, partial(body, x, start), name="x") for body, start, end in pieces if end > start
            ]
        return b.seq(*statements)

    def _border(self, line: Index, y: int, first: Index, count: int) -> Stmt:
        """Write the border of the image in `count` vectors of channels from number `first` on, of a whole line."""
        b = self.builder

        def vectors(position: tuple[Index, ...]) -> Stmt:
            unit, at = position
            return b.seq(*[self._vector(first + unit, line, y, x, at, None, None) for x in self.x.remainders])

        return b.nest((count, self.width), vectors, name="x")

    def _vector(
        self,
        unit: Index,
        line: Index,
        y: int,
        x: int,
        at: Index,
        env: Mapping[LoopVar, Index] | None,
        splitting: FloatParts | None,
        lanes: int = LANES,
    ) -> Stmt:
        """Sixteen channels of one pixel: of the image at `env`, whose channel is the group's first, only `lanes` of them, else the border.

        Channels behind those of the group may be anything finite: their weights are 0.
        """
        b, form = self.builder, self.form
        in_row = form.depth // LANES
        places = [
            self._place(unit // in_row, number, y, x, line * self.width + at) + unit % in_row * LANES
            for number in range(form.parts)
        ]

        border = tir.const(self.conv.border, storage_dtype(form.a_dtype))

        def missing(lane: Index) -> Stmt:
            return b.seq(*[b.store(self.scratch, place + lane, border) for place in places])

        if env is None:
            return b.seq(self._chunks(0, LANES, missing))

        def here(lane: Index) -> Mapping[LoopVar, Index]:
            channel = self.conv.x_vars[1]
            return {**env, channel: env[channel] + unit * LANES + lane}

        if splitting is not None:  # channels are whole vectors
            return splitting.stored(
                LANES,
                lambda lane: self.printer.expr(self.a, here(lane)),
                lambda number: (self.scratch, places[number]),
            )

        def put(lane: Index) -> Stmt:
            return b.store(self.scratch, places[0] + lane, self.whole(here(lane)))

        return b.seq(self._chunks(0, lanes, put), self._chunks(lanes, LANES, missing))

    def _chunks(self, start: int, end: int, body: Callable[[Index], Stmt]) -> Stmt | None:
        """`body(lane)` for the lanes `start` .. `end` - 1 of a vector."""

        def chunk(first: int, width: int) -> Stmt:
            return self.printer.vector_loop(width, lambda lane: body(lane + first))

        # Of a group that does not begin with a vector, more channels may not lie together.
        most = math.gcd(LANES, self.channels) if self.groups > 1 else LANES
        chunks = [chunk(start + first, width) for first, width in lane_chunks(end - start, most)]
        return self.builder.seq(*chunks) if chunks else None

    def _mark(self, r: Index) -> Stmt:
        """Store whether a panel of rows reads a line that has numbers which cannot be split."""
        b, lines = self.builder, self.image_lines
        image, first = r // self.image_panels * lines, r % self.image_panels * PANEL // self.width
        count = (PANEL + self.width - 2) // self.width + 1 + self.y.reach

        def look(at: Index) -> Stmt:
            places = [y * (lines * self.task_images) + image + first + at for y in self.y.remainders]
            flags = [b.load(self.flags, place) for place in places]
            is_outside = flags[0]
            for flag in flags[1:]:
                is_outside = is_outside | flag
            seen = b.load(self.is_outside, r) | is_outside
            return b.when(b.index(first + at) < lines, b.store(self.is_outside, r, seen))

        return b.seq(b.store(self.is_outside, r, tir.const(0, "int32")), b.loop(count, look, name="line"))
