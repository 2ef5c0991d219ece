"""Products of a few rows of float32 with a weight of 8 or 4 bits, as sums of integers.

Of each group of neighbours along k, the numbers of a row are x = X * s: X an integer of 23 bits and a sign, s one step of the largest of them.
X is the sum of three signed bytes, of 65536, 256 and 1. So a group's sum of X times integers of 8 or 4 bits is three dot products of bytes
(vpdpbusd), each of four weights a lane, exact in int32, which are put together in float32:

    sum of x * q  =  s * (65536 * high + 256 * middle + low)

What is rounded is a number's digits below 2^-23 of the largest of its group: as exact as sums in float32. Where rows may be rounded, two bytes
do, or one. A word of 8 weights of 4 bits takes a
shift and two masks, then 6 dot products; as float32, 31 instructions. A word of 4 weights of 8 bits takes 3 dot products; as float32, 12
instructions. Weights are moved up by 8 or 128, for vpdpbusd wants one operand without signs: their sign's bit is turned over. What that adds,
so many times the sum of X, is taken off where sums start.

A group whose largest number is not 0 and not of a magnitude from 2^-100 to 2^100 (infinities, NaN, denormal numbers) is none of that: the
caller is told, and multiplies in float32.

Source: oneDNN, "Nuances of int8 computations" (the move); Ootomo, Ozaki & Yokota, "DGEMM on Integer Matrix Multiplication Unit", 2023 (numbers
as sums of integers of 8 bits, by the largest of them).
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable

from torch_hybrid_backend.engines.cpu.dot_products import ROW_PARTS, DotProduct
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.dot import load_word
from torch_hybrid_backend.engines.cpu.tir.math import round_even
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, as_index

_RANGE = 2.0**-100, 2.0**100  # of the largest number of a group
_WORD_BITS = 32


class IntegerRows:
    """The rows of one task: `rows` of `depth` float32 in groups of `group`, `unit` times too small in the array that they come from; for
    weights of `bits` bits."""

    def __init__(
        self, dot: DotProduct, builder: Builder, printer: Printer, lanes: int, rows: int, depth: int, group: int, unit: float,
        bits: int, parts: int = ROW_PARTS,
    ) -> None:  # fmt: skip
        self._dot, self._builder, self._printer, self._lanes = dot, builder, printer, lanes
        self._rows, self._depth, self.group, self._unit, self._bits = rows, depth, group, unit, bits
        self.groups = depth // group
        self._raised, self._parts = 1 << (bits - 1), parts
        self._largest = 127 << (8 * (parts - 1))  # of as many signed bytes: room for what rounding adds

        def array(size: int, dtype: str, name: str) -> TirBuffer:
            return builder.workspace(size, dtype, name)

        self._bytes = array(rows * parts * depth, "int8", "bytes")
        self._scales = array(rows * self.groups, "float32", "steps")
        self._totals = array(rows * self.groups, "int32", "totals")  # sums of X
        self._outside = builder.local(1, "int32", "outside")

    def declare(self) -> Stmt:
        b = self._builder
        arrays = (b.alloc_on_heap(array) for array in (self._bytes, self._scales, self._totals))
        return b.seq(*arrays, b.alloc(self._outside), b.store(self._outside, 0, tir.const(0, "int32")))

    @property
    def holds(self) -> TirExpr:
        """True if all numbers that were split are in the range of these sums."""
        return tir.equal(self._builder.load(self._outside, 0), tir.const(0, "int32"))

    # The rows.

    def split(self, source: TirBuffer) -> Stmt:
        """The rows in `source`, (rows, depth), as bytes."""
        return self._builder.nest((self._rows, self.groups), lambda at: self._split_group(source, at[0], *at), name="g")

    def split_row(self, source: TirBuffer, row: Index) -> Stmt:
        """The one row in `source` as row `row` of bytes."""
        return self._builder.loop(self.groups, lambda g: self._split_group(source, as_index(0), row, g), name="g")

    def _split_group(self, source: TirBuffer, read: Index, row: Index, group: Index) -> Stmt:
        """A group of row `read` of `source` as bytes of row `row`."""
        b, lanes = self._builder, self._lanes
        top, numbers, total = (b.local(lanes, "int32", name) for name in ("top", "numbers", "total"))
        largest, inverse = b.variable("largest", "float32"), b.variable("inverse", "float32")
        first, place = group * self.group, row * self.groups + group

        def each(body: Callable[[Index, Index], Stmt]) -> Stmt:
            """`body(lane, k)` for every number of the group."""
            return b.loop(
                self.group // lanes,
                lambda i: self._printer.vector_loop(lanes, lambda lane: body(lane, first + i * lanes + lane)),
            )

        def raise_top(lane: Index, k: Index) -> Stmt:
            # The bits of magnitudes are in their order, NaN the largest.
            bits = tir.reinterpret(b.load(source, read * self._depth + k), "int32")
            magnitude = bits & _int(0x7FFFFFFF)
            return b.store(top, lane, tir.maximum(b.load(top, lane), magnitude))

        def put(lane: Index, k: Index) -> Stmt:
            x, start = b.load(numbers, lane), row * (self._parts * self._depth) + k
            rounded = round_even(b.load(source, read * self._depth + k) * inverse, "float32")
            # Each part is what is left, rounded to whole units of it.
            parts = (x, (x + _int(0x80)) >> _int(8), (x + _int(0x8080)) >> _int(16))
            return b.seq(
                b.store(numbers, lane, tir.cast(rounded, "int32")),
                b.store(total, lane, b.load(total, lane) + x),
                *[
                    b.store(self._bytes, start + number * self._depth, tir.cast(part, "int8"))
                    for number, part in enumerate(parts[: self._parts])
                ],
            )

        def clear(array: TirBuffer) -> Stmt:
            return self._printer.vector_loop(lanes, lambda lane: b.store(array, lane, _int(0)))

        bits = b.load(top, 0)
        least, most = (_int(struct.unpack("<i", struct.pack("<f", limit))[0]) for limit in _RANGE)
        is_outside = tir.logical_or(bits > most, tir.logical_and(bits > _int(0), bits < least))
        per_unit = tir.select(bits > _int(0), tir.const(self._largest, "float32") / largest, tir.const(0, "float32"))
        return b.seq(
            *map(b.alloc, (top, numbers, total)), clear(top), clear(total),
            each(raise_top), self._over_lanes(top, tir.maximum),
            b.bind(largest, tir.reinterpret(bits, "float32")),
            b.bind(inverse, per_unit),
            b.when(is_outside, b.store(self._outside, 0, _int(1))),
            b.store(self._scales, place, largest * tir.const(self._unit / self._largest, "float32")),
            each(put), self._over_lanes(total, operator.add),
            b.store(self._totals, place, b.load(total, 0)),
        )  # fmt: skip

    def _over_lanes(self, vector: TirBuffer, combine: Callable[[TirExpr, TirExpr], TirExpr]) -> Stmt:
        """vector[0] = all of its lanes combined, by halves."""
        b = self._builder

        def halve(width: int) -> Stmt:
            return self._printer.vector_loop(
                width, lambda lane: b.store(vector, lane, combine(b.load(vector, lane), b.load(vector, lane + width)))
            )

        return b.seq(*[halve(self._lanes >> step) for step in range(1, self._lanes.bit_length())])

    # Products.

    def group_sums(
        self, group: Index, vectors: int, words: Callable[[Index, int], TirExpr], ahead: Callable[[Index], Stmt | None],
        use: Callable[[Callable[[int, int, Index], TirExpr]], Stmt], first: Index | None = None, rows: int | None = None,
    ) -> Stmt:  # fmt: skip
        """The sums of a group, as `use(sum)`: sum(row, vector, lane) of x * q, of `rows` rows (all) from `first` on.

        words(i, vector): a vector of the group's i-th words, which `ahead(i)` precedes.
        """
        b, dot, lanes, parts = self._builder, self._dot, self._lanes, self._parts
        first, rows = as_index(0) if first is None else first, self._rows if rows is None else rows
        columns, in_word = rows * parts, _WORD_BITS // self._bits
        tile = RegisterTile(b, self._printer, vectors, columns, lanes, "int32")
        upper = 8 * (parts - 1)  # bits below the last part

        def start(vector: int, column: int, lane: Index) -> TirExpr:
            row, part = divmod(column, parts)
            total = b.load(self._totals, group + (first + row) * self.groups)
            if parts < 3:  # their sum fits into 32 bits, whatever each of them wraps to
                return total * _int(-self._raised) if part == 0 else _int(0)
            if part == 0:
                return (total & _int((1 << upper) - 1)) * _int(-self._raised)
            return (total >> _int(upper)) * _int(-self._raised) if part == parts - 1 else _int(0)

        def word(i: Index) -> Stmt | None:
            steps = []
            of_word = [words(i, vector) for vector in range(vectors)]
            for half in range(in_word // dot.group):
                raised = [self._bytes_of(w, half) ^ self._all(self._raised * 0x01010101) for w in of_word]
                at = first * (parts * self._depth) + group * self.group + i * in_word + half * dot.group
                places = [at + column * self._depth for column in range(columns)]
                numbers = [load_word(self._bytes, b.index(place), dot, lanes) for place in places]
                signed = [tir.reinterpret(number, f"int8x{lanes * dot.group}") for number in numbers]
                steps.append(tile.accumulate_words(raised, signed, dot, one_by_one=True))
            return b.seq(ahead(i), *steps)

        def total(row: int, vector: int, lane: Index) -> TirExpr:
            of_parts = [tile.at(vector, row * parts + part, lane) for part in range(parts)]
            if parts == 1:
                return tir.cast(of_parts[0], "float32")
            if parts == 2:
                return tir.cast((of_parts[1] << _int(8)) + of_parts[0], "float32")
            low, middle, high = (tir.cast(part, "float32") for part in of_parts)
            return high * tir.const(65536, "float32") + (middle * tir.const(256, "float32") + low)

        return b.seq(tile.declare(), tile.fill(start), b.loop(self.group // in_word, word, name="w"), use(total))

    def _bytes_of(self, words: TirExpr, half: int) -> TirExpr:
        """Four neighbouring weights of each word, as bytes."""
        if self._bits == 8:
            return words
        return ((words >> self._all(4)) if half else words) & self._all(0x0F0F0F0F)

    def scale(self, row: Index | int, group: Index) -> TirExpr:
        """The scale of a group's sums."""
        return self._builder.load(self._scales, group + row * self.groups)

    def total(self, row: Index | int, group: Index) -> TirExpr:
        """The sum of a group's numbers, in units of its scale."""
        return tir.cast(self._builder.load(self._totals, group + row * self.groups), "float32")

    def _all(self, number: int) -> TirExpr:
        return tir.broadcast(_int(number - (1 << _WORD_BITS) if number >> (_WORD_BITS - 1) else number), self._lanes)


def _int(number: int) -> TirExpr:
    return tir.const(number, "int32")
