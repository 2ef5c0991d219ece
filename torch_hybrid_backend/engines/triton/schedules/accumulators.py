"""Accumulators: one reduction of a row kernel as lines of its program, of a whole block at once (`of`) or in chunks (`begin`, `add`, `end`).

In chunks each point of the tile has an accumulator of its own: what lies a chunk apart is combined where it is, and the points of a row
only at the end, so that threads need not wait for each other inside the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.engines.triton.functions import DTYPES, template
from torch_hybrid_backend.engines.triton.printer import Printer, Value, literal
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.loops.kernels import Stage
from torch_hybrid_backend.loops.ops import INTEGER_BITS, is_float


@dataclass(frozen=True, slots=True)
class Rows:
    """The tile that rows are reduced in. `row`, `element`: which of its dimensions is which. `position`: the number of an element in its row,
    of 64 bits where `is_wide`. In a loop over chunks: `chunk` is how many came before, `count` how many elements the loop reads of a row."""

    row: int
    element: int
    position: Value
    is_wide: bool = False
    chunk: str = ""
    count: str = ""

    @property
    def shape(self) -> str:
        return "[ROWS, COLUMNS]" if self.row == 0 else "[COLUMNS, ROWS]"

    @property
    def nowhere(self) -> int:
        """A position behind all others."""
        return (1 << (63 if self.is_wide else 31)) - 1


class Accumulator:
    """Any combiner of its own: "sum", "max", "argmin" ..."""

    order = 1  # among those of one pass: some read what others hold before the chunk, or after it

    def __init__(self, stage: Stage, printer: Printer, rows: Rows) -> None:
        self.stage = stage
        self._printer = printer
        self._rows = rows
        self.element = stage.value  # what `add` is given the value of
        self._dtype = stage.value.dtype
        self._type = DTYPES[self._dtype][0]
        self._combiner = stage.combiner.removeprefix("arg")
        self._is_position = stage.combiner.startswith("arg")
        self.name = printer.lines.name("acc")

    def of(self, value: Value, inside: Value | None) -> Value:
        """The result of a whole row. `inside`: which of the block's points exist."""
        if inside is not None:
            masked = f"tl.where({inside.text}, {value.text}, tl.full([], {self._neutral()}, {self._type}))"
            value = self._printer.let(masked, value.dims)
        if not self._is_position:
            return self._combined(value.text)
        at = self._printer.full(self._rows.position)
        return self._first(value.text, at.text, inside)

    def begin(self) -> None:
        add, shape = self._printer.lines.add, self._rows.shape
        add(f"{self.name} = tl.full({shape}, {self._neutral()}, {self._type})")
        if self._is_position:
            kind = "tl.int64" if self._rows.is_wide else "tl.int32"
            add(f"{self.name}_at = tl.full({shape}, {self._rows.nowhere}, {kind})")

    def add(self, value: Value, inside: Value | None) -> None:
        add, name, new, taken = self._printer.lines.add, self.name, value.text, inside
        if self._is_position:
            better = f"({name}_at == {self._rows.nowhere}) | {self._is_better(new, name)}"
            taken = self._printer.let(better if inside is None else f"({better}) & {inside.text}")
            add(f"{name}_at = tl.where({taken.text}, {self._rows.position.text}, {name}_at)")
        else:
            new = self._pairwise(name, new)
        add(f"{name} = {new}" if taken is None else f"{name} = tl.where({taken.text}, {new}, {name})")

    def end(self) -> Value:
        if self._is_position:
            return self._first(self.name, f"{self.name}_at", None)
        return self._combined(self.name)

    def _neutral(self) -> str:
        return neutral(self._combiner, self._dtype)

    def _pairwise(self, a: str, b: str) -> str:
        match self._combiner:
            case "sum":
                return f"{a} + {b}"
            case "prod":
                return f"{a} * {b}"
            case "any":
                return f"{a} | {b}"
            case "all":
                return f"{a} & {b}"
        if is_float(self._dtype):
            return f"{self._function()}({a}, {b})"
        return f"tl.{self._combiner}imum({a}, {b})"

    def _function(self) -> str:
        """The function that combines two floats."""
        name = {"prod": "multiply", "max": "larger", "min": "smaller"}[self._combiner]
        self._printer.functions.add(name)
        return name

    def _combined(self, block: str) -> Value:
        """The elements of each row of a block combined."""
        along = f"{self._rows.element}, "
        match self._combiner:
            case "sum":
                text = f"{self._summed(block)}.to({self._type})"
            case "any" | "all":
                extreme = "max" if self._combiner == "any" else "min"
                text = f"tl.{extreme}({block}.to(tl.int32), {along}keep_dims=True) != 0"
            case "max" | "min" if not is_float(self._dtype):
                text = f"tl.{self._combiner}({block}.to({self._widest()}), {along}keep_dims=True).to({self._type})"
            case _:
                text = f"tl.reduce({block}, {along}{self._function()}, keep_dims=True)"
        return self._per_row(text)

    def _summed(self, block: str) -> str:
        return f"tl.sum({block}, {self._rows.element}, keep_dims=True)"

    def _per_row(self, text: str) -> Value:
        return self._printer.let(text, frozenset((self._rows.row,)))

    def _widest(self) -> str:
        return "tl.int32" if self._dtype in ("bool", "int8", "uint8", "int16") else self._type

    def _is_better(self, new: str, old: str) -> str:
        """True if an element takes the place of the most extreme one so far; a NaN is more extreme than all."""
        sign = ">" if self._combiner == "max" else "<"
        if not is_float(self._dtype):
            return f"({new} {sign} {old})"
        return f"({new} {sign} {old}) | (({new} != {new}) & ({old} == {old}))"

    def _first(self, values: str, positions: str, inside: Value | None) -> Value:
        """The least of the positions at which a row has its most extreme value."""
        printer, everything = self._printer, frozenset((0, 1))
        top = self._combined(values).text
        hit = f"({values} == {top})"
        if is_float(self._dtype):
            hit = f"({hit} | (({values} != {values}) & ({top} != {top})))"
        if inside is not None:
            hit = f"{hit} & {inside.text}"
        hits = printer.let(hit, everything)
        at = f"tl.where({hits.text}, {positions}, {self._rows.nowhere})"
        return self._per_row(f"tl.min({at}, {self._rows.element}, keep_dims=True).to(tl.int64)")


class Squares(Accumulator):
    """The squared distances from the mean, beside the sum of the same elements: "squares" of `one_pass`.

    With S the sum of the first n elements, the n-th adds (x - S / n)^2 * n / (n - 1). Where parts of a row have means of their own, what
    these are apart is added in the end.
    """

    order = 2

    def __init__(self, base: Accumulator, stage: Stage, printer: Printer, rows: Rows) -> None:
        super().__init__(stage, printer, rows)
        self.element = base.element
        self._sum = base.name

    def add(self, value: Value, inside: Value | None) -> None:
        let, number = self._printer.let, self._number
        far = let(f"{value.text} - {self._sum} * (1 / {number(f'{self._rows.chunk} + 1')})")
        growth = f"{number(f'{self._rows.chunk} + 1')} / {number(f'max({self._rows.chunk}, 1)')}"
        new = f"{self.name} + {far.text} * {far.text} * ({growth})"
        self._printer.lines.add(
            f"{self.name} = {new}" if inside is None else f"{self.name} = tl.where({inside.text}, {new}, {self.name})"
        )

    def end(self) -> Value:
        let, tile, count = self._printer.let, frozenset((0, 1)), self._rows.count
        columns = self._printer.tile.arange(self._rows.element)
        counts = let(f"(({count}) // COLUMNS + ({columns} < ({count}) % COLUMNS)).to({self._type})", tile)
        mean = let(f"{self._summed(self._sum)} / {self._number(f'max({count}, 1)')}", tile)
        far = let(f"tl.where({counts.text} > 0, {self._sum} / {counts.text} - {mean.text}, 0)", tile)
        return self._per_row(self._summed(f"{self.name} + {counts.text} * {far.text} * {far.text}"))

    def _number(self, text: str) -> str:
        """A whole number as a float."""
        return f"({text} + tl.zeros([], {self._type}))"


class Exponentials(Accumulator):
    """The sum of the exponentials beside the maximum of the same elements: "exponentials" of `one_pass`.

    One of exp(m - m') and exp(x - m') is always 1, m' being the larger one of m and x: an element costs one exponential. `centre`: what the
    sum is relative to in the end, over rows; without it the row's maximum, which may be infinite.
    """

    order = 0

    def __init__(self, base: Accumulator, centre: Expr | None, stage: Stage, printer: Printer, rows: Rows) -> None:
        super().__init__(stage, printer, rows)
        self.element = base.element
        self._base = base
        self._centre = centre

    def add(self, value: Value, inside: Value | None) -> None:
        top, name, x = self._base.name, self.name, value.text
        # inf - inf is NaN.
        factor = self._printer.let(f"tl.where({x} == {top}, 1, {self._exp(f'-tl.abs({x} - {top})')})")
        new = f"tl.where({x} > {top}, {name} * {factor.text} + 1, {name} + {factor.text})"
        self._printer.lines.add(f"{name} = {new if inside is None else f'tl.where({inside.text}, {new}, {name})'}")

    def end(self) -> Value:
        top = self._base.name
        if self._centre is not None:
            factor = self._exp(f"{top} - {self._printer.expr(self._centre).text}")
        else:
            most = self._base.end().text
            factor = f"tl.where({top} == {most}, 1, {self._exp(f'{top} - {most}')})"
        return self._per_row(self._summed(f"{self.name} * {factor}"))

    def _exp(self, text: str) -> str:
        return template("exp", self._dtype, self._dtype).format(text)


def neutral(combiner: str, dtype: str) -> str:
    """A literal that changes nothing it is combined with."""
    match combiner:
        case "sum" | "any":
            return literal(0, dtype)
        case "prod" | "all":
            return literal(1, dtype)
    lowest = combiner == "max"
    if is_float(dtype):
        return "float('-inf')" if lowest else "float('inf')"
    if dtype == "bool":
        return str(not lowest)
    if dtype == "uint8":
        return "0" if lowest else "255"
    bits = INTEGER_BITS[dtype]
    return str(-(1 << (bits - 1)) if lowest else (1 << (bits - 1)) - 1)
