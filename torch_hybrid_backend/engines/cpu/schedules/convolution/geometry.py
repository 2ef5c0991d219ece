"""The geometry of a convolution: sizes in two dimensions, and which output columns read inside the input.

A 1-D convolution is one of height 1. Padding never costs a branch in an inner loop: output columns are cut into tiles, and for each tile
and each kernel column it is known beforehand which of the tile's columns lie inside the input. Tiles that are alike share their code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.tile_sizes import split_into
from torch_hybrid_backend.engines.cpu.weights import Weight
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.sizes.size import known_int

# Wider kernels would make more code than the instruction cache holds (14 columns x 16 taps x 2 tiles of 8 bytes and more each).
_UNROLLED_COLUMNS = 15


@dataclass(frozen=True, slots=True)
class Axis:
    """A spatial dimension: input and output size, kernel size, stride, padding, dilation (elements)."""

    size: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def source(self, out: Index, tap: Index | int) -> Index:
        """The input position that output position `out` reads at kernel position `tap`; may lie outside."""
        return out * self.stride + tap * self.dilation - self.padding

    @property
    def is_pointwise(self) -> bool:
        return self.kernel == 1 and self.stride == 1 and self.padding == 0 and self.size == self.out

    def in_order(self, taps: Iterable[int] | None = None) -> list[int]:
        """Kernel positions, all or some, those first that share input positions: each is then needed for few of them."""
        return sorted(
            range(self.kernel) if taps is None else taps, key=lambda tap: (tap * self.dilation % self.stride, tap)
        )

    def interior(self) -> tuple[int, int]:
        """The first output position whose window lies inside the input, and the one behind the last; equal where there is none."""
        first = -(-self.padding // self.stride)
        end = (self.size - self.place(0, self.kernel - 1) - 1 + self.padding) // self.stride + 1
        return (first, min(end, self.out)) if first < end else (0, 0)

    def place(self, out: int, tap: int) -> int:
        """The input position that output position `out` reads at a kernel position, counted from the first that position 0 reads."""
        return out * self.stride + tap * self.dilation

    def width(self, outs: int) -> int:
        """The input positions from the first to the last that `outs` neighbouring output positions read."""
        return self.place(outs - 1, self.kernel - 1) + 1

    def shared(self, outs: int) -> int:
        """The number of input positions that several of `outs` neighbouring output positions read."""
        reads = Counter(o * self.stride + t * self.dilation for o in range(outs) for t in range(self.kernel))
        return sum(readers > 1 for readers in reads.values())

    def inside(self, out: int, tap: int) -> bool:
        """True if that input position exists."""
        return 0 <= out * self.stride + tap * self.dilation - self.padding < self.size


@dataclass(frozen=True, slots=True)
class ColumnTiles:
    """`count` neighbouring tiles of `columns` output columns, the first starting at `first`, that need the same code.

    `inside[tap][column]`: whether a column of the tile reads inside the input at that kernel column.
    """

    first: int
    count: int
    columns: int
    inside: tuple[tuple[bool, ...], ...]

    def start(self, tile: Index) -> Index:
        """The first column of a tile."""
        return tile * self.columns + self.first


def is_wide(axis: Axis) -> bool:
    """True if the kernel is too wide to be unrolled: its columns are then tested as the kernel runs."""
    return axis.kernel > _UNROLLED_COLUMNS


def column_tiles(axis: Axis, parts: int) -> list[ColumnTiles]:
    """The output columns in `parts` tiles as equal as can be, neighbours that are alike together.

    For wide kernels `inside` is empty, and tiles are alike where they are as large.
    """
    split = split_into(axis.out, parts)
    if is_wide(axis):
        return [ColumnTiles(split.start(first), count, size, ()) for first, count, size in split.runs()]
    found: list[ColumnTiles] = []
    for part in range(split.parts):
        first = split.start(part)
        columns = split.size - (part >= split.large)
        inside = tuple(
            tuple(axis.inside(first + column, tap) for column in range(columns)) for tap in range(axis.kernel)
        )
        last = found[-1] if found else None
        if last is not None and (last.columns, last.inside) == (columns, inside):
            found[-1] = ColumnTiles(last.first, last.count + 1, columns, inside)
        else:
            found.append(ColumnTiles(first, 1, columns, inside))
    return found


def axes(kernel: CpuConvKernel[Weight]) -> tuple[Axis, Axis]:
    """(rows, columns) of a 1-D or 2-D convolution kernel."""
    sizes = [known_int(variable.extent) for variable in kernel.x_vars[2:]]
    outs = [known_int(variable.extent) for variable in kernel.domain[2:]]
    found = [
        Axis(*values)
        for values in zip(sizes, outs, kernel.kernel, kernel.stride, kernel.padding, kernel.dilation, strict=True)
    ]
    one = Axis(1, 1, 1, 1, 0, 1)
    rows, columns = ([one, *found])[-2:]
    return rows, columns
