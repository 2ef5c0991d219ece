"""The geometry of a convolution: sizes in two dimensions, and which output columns read inside the input.

A 1-D convolution is one of height 1. Padding never costs a branch in an inner loop: output columns are cut into tiles, and for each tile
and each kernel column it is known beforehand which of the tile's columns lie inside the input. Tiles that are alike share their code. Where
sizes are only known at run time all tiles are alike, and the few columns that may read padding are tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.tile_sizes import split_into
from torch_hybrid_backend.engines.cpu.weights import Weight
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, known_int, known_less, size_hint

# Wider kernels would make more code than the instruction cache holds (14 columns x 16 taps x 2 tiles of 8 bytes and more each).
_UNROLLED_COLUMNS = 15


Extent_co = TypeVar("Extent_co", bound=Dim, covariant=True)


@dataclass(frozen=True, slots=True)
class Axis(Generic[Extent_co]):
    """A spatial dimension: input and output size, kernel size, stride, padding, dilation (elements).

    `Axis[int]` has known sizes; those of `Axis[Dim]` may only be known at run time.
    """

    size: Extent_co
    out: Extent_co
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def is_open(self) -> bool:
        """True if a size is only known at run time."""
        return isinstance(self.size, Size) or isinstance(self.out, Size)

    def typical(self) -> Axis[int]:
        """The dimension with typical sizes, for choices that affect speed; its own where they are known."""
        size, out = (max(1, size_hint(n)) if isinstance(n, Size) else n for n in (self.size, self.out))
        return Axis(size, out, self.kernel, self.stride, self.padding, self.dilation)

    def known(self) -> Axis[int]:
        """The dimension, whose sizes are known. Raises UndecidedSizeError where they are not."""
        size, out = known_int(self.size), known_int(self.out)
        return Axis(size, out, self.kernel, self.stride, self.padding, self.dilation)

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

    def interior(self: Axis[int]) -> tuple[int, int]:
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

    def inside(self: Axis[int], out: int, tap: int) -> bool:
        """True if that input position exists."""
        return 0 <= out * self.stride + tap * self.dilation - self.padding < self.size

    def always_inside(self, columns: int, column: int, tap: int) -> bool:
        """True if, at every size, what a column of a tile of `columns` reads at a tap exists; tiles begin and end within the output."""
        first = self.place(column, tap) - self.padding
        if first < 0:
            return False
        behind = self._behind()
        if behind is None:
            return known_less((self.out - columns) * self.stride + first, self.size)
        # The last position that the last output reads is at most `behind` - 1 behind the input's end.
        return behind - (self.kernel - 1 - tap) * self.dilation - (columns - 1 - column) * self.stride <= 0

    def _behind(self) -> int | None:
        """The padding behind the input, if it is the one that the output's size follows from."""
        taken = (self.kernel - 1) * self.dilation + 1 - self.padding
        found = range(self.padding + self.kernel * self.dilation)
        return next((behind for behind in found if (self.size + behind - taken) // self.stride + 1 == self.out), None)


@dataclass(frozen=True, slots=True)
class ColumnTiles:
    """`count` neighbouring tiles of `columns` output columns, the first starting at `first`, that need the same code.

    `inside[tap][column]`: whether a column of the tile reads inside the input at that kernel column; None: only the running kernel knows.
    `out`: the output columns, where they are only known at run time; the last tile then ends with them, and may overlap the one before.
    """

    first: int
    count: Dim
    columns: int
    inside: tuple[tuple[bool | None, ...], ...]
    out: Size | None = None

    def start(self, tile: Index) -> Index:
        """The first column of a tile, of known output columns."""
        return tile * self.columns + self.first


def is_wide(axis: Axis[Dim]) -> bool:
    """True if the kernel is too wide to be unrolled: its columns are then tested as the kernel runs."""
    return axis.kernel > _UNROLLED_COLUMNS


def column_tiles(axis: Axis[int], parts: int) -> list[ColumnTiles]:
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


def open_column_tiles(axis: Axis[Dim], columns: int) -> list[ColumnTiles]:
    """The output columns, whose number is only known at run time, in tiles of `columns`."""
    inside = tuple(
        tuple(True if axis.always_inside(columns, column, tap) else None for column in range(columns))
        for tap in range(axis.kernel)
    )
    assert isinstance(axis.out, Size)
    return [ColumnTiles(0, ceil_div(axis.out, columns), columns, () if is_wide(axis) else inside, axis.out)]


def axes(kernel: CpuConvKernel[Weight]) -> tuple[Axis[Dim], Axis[Dim]]:
    """(rows, columns) of a 1-D or 2-D convolution kernel."""
    sizes = [variable.extent for variable in kernel.x_vars[2:]]
    outs = [variable.extent for variable in kernel.domain[2:]]
    found: list[Axis[Dim]] = [
        Axis(*values)
        for values in zip(sizes, outs, kernel.kernel, kernel.stride, kernel.padding, kernel.dilation, strict=True)
    ]
    one: Axis[Dim] = Axis(1, 1, 1, 1, 0, 1)
    rows, columns = ([one, *found])[-2:]
    return rows, columns
