"""Scans: running sums, products and extrema along the rows of a tile, all at once or chunk by chunk.

A chunk is scanned by `tl.associative_scan` and combined with what the chunks before it came to (the carry). n elements are read once and
written once; each reducing all before it, they were n * n / 2 operations.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Value
from torch_hybrid_backend.engines.triton.schedules.accumulators import Rows, neutral
from torch_hybrid_backend.loops.kernels import Stage

# Combiner -> the function of two elements.
_FUNCTIONS = {
    "sum": "plus",
    "prod": "multiply",
    "max": "larger",
    "min": "smaller",
    "logaddexp": "log_add_exp",
    "argmax": "later_largest",
    "argmin": "later_smallest",
}


class Scan:
    """A scan of a row kernel: `of` a whole row; or `begin`, and `add` for each chunk in order."""

    def __init__(self, stage: Stage, printer: Printer, rows: Rows) -> None:
        self.stage = stage
        self._printer = printer
        self._rows = rows
        self._type = DTYPES[stage.value.dtype][0]
        self._function = _FUNCTIONS[stage.combiner]
        self._is_position = stage.combiner.startswith("arg")
        self._carry = [printer.lines.name("carry") for _ in range(2 if self._is_position else 1)]
        printer.functions.add(self._function)

    def of(self, value: Value) -> Value:
        """`value`: of a whole row; what lies behind its end reaches nothing before it."""
        return self._result(self._scanned(value))

    def begin(self) -> None:
        add, shape = self._printer.lines.add, self._printer.tile.shape(frozenset((self._rows.row,)))
        combiner = {"logaddexp": "max"}.get(self.stage.combiner, self.stage.combiner.removeprefix("arg"))
        add(f"{self._carry[0]} = tl.full({shape}, {neutral(combiner, self.stage.value.dtype)}, {self._type})")
        if self._is_position:
            add(f"{self._carry[1]} = tl.zeros({shape}, {self._position_type})")

    def add(self, value: Value) -> Value:
        printer, rows = self._printer, self._rows
        parts = self._scanned(value)
        if self._is_position:
            names = [printer.lines.name() for _ in parts]
            operands = ", ".join((*self._carry, *(part.text for part in parts)))
            printer.lines.add(f"{', '.join(names)} = {self._function}({operands})")
            found = [Value.along(name, 0, 1) for name in names]
        else:
            found = [printer.let(f"{self._function}({self._carry[0]}, {parts[0].text})", frozenset((0, 1)))]
        # The last of the chunk; that of a chunk which is not full is needed no more.
        last = f"({printer.tile.arange(rows.element)} == COLUMNS - 1)"
        for carry, part in zip(self._carry, found, strict=True):
            chosen = f"tl.sum(tl.where({last}, {part.text}, 0), {rows.element}, keep_dims=True)"
            printer.lines.add(f"{carry} = {chosen}.to({carry}.dtype)")
        return self._result(found)

    def _result(self, found: list[Value]) -> Value:
        if self._is_position:
            return self._printer.let(f"{found[1].text}.to(tl.int64)", frozenset((0, 1)))
        return found[0]

    @property
    def _position_type(self) -> str:
        return "tl.int64" if self._rows.is_wide else "tl.int32"

    def _scanned(self, value: Value) -> list[Value]:
        """The scan of one block; of a position, first the elements."""
        printer, element = self._printer, self._rows.element
        block = printer.full(value)
        if not self._is_position:
            text = f"tl.associative_scan({block.text}, {element}, {self._function})"
            return [printer.let(text, frozenset((0, 1)))]
        at = printer.full(self._rows.position)
        names = [printer.lines.name() for _ in range(2)]
        printer.lines.add(
            f"{', '.join(names)} = tl.associative_scan(({block.text}, {at.text}), {element}, {self._function})"
        )
        return [Value.along(name, 0, 1) for name in names]
