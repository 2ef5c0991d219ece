"""Convolution by AMX, of few channels: the matrix of k columns is gathered in scratch memory (im2col).

Sources: as `amx_pixels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch_hybrid_backend.engines.cpu.operands.amx_formats import PANEL
from torch_hybrid_backend.engines.cpu.schedules.amx.blocks import Part
from torch_hybrid_backend.engines.cpu.schedules.convolution.amx_pixels import TileConvolution
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.storage import storage_dtype
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Call, Load
from torch_hybrid_backend.loops.layout import Blocked


class GatheredConvolution(TileConvolution):
    """The emission of a kernel for an image of few channels (`TileFormat.gathers`): the matrix of k columns lies in scratch memory (im2col).

    Behind it, in the order of the image and with the padding, lie the pixels that a task reads, `pixel` elements each. A row of the matrix is
    copied from there in vectors, a line of the kernel after the other: what a vector holds behind its line, the next one overwrites.
    """

    def _merges_images(self) -> bool:
        return False

    def _image_counts(self) -> list[int]:
        return [1]

    def _rows_in_line(self) -> int:
        return self.x.out

    def _row_elements(self) -> int:
        return self.steps * self.form.depth

    @property
    def pixel(self) -> int:
        return self.form.pixel_depth(self.channels)

    @property
    def image_width(self) -> int:
        """Pixels of a line in scratch memory."""
        return (self.x.out - 1) * self.x.stride + (self.x.kernel - 1) * self.x.dilation + 1

    def _image_lines(self, lines: int) -> int:
        return (lines - 1) * self.y.stride + (self.y.kernel - 1) * self.y.dilation + 1

    def _image_at(self, lines: int) -> int:
        """The first element of the image in scratch memory: vectors of the matrix's last row may end behind it."""
        return self.rows_in_panels(lines) * self._row_elements() + self.form.depth

    def _elements(self, lines: int, images: int) -> int:
        image = self._image_lines(lines) * self.image_width * self.pixel
        return self._image_at(lines) + image + self.form.depth

    def a_at(self, r: Index, part: Part, s: Index, number: int) -> Index:
        return r * (PANEL * self.a_row) + (part.start + s) * self.form.depth

    def _before(self, batch: Index, row: Index) -> Stmt:
        b = self.builder

        def line(at: Index) -> Stmt:
            return b.loop(self.x.out, partial(self._row, at), name="x")

        return b.seq(
            b.loop(self._image_lines(self.block_lines), partial(self._image_line, batch, row), name="line"),
            self._each(self.block_lines, self._lines_of(row) if self.lines % self.block_lines else None, line, "line"),
        )

    def _row(self, line: Index, x: Index) -> Stmt:
        """Write one row of the matrix."""
        b, depth = self.builder, self.form.depth
        to = (line * self.x.out + x) * self.a_row
        first = line * self.y.stride * self.image_width + x * self.x.stride
        is_together = self.x.dilation == 1
        runs = [
            tap_y * self.y.dilation * self.image_width + tap_x * self.x.dilation
            for tap_y in range(self.y.kernel)
            for tap_x in range(1 if is_together else self.x.kernel)
        ]
        length = self.pixel * (self.x.kernel if is_together else 1)
        stores: list[Stmt] = []
        for number, run in enumerate(runs):
            source = (first + run) * self.pixel + self._image_at(self.block_lines)
            is_last = number == len(runs) - 1
            end = self.a_row - number * length if is_last else length  # zeros from the last on
            for start in range(0, end, depth):
                lanes = min(depth, 1 << (end - start - 1).bit_length())
                value = self._some(source + start, lanes, length - start if is_last else lanes)
                stores.append(b.store_vector(self.scratch, to + number * length + start, value, lanes))
        return b.seq(*stores)

    def _some(self, source: Index, lanes: int, count: int) -> TirExpr:
        """A vector of scratch memory, whose first `count` lanes are read; the others are 0."""
        zeros = tir.broadcast(tir.const(0, storage_dtype(self.form.a_dtype)), lanes)
        if count <= 0:
            return zeros
        value = self.builder.load_vector(self.scratch, source, lanes)
        return value if count >= lanes else tir.select(_lane_numbers(lanes) < _all(count, lanes), value, zeros)

    def _image_line(self, batch: Index, row: Index, line: Index) -> Stmt:
        """Write one line of the image: the border, its pixels, the border."""
        b, conv, padding = self.builder, self.conv, self.x.padding
        source = (row * self.y.stride) + line - self.y.padding
        own: dict[LoopVar, Index] = {conv.x_vars[0]: batch}
        if len(conv.kernel) == 2:
            own[conv.x_vars[2]] = source
        to = line * (self.image_width * self.pixel) + self._image_at(self.block_lines)
        first, behind = min(padding, self.image_width), min(padding + self.x.size, self.image_width)
        there = b.seq(
            self._border_at(to, first),
            self._pixels_at(own, to + first * self.pixel, behind - first),
            self._border_at(to + behind * self.pixel, self.image_width - behind),
        )
        last = (self.y.out - 1) * self.y.stride + (self.y.kernel - 1) * self.y.dilation - self.y.padding
        last += (-self.lines % self.block_lines) * self.y.stride  # lines behind those of the result
        tests = [b.index(source) >= 0] if self.y.padding else []
        tests += [b.index(source) < self.y.size] if last >= self.y.size else []
        for test in tests[1:]:
            tests[0] = tir.logical_and(tests[0], test)
        return b.when(tests[0], there, self._border_at(to, self.image_width)) if tests else there

    def _border_at(self, to: Index, pixels: int) -> Stmt | None:
        border = tir.const(self.conv.border, storage_dtype(self.form.a_dtype))
        return self._vectors(to, pixels * self.pixel, lambda _, lanes: tir.broadcast(border, lanes))

    def _pixels_at(self, own: Mapping[LoopVar, Index], to: Index, count: int) -> Stmt | None:
        """The first `count` pixels of a line."""
        b, conv = self.builder, self.conv
        a = self.a.args[0] if isinstance(self.a, Call) and self.a.op == "cast" else self.a
        if count <= 0:
            return None

        def env(pixel: Index | int, channel: Index | int) -> dict[LoopVar, Index]:
            return {**own, conv.x_vars[-1]: as_index(pixel), conv.x_vars[1]: as_index(channel)}

        if isinstance(a, Load) and a.buffer.dtype == self.form.a_dtype and a.buffer in self.printer.arguments:
            array, layout = self.printer.arguments[a.buffer]
            # What lies beside fewer channels than a pixel has elements is memory of the image in blocks only.
            is_there = isinstance(layout, Blocked) or self.channels == self.pixel
            at, next_pixel, next_channel = (
                self.printer.offset(a.buffer, a.index, env(*place)) for place in ((0, 0), (1, 0), (0, 1))
            )
            are_together = next_channel - at == as_index(1) or self.channels == 1
            if is_there and are_together and next_pixel - at == as_index(self.pixel):

                def copied(start: Index, lanes: int) -> TirExpr:
                    value = b.load_vector(array, at + start, lanes)
                    if self.channels == self.pixel:
                        return value
                    channel = _lane_numbers(lanes) & _all(self.pixel - 1, lanes)
                    zeros = tir.broadcast(tir.const(0, storage_dtype(self.form.a_dtype)), lanes)
                    return tir.select(channel < _all(self.channels, lanes), value, zeros)

                return self._vectors(to, count * self.pixel, copied)

        def pixel(number: Index) -> Stmt:
            start, zero = to + number * self.pixel, tir.const(0, storage_dtype(self.form.a_dtype))

            def put(channel: Index) -> Stmt:
                return b.store(self.scratch, start + channel, self.whole(env(number, channel)))

            def missing(channel: Index) -> Stmt:
                return b.store(self.scratch, start + channel, zero)

            return b.seq(self._chunks(0, self.channels, put), self._chunks(self.channels, self.pixel, missing))

        return b.loop(count, pixel, name="x")

    def _vectors(self, to: Index, count: int, value: Callable[[Index, int], TirExpr]) -> Stmt | None:
        """`count` elements of scratch memory from `to` on, in vectors of `value(start, lanes)`, start counted from `to`."""
        b, lanes = self.builder, self.form.depth
        whole, left = divmod(count, lanes)

        def vector(start: Index, width: int) -> Stmt:
            return b.store_vector(self.scratch, to + start, value(start, width), width)

        loop = b.loop(whole, lambda i: vector(i * lanes, lanes), name="i") if whole else None
        rest = [vector(as_index(whole * lanes + start), width) for start, width in lane_chunks(left, lanes)]
        return b.seq(loop, *rest) if count else None


def _lane_numbers(lanes: int) -> TirExpr:
    return tir.ramp(tir.const(0, "int32"), tir.const(1, "int32"), lanes)


def _all(number: int, lanes: int) -> TirExpr:
    return tir.broadcast(tir.const(number, "int32"), lanes)
