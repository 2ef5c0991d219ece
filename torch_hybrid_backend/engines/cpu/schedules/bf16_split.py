"""float32 as the sum of a few bfloat16 (`operands/amx_formats.py`), in vectors, with a look at which numbers that holds for.

    parts = FloatParts(builder, printer, 3, target)
    b.seq(parts.begin(), parts.stored(16, value, lambda part: (array, start + part * size)), parts.when_outside(statement))

Rounding is integer arithmetic, five instructions for a vector of 16, or one where the processor has AVX512-BF16. That takes denormal numbers
for 0, as tiles do: in numbers that are not outside there are none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from torch_hybrid_backend.engines.cpu.operands.amx_formats import LARGEST, SMALLEST
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.x86 import rounded_vector
from torch_hybrid_backend.loops.index import Index

_LANES = 16


def word(number: int) -> TirExpr:
    return tir.const(number, "uint32")


def upper(bits: TirExpr) -> TirExpr:
    """The upper half of 32 bits."""
    return tir.cast(bits >> word(16), "uint16")


class FloatParts:
    """Vectors that are split by one sequence of statements: vectors that stay in registers, used after `begin` and in no other block of
    statements."""

    def __init__(self, builder: Builder, printer: Printer, parts: int, target: Target) -> None:
        self._builder, self._printer, self._parts = builder, printer, parts
        self._has_instruction = target.isa.rounds_to_bfloat16
        # The magnitudes' bits, largest and, less 1, smallest; a part's bits; what is left of a number.
        self._largest, self._smallest, self._bits = (
            builder.local(_LANES, "uint32", name) for name in ("largest", "smallest", "bits")
        )
        self._rest = builder.local(_LANES, "float32", "rest")

    @property
    def vectors(self) -> tuple[TirBuffer, ...]:
        """The vectors that `begin` declares."""
        return self._largest, self._smallest, self._rest, self._bits

    def begin(self) -> Stmt:
        """Declares the vectors; nothing has been looked at."""
        b = self._builder
        return b.seq(
            *map(b.alloc, self.vectors), self._filled(self._largest, 0), self._filled(self._smallest, 0xFFFFFFFF)
        )

    def _filled(self, array: TirBuffer, number: int) -> Stmt:
        return self._printer.vector_loop(_LANES, lambda lane: self._builder.store(array, lane, word(number)))

    def stored(
        self,
        width: int,
        value: Callable[[Index], TirExpr],
        place: Callable[[int], tuple[TirBuffer, Index]],
        *,
        watches: bool = True,
    ) -> Stmt:
        """The numbers of `width` lanes in memory as bfloat16, part by part: from an element of an array on, which `place(part)` says.

        watches: their magnitudes count for `when_outside`.
        """
        if width == _LANES and self._has_instruction:
            return self._stored_vector(value, place, watches)

        def one(lane: Index) -> Stmt:
            def put(number: int, bits: TirExpr) -> Stmt:
                array, start = place(number)
                return self._builder.store(array, start + lane, upper(bits))

            return self.split(lane, value(lane), put, watches=watches)

        return self._printer.vector_loop(width, one)

    def _stored_vector(
        self, value: Callable[[Index], TirExpr], place: Callable[[int], tuple[TirBuffer, Index]], watches: bool
    ) -> Stmt:
        b = self._builder
        statements = [self._printer.vector_loop(_LANES, lambda lane: self._taken(lane, value(lane), watches))]
        for number in range(self._parts):
            part, rest = b.variable("part", f"uint16x{_LANES}"), b.load_vector(self._rest, 0, _LANES)
            array, start = place(number)
            statements += [b.bind(part, rounded_vector(b, rest)), b.store_vector(array, start, part, _LANES)]
            if number + 1 < self._parts:
                bits = tir.cast(part, f"uint32x{_LANES}") << tir.broadcast(word(16), _LANES)
                left = rest - tir.reinterpret(bits, f"float32x{_LANES}")
                statements.append(b.store_vector(self._rest, 0, left, _LANES))
        return b.seq(*statements)

    def _taken(self, lane: Index, value: TirExpr, watches: bool) -> Stmt:
        """The number of one lane as what is left of it, and looked at."""
        b, bits = self._builder, self._builder.load(self._bits, lane)
        statements = [b.store(self._rest, lane, value)]
        if watches:
            magnitude = tir.reinterpret(b.load(self._rest, lane), "uint32") & word(0x7FFFFFFF)
            statements += [
                b.store(self._bits, lane, magnitude),
                b.store(self._largest, lane, tir.maximum(b.load(self._largest, lane), bits)),
                # 0 becomes the largest.
                b.store(self._smallest, lane, tir.minimum(b.load(self._smallest, lane), bits - word(1))),
            ]
        return b.seq(*statements)

    def split(self, lane: Index, value: TirExpr, put: Callable[[int, TirExpr], Stmt], *, watches: bool = True) -> Stmt:
        """Split one lane as `stored` does: `put(part, bits)` is told each part, the largest first, which is in the upper half of 32 bits.

        The first part is the number rounded to nearest, each other what is left, rounded. Values are kept in local arrays: TVM would substitute
        a binding at each use.
        """
        b = self._builder
        rest, bits = b.load(self._rest, lane), b.load(self._bits, lane)
        statements = [self._taken(lane, value, watches)]
        for number in range(self._parts):
            own = tir.reinterpret(rest, "uint32")
            odd = (own >> word(16)) & word(1)
            statements += [b.store(self._bits, lane, own + word(0x7FFF) + odd), put(number, bits)]
            if number + 1 < self._parts:
                part = tir.reinterpret(bits & word(0xFFFF0000), "float32")
                statements.append(b.store(self._rest, lane, rest - part))
        return b.seq(*statements)

    def when_outside(self, statement: Stmt) -> Stmt:
        """`statement`, at least once, where a number that was watched is neither 0 nor of a magnitude from `SMALLEST` to `LARGEST`."""
        b = self._builder
        least, most = (struct.unpack("<I", struct.pack("<f", limit))[0] for limit in (SMALLEST, LARGEST))

        def look(lane: Index) -> Stmt:
            outside = tir.logical_or(
                b.load(self._largest, lane) > word(most), b.load(self._smallest, lane) < word(least - 1)
            )
            return b.when(outside, statement)

        return b.loop(_LANES, look, name="l")
