"""float32 as the sum of a few bfloat16 (`cpu/amx_formats.py`), in vectors, with a look at which numbers that holds for.

    parts = FloatParts(builder, printer, 3)
    b.seq(parts.begin(), printer.vector_loop(16, lambda lane: parts.split(lane, value(lane), put)), parts.when_outside(statement))

`put(part, bits)` is told each part of a number, the largest first: it is in the upper half of 32 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from tvm import tirx

from torch_hybrid_backend.engines.tvm.cpu.amx_formats import LARGEST, SMALLEST
from torch_hybrid_backend.engines.tvm.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.tvm.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index

_LANES = 16


def word(number: int) -> TirExpr:
    return tirx.IntImm("uint32", number)


class FloatParts:
    """What is split by one sequence of statements: vectors that stay in registers, used after `begin` and in no other block of statements."""

    def __init__(self, builder: Builder, printer: Printer, parts: int) -> None:
        self._builder, self._printer, self._parts = builder, printer, parts
        # The magnitudes' bits, largest and, less 1, smallest; a part's bits; what is left of a number.
        self._largest, self._smallest, self._bits = (
            builder.local(_LANES, "uint32", name) for name in ("largest", "smallest", "bits")
        )
        self._rest = builder.local(_LANES, "float32", "rest")

    @property
    def vectors(self) -> tuple[TirBuffer, ...]:
        """What `begin` declares."""
        return self._largest, self._smallest, self._rest, self._bits

    def begin(self) -> Stmt:
        """Declares the vectors; nothing has been looked at."""
        b = self._builder
        return b.seq(
            *map(b.alloc, self.vectors), self._filled(self._largest, 0), self._filled(self._smallest, 0xFFFFFFFF)
        )

    def _filled(self, array: TirBuffer, number: int) -> Stmt:
        return self._printer.vector_loop(_LANES, lambda lane: self._builder.store(array, lane, word(number)))

    def split(self, lane: Index, value: TirExpr, put: Callable[[int, TirExpr], Stmt], *, watches: bool = True) -> Stmt:
        """The number of one lane: its first part is it rounded to nearest, each other what is left, rounded.

        watches: its magnitude counts for `when_outside`. Values are kept in local arrays: TVM would substitute a binding at each use.
        """
        b = self._builder
        rest, bits = b.load(self._rest, lane), b.load(self._bits, lane)
        statements = [b.store(self._rest, lane, value)]
        if watches:
            magnitude = tirx.bitwise_and(tirx.reinterpret("uint32", rest), word(0x7FFFFFFF))
            statements += [
                b.store(self._bits, lane, magnitude),
                b.store(self._largest, lane, tirx.Max(b.load(self._largest, lane), bits)),
                # 0 becomes the largest.
                b.store(self._smallest, lane, tirx.Min(b.load(self._smallest, lane), bits - word(1))),
            ]
        for number in range(self._parts):
            own = tirx.reinterpret("uint32", rest)
            odd = tirx.bitwise_and(tirx.shift_right(own, word(16)), word(1))
            statements += [b.store(self._bits, lane, own + word(0x7FFF) + odd), put(number, bits)]
            if number + 1 < self._parts:
                part = tirx.reinterpret("float32", tirx.bitwise_and(bits, word(0xFFFF0000)))
                statements.append(b.store(self._rest, lane, rest - part))
        return b.seq(*statements)

    def when_outside(self, statement: Stmt) -> Stmt:
        """`statement`, at least once, where a number that was watched is neither 0 nor of a magnitude from `SMALLEST` to `LARGEST`."""
        b = self._builder
        least, most = (struct.unpack("<I", struct.pack("<f", limit))[0] for limit in (SMALLEST, LARGEST))

        def look(lane: Index) -> Stmt:
            outside = tirx.Or(b.load(self._largest, lane) > word(most), b.load(self._smallest, lane) < word(least - 1))
            return b.when(outside, statement)

        return b.loop(_LANES, look, name="l")
