"""Matmul with a quantized weight by AMX: C[m, n] = sum over k of A[m, k] * (Q[k, n] - zero[g, n]) * scale[g, n], g = k // group.

Pattern: a `Quantized` weight with a `tile_format`. Beside the steps of `schedules/amx`: before a task multiplies a panel of columns, it
unpacks that panel's part of k to tiles, which stay in the first-level cache while the panels of rows go by.

Activations of bfloat16 are multiplied by the weight dequantized and rounded to bfloat16, as the graph has it. So are those of others that may
be rounded to 8 bits: that would lose more than rounding both to bfloat16 does. For others the weight's integers, which are exact in bfloat16,
are one part, where a float32 weight has three: three products of parts instead of six. (A is split as in `schedules/amx`; rows that cannot be
are multiplied by vectors.) A group's products start at zero; its sums go from the tiles to memory, and from there, times the group's scales,
to those of the groups before, in vectors, while tiles multiply the next group: 64 of them for 12 instructions of tiles in a group of 32. Zero
points are taken off behind the products: zero * (sum of a row of A), for they need be no integers. Those sums of rows are a product of tiles,
too, by ones.

Integers of 4 bits, two neighbours along k of 16 columns, become bfloat16 by a few shifts and one permutation (vpermw), which looks them up by
the lowest bits of 16; elsewhere they are converted to float32, whose upper halves are put together.

Sources: as `schedules/amx`; Frantar et al., "GPTQ", 2022 (scales of groups).
"""

from __future__ import annotations

from collections.abc import Callable

from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS, PANEL
from torch_hybrid_backend.engines.cpu.schedules.amx import instructions
from torch_hybrid_backend.engines.cpu.schedules.amx.blocks import LANES, Part
from torch_hybrid_backend.engines.cpu.schedules.amx.product import spread
from torch_hybrid_backend.engines.cpu.schedules.matmul.amx import TileMatMul
from torch_hybrid_backend.engines.cpu.schedules.matmul.quantized_weight import QuantizedWeight
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import nibble_place
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.storage import narrow
from torch_hybrid_backend.engines.cpu.tir.x86 import bf16_of_nibbles, rounded_pairs
from torch_hybrid_backend.engines.cpu.weights import Quantized
from torch_hybrid_backend.loops.index import Index, as_index

# Words of 32 bits in a tile: two integers along k of one column each.
_TILE_WORDS = LANES * LANES
# Steps of a part of k: what is unpacked, 2 KiB a step, leaves the first-level cache room for sums. For one panel of rows, whose products take
# less time than unpacking, shorter parts are faster.
_MOST_STEPS, _FEW_STEPS = 12, 8
# Cycles to unpack a step of a panel, and to scale and add the sums of one.
_UNPACK_CYCLES, _SCALE_CYCLES = 100.0, 130.0
_ONE = 0x3F803F80  # two of bfloat16


def emit(kernel: CpuMatMulKernel[Quantized], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body."""
    kind = _RoundedWeight if kernel.weight.tile_format == "bfloat16" else _IntegerWeight
    return kind(kernel, builder, printer, target).emit()


class _UnpackedWeight(TileMatMul):
    """The emission of one kernel: what unpacks its weight to tiles."""

    def __init__(self, kernel: CpuMatMulKernel[Quantized], builder: Builder, printer: Printer, target: Target) -> None:
        self.weight = QuantizedWeight(kernel, builder, printer, LANES)
        super().__init__(kernel, FORMATS[kernel.weight.tile_format].by_integers, builder, printer, target)
        self.unpacked = builder.local(self.part_steps * 2 * _TILE_WORDS, "int32", "unpacked")

    def _unpack(self, panel: Index, k: Index, line: Index, count: int) -> Stmt:
        """`count` elements of k, from `k` on, in `unpacked` from line `line` on."""
        raise NotImplementedError

    def _product_cycles(self, part_steps: int, block: int, group: int) -> float:
        return super()._product_cycles(part_steps, block, group) + group * self.steps * _UNPACK_CYCLES

    def _arrays(self) -> list[TirBuffer]:
        return [*super()._arrays(), self.unpacked]

    def _before_columns(self, panel: Index, part: Part) -> Stmt | None:
        """A panel's part of k, with zeros behind the last."""
        b, weight = self.builder, self.weight
        unit = max(2, weight.per_word)  # elements of k that are unpacked together
        whole, left = divmod(part.elements, unit)
        behind = part.steps * LANES - (whole + (left > 0)) * (unit // 2)

        def unpack(number: Index, count: int) -> Stmt:
            return self._unpack(panel, part.start * self.form.depth + number * unit, number * (unit // 2), count)

        def words(number: Index) -> Stmt:
            at = weight.words_before(panel, part.start * self.form.depth + number * unit)
            # The next panel's: it is unpacked after this one.
            ahead = weight.ahead(at, max(1, unit // weight.per_word), weight.panel_words)
            return b.seq(ahead, unpack(number, unit))

        def zero(line: Index) -> Stmt:
            return b.seq(*[self._put(line, j, lambda _: tir.const(0, "int32")) for j in (0, 1)])

        return b.seq(
            b.loop(whole, words, name="word") if whole else None,
            unpack(as_index(whole), left) if left else None,
            b.loop(behind, lambda i: zero(i + (part.steps * LANES - behind)), name="line") if behind else None,
        )

    def _line_at(self, line: Index, j: int) -> Index:
        """The address of a line of a tile: two elements along k of 16 columns, the `j`-th ones of a panel."""
        return (line // LANES * 2 + j) * _TILE_WORDS + line % LANES * LANES

    def _put(self, line: Index, j: int, value: Callable[[Index], TirExpr]) -> Stmt:
        at = self._line_at(line, j)
        return self.printer.vector_loop(LANES, lambda lane: self.builder.store(self.unpacked, at + lane, value(lane)))

    def _integer(self, panel: Index, k: Index, j: int, column: Index) -> TirExpr:
        """Element `k` + `j` of a column, `k` the first of a word, as `QuantizedWeight.integer`."""
        word = self.weight.words_before(panel, k) + j // self.weight.per_word * PANEL
        return self.weight.integer(word, j % self.weight.per_word, column)

    def _b_at(self, panel: Index, part: Part, s: Index, number: int) -> tuple[TirBuffer, Index, int]:
        return self.unpacked, s * (2 * _TILE_WORDS), _TILE_WORDS

    def _fetches(self, r: Index, panel: Index, c: Index, part: Part, s: Index) -> list[Stmt]:
        return []

    def _is_plain(self, panel: Index) -> TirExpr | None:
        return None


class _RoundedWeight(_UnpackedWeight):
    """A weight that is dequantized and rounded to bfloat16, for activations that are bfloat16, or may be."""

    def _part_lengths(self) -> list[int]:
        return [_even(self.steps, _FEW_STEPS if self.row_panels == 1 else _MOST_STEPS)]

    def _unpack(self, panel: Index, k: Index, line: Index, count: int) -> Stmt:
        b = self.builder
        group = k // self.weight.group if self.weight.groups > 1 else as_index(0)
        first, second = (b.local(LANES, "float32", name) for name in ("first", "second"))

        def number(array: TirBuffer, i: int, j: int) -> Stmt:
            def of(lane: Index) -> Stmt:
                column = lane + j * LANES
                value = self.weight.moved(self._integer(panel, k, i, column), panel, group, column)
                scale = self.weight.of_group(panel, group, column, zero=False)
                return b.store(array, lane, value * (scale * tir.const(1 / self.weight.unit, "float32")))

            if i >= count:
                return self.printer.vector_loop(LANES, lambda lane: b.store(array, lane, tir.const(0, "float32")))
            return self.printer.vector_loop(LANES, of)

        def pair(i: int, j: int) -> Stmt:
            return b.seq(
                number(first, 2 * i, j), number(second, 2 * i + 1, j), self._rounded(line + i, j, first, second)
            )

        pairs = [pair(i, j) for j in (0, 1) for i in range(-(-count // 2))]
        return b.seq(b.alloc(first), b.alloc(second), *pairs)

    def _rounded(self, line: Index, j: int, first: TirBuffer, second: TirBuffer) -> Stmt:
        """Two vectors of float32 as a line of a tile."""
        b = self.builder
        if self.target.isa.rounds_to_bfloat16:
            pairs = rounded_pairs(b, *(b.load_vector(array, 0, LANES) for array in (first, second)))
            return b.store_vector(self.unpacked, self._line_at(line, j), pairs, LANES)

        def pair(lane: Index) -> TirExpr:
            low, high = (tir.cast(narrow(b.load(array, lane), "bfloat16"), "int32") for array in (first, second))
            return low | (high << tir.const(16, "int32"))

        return self._put(line, j, pair)


class _IntegerWeight(_UnpackedWeight):
    """A weight of integers in groups, for operands that are split."""

    def __init__(self, kernel: CpuMatMulKernel[Quantized], builder: Builder, printer: Printer, target: Target) -> None:
        super().__init__(kernel, builder, printer, target)
        self.group_steps = min(self._group_steps(), self.part_steps)
        self.has_zeros = kernel.weight.zeros is not None
        self.looks_up = kernel.weight.bits == 4 and target.isa.looks_up_bfloat16
        # Sums of rows of A: of every group of a part, panel of rows and row, the same in every lane.
        groups = self.part_steps // self.group_steps
        self.row_sums = builder.local(groups * self.block * PANEL * LANES, "float32", "row_sums")
        self.ones = builder.local(_TILE_WORDS, "int32", "ones")

    def _group_steps(self) -> int:
        """Steps of a group; of all of k where there is one group."""
        return self.steps if self.weight.groups == 1 else self.weight.group // self.form.depth

    def _part_lengths(self) -> list[int]:
        """Whole groups, or what divides one."""
        group = self._group_steps()
        if self.weight.groups == 1:
            return [_even(self.steps, _MOST_STEPS)]
        if group <= _MOST_STEPS:
            return [min(self.steps, _MOST_STEPS // group * group)]
        return [max(steps for steps in range(1, _MOST_STEPS + 1) if group % steps == 0)]

    def _product_cycles(self, part_steps: int, block: int, group: int) -> float:
        groups = -(-self.steps // min(self._group_steps(), part_steps))
        return super()._product_cycles(part_steps, block, group) + group * block * groups * _SCALE_CYCLES

    def _adds_in_memory(self) -> bool:
        return True

    def _arrays(self) -> list[TirBuffer]:
        others = [array for array in super()._arrays() if array is not self.near]
        return [*others, self.near, *([self.row_sums, self.ones] if self.has_zeros else [])]

    def _before(self, batch: Index, row: Index) -> Stmt | None:
        if not self.has_zeros:
            return None
        one = tir.const(_ONE, "int32")
        return self.builder.loop(
            LANES,
            lambda i: self.printer.vector_loop(
                LANES, lambda lane: self.builder.store(self.ones, i * LANES + lane, one)
            ),
            name="line",
        )

    # A.

    def _copies(self, batch: Index, row: Index, part: Part) -> Stmt | None:
        if not self.has_zeros:
            return super()._copies(batch, row, part)
        ones = instructions.load(self.builder, 6, self.ones, 0, 4 * LANES)
        count, steps = self._groups_of(part)
        sums = self._each_row(
            row, lambda r: self.builder.loop(count, lambda g: self._row_sums(r, part, g, steps), name="group")
        )
        return self.builder.seq(super()._copies(batch, row, part), ones, sums)

    def _groups_of(self, part: Part) -> tuple[int, int]:
        """Groups of a part of k, and steps of each; of one group a part may have a few steps."""
        return -(-part.steps // self.group_steps), min(self.group_steps, part.steps)

    def _row_sums(self, r: Index, part: Part, group: Index, steps: int) -> Stmt:
        """The sums of a panel of rows over a group of k."""
        b = self.builder

        def step(s: Index) -> Stmt:
            products = []
            for number in reversed(range(self.form.parts)):
                products += self._a_loads(r, part, group * self.group_steps + s, number, 2)
                products += [instructions.multiply(self.form.instruction, i, 4 + i, 6) for i in (0, 1)]
            return b.seq(*products)

        at = self._row_sums_at(r, group)
        stores = [instructions.store(b, i, self.row_sums, at + i * _TILE_WORDS, 4 * LANES) for i in (0, 1)]
        return b.seq(instructions.zero(0), instructions.zero(1), b.loop(steps, step, name="step"), *stores)

    def _row_sums_at(self, r: Index, group: Index) -> Index:
        return (group * self.block + r) * (PANEL * LANES)

    # B.

    def _unpack(self, panel: Index, k: Index, line: Index, count: int) -> Stmt:
        b = self.builder
        if self.looks_up:
            word = self.weight.words_before(panel, k)
            return b.seq(*[self._look_up(word, line, j) for j in (0, 1)])

        def bits(i: int, column: Index) -> TirExpr:
            return tir.reinterpret(self._integer(panel, k, i, column), "uint32")

        def pair(i: int, j: int) -> Stmt:
            def of(lane: Index) -> TirExpr:
                column = lane + j * LANES
                both = bits(2 * i, column) >> tir.const(16, "uint32")
                if 2 * i + 1 < count:
                    second = bits(2 * i + 1, column) & tir.const(0xFFFF0000, "uint32")
                    both = both | second
                return tir.reinterpret(both, "int32")

            return self._put(line + i, j, of)

        return b.seq(*[pair(i, j) for j in (0, 1) for i in range(-(-count // 2))])

    def _look_up(self, word: Index, line: Index, j: int) -> Stmt:
        """8 elements of k of 16 columns, a word of nibbles each: `tiles.nibble_place` says where each is.

        A pair's first nibble and its second one, two places further up, are moved to the lowest bits of the halves of a word.
        """
        b = self.builder
        words = b.variable("words", f"int32x{LANES}")

        def moved(by: int) -> TirExpr:
            """The words moved down by so many nibbles, or up."""
            if by == 0:
                return words
            bits = tir.broadcast(tir.const(4 * abs(by), "int32"), LANES)
            return words >> bits if by > 0 else words << bits

        def half(value: TirExpr, mask: int) -> TirExpr:
            return value & tir.broadcast(tir.const(mask, "int32"), LANES)

        def pair(i: int) -> Stmt:
            low = nibble_place(2 * i)
            # Bits that are not looked at may be any.
            both = half(moved(low), 0xFFFF) | half(moved(nibble_place(2 * i + 1) - 4), -0x10000)
            return b.store_vector(self.unpacked, self._line_at(line + i, j), bf16_of_nibbles(b, both), LANES)

        load = b.load_vector(self.weight.array, word + j * LANES, LANES)
        return b.seq(b.bind(words, load), *[pair(i) for i in range(4)])

    def _numbers(self, panel: Index, part: Part, is_plain: bool) -> Stmt:
        b = self.builder

        def line(position: tuple[Index, ...]) -> Stmt:
            s, j, i = position
            at, to = s * (2 * _TILE_WORDS) + j * _TILE_WORDS + i * LANES, (s * LANES + i) * 2 * PANEL + j * LANES

            def of(lane: Index) -> Stmt:
                word, column = tir.reinterpret(b.load(self.unpacked, at + lane), "uint32"), j * LANES + lane
                halves = (
                    word << tir.const(16, "uint32"),
                    word & tir.const(0xFFFF0000, "uint32"),
                )
                group, stores = self._number(part, s // self.group_steps), []
                for odd, bits in enumerate(halves):
                    number = tir.reinterpret(bits, "float32")
                    if self.has_zeros:
                        number = number - self._zero(panel, group, column)
                    scale = self._scale(panel, group, column)
                    stores.append(b.store(self.exact.b, to + odd * PANEL + lane, number * scale))
                return b.seq(*stores)

            return self.printer.vector_loop(LANES, of)

        return b.nest((part.steps, 2, LANES), line, name="k")

    def _number(self, part: Part, group: Index) -> Index:
        """The number of a group of a part of k."""
        if self.weight.groups == 1:
            return as_index(0)
        return (part.start + group * self.group_steps) // self._group_steps()

    # Sums.

    def _by_tiles(self, batch: Index, row: Index, r: Index, panel: Index, c: Index, part: Part, row_tiles: int) -> Stmt:
        """The products of `row_tiles` tiles of rows and two of columns, added to the sums in memory group by group.

        The sums of a group are added while tiles multiply the first step of the next one.
        """
        b, sums = self.builder, self._sums_at(r, c)
        tiles = {2 * i + j: (i * PANEL + j) * LANES for i in range(row_tiles) for j in (0, 1)}
        lines, (count, steps) = row_tiles * LANES, self._groups_of(part)

        def added(group: Index) -> tuple[Stmt, Callable[[Index], Stmt]]:
            return self._added(r, panel, sums, part, group)

        def products(group: Index, beside: list[Stmt]) -> Stmt:
            def step(s: Index) -> list[Stmt]:
                return self._step(r, panel, part, group * self.group_steps + s, row_tiles)

            return b.seq(
                *map(instructions.zero, tiles),
                *spread(step(as_index(0)), beside),
                b.loop(steps - 1, lambda s: b.seq(*step(s + 1)), name="step") if steps > 1 else None,
                *[instructions.store(b, tile, self.near, at, 4 * PANEL) for tile, at in tiles.items()],
            )

        def group(before: Index) -> Stmt:
            begin, add = added(before)
            return b.seq(begin, products(before + 1, [add(as_index(line)) for line in range(lines)]))

        def zero(i: Index) -> Stmt:
            nothing = tir.const(0, "float32")
            return self.printer.vector_loop(LANES, lambda lane: b.store(self.sums, sums + i * LANES + lane, nothing))

        begin, add = added(as_index(count - 1))
        return b.seq(
            b.when(b.equal(part.number, 0), b.loop(row_tiles * PANEL, zero, name="zero")),
            products(as_index(0), []),
            b.loop(count - 1, group, name="group") if count > 1 else None,
            begin,
            b.loop(lines, add, name="line"),
        )

    def _added(
        self, r: Index, panel: Index, sums: Index, part: Part, group: Index
    ) -> tuple[Stmt, Callable[[Index], Stmt]]:
        """Add the sums of a group, which are in `near`, to those of the groups before, less zero points and times scales. Returns the first
        statements, and the function that adds a line."""
        b, number = self.builder, self._number(part, group)
        scale, zero = (b.local(PANEL, "float32", name) for name in ("scale", "zero"))

        def each(of: Callable[[Index], Stmt]) -> Stmt:
            """Call `of(column)` for a panel's columns."""
            first = self.printer.vector_loop(LANES, of)
            return b.seq(first, self.printer.vector_loop(LANES, lambda lane: of(lane + LANES)))

        def keep(column: Index) -> Stmt:
            scales = b.store(scale, column, self._scale(panel, number, column))
            if not self.has_zeros:
                return scales
            return b.seq(scales, b.store(zero, column, self._zero(panel, number, column)))

        def line(i: Index) -> Stmt:
            def add(column: Index) -> Stmt:
                value = b.load(self.near, i * PANEL + column)
                if self.has_zeros:
                    of_row = b.load(self.row_sums, self._row_sums_at(r, group) + i * LANES + column % LANES)
                    value = value - of_row * b.load(zero, column)
                at = sums + i * PANEL + column
                return b.store(self.sums, at, b.load(self.sums, at) + value * b.load(scale, column))

            return each(add)

        arrays = [b.alloc(scale), b.alloc(zero) if self.has_zeros else None]
        return b.seq(*arrays, each(keep)), line

    def _unit(self) -> float:
        """The value of the integer 1 in tiles."""
        return 1.0 if self.looks_up else self.weight.unit

    def _scale(self, panel: Index, group: Index, column: Index) -> TirExpr:
        """The scale of the sums of a column's group."""
        scale = self.weight.of_group(panel, group, column, zero=False)
        return scale if self._unit() == 1 else scale * tir.const(1 / self._unit(), "float32")

    def _zero(self, panel: Index, group: Index, column: Index) -> TirExpr:
        """The zero point of a column's group, in units of the integers in tiles."""
        zero = self.weight.of_group(panel, group, column, zero=True)
        return zero if self._unit() == 1 else zero * tir.const(self._unit(), "float32")

    def _kept(self, sums: Index, part: Part) -> Stmt | None:
        return None


def _even(steps: int, most: int) -> int:
    """Steps of each part where k is cut into as few as have at most `most`."""
    return -(-steps // -(-steps // most))
