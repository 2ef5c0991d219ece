"""Sizes that programs serve: as `Program.serves`, of many programs at once and in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_hybrid_backend.core.limits import MAX_ELEMENTS
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.native.description import Expression, expression, span
from torch_hybrid_backend.runtime.native.ops import SizeTable
from torch_hybrid_backend.runtime.plan_layout import StaticLayoutError
from torch_hybrid_backend.sizes.size import MAX_INTEGER, Interval, symbols

# A size, the least and the most that it is at all sizes that a program serves.
Limit = tuple[Expression, int, int]


@dataclass(frozen=True, slots=True)
class _Range:
    """The values of a symbol that a program serves. `symbol`: its position."""

    symbol: int
    least: int
    most: int


class ServedSizes:
    """Tells which of `programs` serve a set of sizes. `names`: the size symbols, in the order of their values.

    Raises StaticLayoutError for a program that depends on another symbol.
    """

    def __init__(self, programs: Sequence[Program], names: Sequence[str]) -> None:
        self._programs, self._names = tuple(programs), tuple(names)
        self._ranges = [_ranges(program, names) for program in programs]
        counts = [count for program in programs for count in _counts(program)]
        self._table = SizeTable(names, counts) if any(program.names for program in programs) else None

    def at(self, sizes: Sequence[int]) -> list[bool]:
        """True for each of the programs that serves these sizes."""
        if self._table is None:
            return [True] * len(self._ranges)
        try:
            counts = self._table.at(sizes)
        except HybridError:  # one does not fit in 64 bits
            values = dict(zip(self._names, sizes, strict=True))
            return [program.serves(values) for program in self._programs]
        return [
            most <= MAX_ELEMENTS and least >= 0 and all(r.least <= sizes[r.symbol] <= r.most for r in ranges)
            for most, least, ranges in zip(counts[::2], counts[1::2], self._ranges, strict=True)
        ]


def _ranges(program: Program, names: Sequence[str]) -> list[_Range]:
    found = _range_of(program)
    if unknown := [name for name in found if name not in names]:
        raise StaticLayoutError(f"the sizes {', '.join(unknown)} depend on data")
    return [_Range(names.index(name), least, most) for name, (least, most) in found.items()]


def _range_of(program: Program) -> dict[str, Interval]:
    """The least and the most value of each size symbol that the program serves."""
    found = dict.fromkeys(program.names, (-MAX_INTEGER - 1, MAX_INTEGER))
    own = ((symbol.name, symbol.low, symbol.high) for symbol in symbols(program.sizes_used))
    for name, least, most in (*program.ranges, *own):
        found[name] = max(found[name][0], least), min(found[name][1], most)
    return found


def limits(program: Program) -> tuple[Limit, ...]:
    """The limits of a program that depends on sizes; of others none."""
    if not program.names:
        return ()
    most, least = _counts(program)
    ranges = ((name, *found) for name, found in _range_of(program).items())
    positions = [(least, 0, 0)] if program.relied_on else []
    return (most, 0, MAX_ELEMENTS), *positions, *ranges


def _counts(program: Program) -> tuple[Expression, Expression]:
    """The most elements that the program counts, and the least of the sizes that are not negative where it serves."""
    buffers = {(spec.shape, spec.strides): span(spec) for spec in program.buffers}
    most = ["max", 0, *buffers.values(), *map(expression, program.counts)]
    return most, ["min", 0, *map(expression, program.relied_on)]
