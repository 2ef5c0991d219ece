"""A quantized weight in memory, and its elements in registers: what the schedules of a `Quantized` weight read it by.

    weight[k, n] = (integer - zero) * scale, or table[integer]

A nibble stays where the sign of its word is, so it counts 2^28 fold (`unit`). A weight of 16 values in a table is looked up in registers: a
shift and a permutation of a vector (vpermps), which reads 4 bits of each lane; with AVX2 two of 8 values and a choice.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES
from torch_hybrid_backend.engines.cpu.tile_sizes import NIBBLES, nibble_place
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.x86 import looked_up
from torch_hybrid_backend.engines.cpu.weights import Quantized
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.quantized import MOST_VALUES
from torch_hybrid_backend.sizes.size import known_int

_TOP = tir.const(-(1 << 28), "int32")  # the mask of a word's last nibble
_TOP_UNIT = 2.0**28  # what a 1 there counts as
# By a weight's bits, how far ahead of its use a line is asked for: what the prefetcher of a core, which stops at a page's end, does not see.
_AHEAD_BYTES = {8: 4096, 4: 8192}


class QuantizedWeight:
    """The weight of one kernel, whose vectors have `lanes` lanes.

    `array`: its integers; `depth`: elements of k, in `groups` groups of `group`; `per_word`: elements of k in one element of `array`.
    """

    def __init__(self, kernel: CpuMatMulKernel[Quantized], builder: Builder, printer: Printer, lanes: int) -> None:
        self._weight, self._builder, self._printer, self._lanes = kernel.weight, builder, printer, lanes
        self._width = self._weight.width
        self.array = printer.arguments[self._weight.buffer][0]
        self.depth, self.group = known_int(kernel.k.extent), self._weight.group
        self.per_word = 32 // self._weight.bits if self._weight.buffer.dtype == "int32" else 1
        self.groups = -(-self.depth // self.group)
        self._values = builder.local(MOST_VALUES, "float32", "values")

    @property
    def panel_words(self) -> int:
        """Elements of the packed weight of one panel."""
        return -(-self.depth // self.per_word) * self._width

    def words_before(self, panel: Index, k: Index) -> Index:
        """Elements of the packed weight before step `k` of a panel; `k` is the first of a word."""
        return panel * self.panel_words + k // self.per_word * self._width

    def table(self) -> tuple[Stmt | None, Stmt | None]:
        """Statements that declare and fill `values`, in registers, at the begin of a task."""
        if self._weight.table is None:
            return None, None
        table = self._printer.arguments[self._weight.table][0]

        def keep(vector: int) -> Stmt:
            def of(lane: Index) -> Stmt:
                place = lane + vector * self._lanes
                return self._builder.store(self._values, place, self._builder.load(table, place))

            return self._printer.vector_loop(self._lanes, of)

        return self._builder.alloc(self._values), self._builder.seq(*map(keep, range(MOST_VALUES // self._lanes)))

    def _looked_up(self, word: TirExpr, nibble: int, lane: Index) -> TirExpr:
        """Look up the values of a nibble of each word: of a whole vector of words, `lane` by lane, which the intrinsics are of."""
        b = self._builder
        place = word >> tir.const(4 * nibble, "int32")  # the bits above are not looked at
        if self._lanes == MOST_VALUES:
            return looked_up(b.load(self._values, lane), place, self._lanes)
        low, high = (looked_up(b.load(self._values, lane + first), place, self._lanes) for first in (0, self._lanes))
        # The fourth bit where the word has its sign.
        top = word << tir.const(4 * (NIBBLES - 1 - nibble), "int32")
        return tir.select(top < tir.const(0, "int32"), high, low)

    def integer(self, word: Index, j: int, column: Index) -> TirExpr:
        """Step `j` of the word at element `word` of a panel, as float32 times `unit`; with a table, the value that it stands for."""
        value = self._builder.load(self.array, word + column)
        if self._weight.bits == 4:
            place = nibble_place(j)
            if self._weight.table is not None:
                return self._looked_up(value, place, column % self._lanes)
            if place < NIBBLES - 1:
                value = value << tir.const(4 * (NIBBLES - 1 - place), "int32")
            value = value & _TOP
        elif self.per_word > 1:
            if j < self.per_word - 1:
                value = value << tir.const(8 * (self.per_word - 1 - j), "int32")
            value = value >> tir.const(24, "int32")
        return tir.cast(value, "float32")

    @property
    def unit(self) -> float:
        """The value of the integer 1."""
        return _TOP_UNIT if self._weight.bits == 4 and self._weight.table is None else 1.0

    def of_group(self, panel: Index, group: Index, column: Index, *, zero: bool) -> TirExpr:
        """The scale of a column's group, or its zero point."""
        buffer = self._weight.zeros if zero else self._weight.scales
        assert buffer is not None
        place = panel * (self.groups * self._width) + group * self._width + column
        return self._printer.widen(self._builder.load(self._printer.arguments[buffer][0], place), buffer.dtype)

    def moved(self, value: TirExpr, panel: Index, group: Index, column: Index) -> TirExpr:
        """An integer less its zero point."""
        if self._weight.zeros is None:
            return value
        zero = self.of_group(panel, group, column, zero=True)
        return value - (zero if self.unit == 1 else zero * tir.const(self.unit, "float32"))

    def ahead(self, word: Index, words: int, distance: int | None = None) -> Stmt:
        """Asks for the lines that lie `distance` elements, or `_AHEAD_BYTES`, behind some words of a panel."""
        b, itemsize = self._builder, tir.itemsize(str(self.array.dtype))
        line, start = LINE_BYTES // itemsize, word + (distance or _AHEAD_BYTES[self._weight.bits] // itemsize)
        lines = range(0, words * self._width, line)
        return b.seq(*[b.prefetch(self.array, b.index(start + place)) for place in lines])
