"""Products in float32, by vectors, of panels that parts of bfloat16 are not exact for: the same sums as those of tiles, in the same places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hybrid_backend.engines.cpu.operands.amx_formats import PANEL, TileFormat
from torch_hybrid_backend.engines.cpu.schedules.amx.blocks import LANES
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile, partials
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index

# Rows that share what is made of a panel of B.
_ROWS = 8


class ExactProducts:
    """A panel of rows by one of columns, for the same `length` elements of k: `a` has the one as numbers, (32, k), `b` the other, (k, 32)."""

    def __init__(self, length: int, builder: Builder, printer: Printer) -> None:
        self.length, self.builder, self.printer = length, builder, printer
        self.a, self.b = (builder.local(length * PANEL, "float32", name) for name in ("a_numbers", "b_numbers"))

    def row(self, line: Index, at: Index, width: int, value: Callable[[Index], TirExpr]) -> Stmt:
        """A vector of a row of A: element `at` + lane is `value(lane)`."""
        store = self.builder.store
        return self.printer.vector_loop(width, lambda lane: store(self.a, line * self.length + at + lane, value(lane)))

    def columns(
        self, form: TileFormat, steps: int, packed: Callable[[Index, int, Index], TirExpr], is_plain: bool
    ) -> Stmt:
        """B of `steps` steps, of a plain panel or of the sums of parts. `packed(step, number, at)`: words from element `at` of a step on, of a
        part of the numbers: two elements along k of 16 columns."""
        b = self.builder

        def pair(position: tuple[Index, ...]) -> Stmt:
            s, j, line = position
            words = [
                packed(s, number, j * (form.panel_elements // 2) + line * form.depth) for number in range(form.parts)
            ]
            to = ((s * LANES + line) * 2) * PANEL + j * LANES
            halves = [_number(words, odd == 1, is_plain) for odd in (0, 1)]
            return b.seq(
                *[b.store_vector(self.b, to + odd * PANEL, number, LANES) for odd, number in enumerate(halves)]
            )

        return b.nest((steps, 2, LANES), pair, name="k")

    def products(self, elements: int, sums: TirBuffer, start: Index, has_sums: TirExpr | None) -> Stmt:
        """The products of `elements` of k, to the sums from `start` on, or added to them where there are some; None: there never are."""
        b = self.builder

        def rows(group: Index) -> Stmt:
            tile = RegisterTile(b, self.printer, _ROWS, PANEL // LANES, LANES, "float32")
            at = start + group * (_ROWS * PANEL)

            def a(i: int, k: Index) -> TirExpr:
                return b.load(self.a, (group * _ROWS + i) * self.length + k)

            def step(k: Index, way: int) -> Stmt | None:
                scalars = partials(lambda i, _: a(i, k), _ROWS)
                vectors = partials(lambda v, lane: b.load(self.b, k * PANEL + v * LANES + lane), PANEL // LANES)
                return tile.accumulate(scalars, vectors, way)

            restore = None if has_sums is None else b.when(has_sums, tile.restore(sums, at))
            steps = tile.steps(elements, step)
            return b.seq(tile.declare(), tile.clear(), restore, steps, tile.spill(sums, at))

        return b.loop(PANEL // _ROWS, rows, name="rows")


def _number(words: Sequence[TirExpr], is_odd: bool, is_plain: bool) -> TirExpr:
    """A vector of float32 from the halves of words: the sum of their numbers of bfloat16; of plain ones two halves of one number."""
    sixteen, upper = (tir.broadcast(tir.const(number, "uint32"), LANES) for number in (16, 0xFFFF0000))
    lower = tir.broadcast(tir.const(0xFFFF, "uint32"), LANES)

    def half(word: TirExpr) -> TirExpr:
        return word & upper if is_odd else word << sixteen

    if is_plain:
        low = words[1] >> sixteen if is_odd else words[1] & lower
        return tir.reinterpret(half(words[0]) | low, f"float32x{LANES}")
    total = tir.reinterpret(half(words[-1]), f"float32x{LANES}")
    for word in reversed(words[:-1]):
        total = tir.reinterpret(half(word), f"float32x{LANES}") + total
    return total
