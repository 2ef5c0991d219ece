"""The geometry of a convolution: its axes, and which columns read inside the input."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.engines.cpu.schedule_runner import HOST
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, make
from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import (
    Axis,
    axes,
    column_tiles,
    is_wide,
    open_column_tiles,
)
from torch_hybrid_backend.loops.index import as_index
from torch_hybrid_backend.sizes.size import Dim, symbol


def test_column_tiles_say_which_columns_read_inside() -> None:
    """Borders have tiles of their own, the tiles between share one."""
    found = column_tiles(Axis(size=40, out=40, kernel=3, stride=1, padding=1, dilation=1), 5)
    assert [(t.first, t.count, t.columns) for t in found] == [(0, 1, 8), (8, 3, 8), (32, 1, 8)]
    assert found[0].inside[0] == (False,) + (True,) * 7
    assert found[2].inside[2] == (True,) * 7 + (False,)
    assert all(all(inside) for inside in found[1].inside)


AXES = [
    Axis(size=8, out=8, kernel=3, stride=1, padding=1, dilation=1),
    Axis(size=15, out=7, kernel=5, stride=2, padding=1, dilation=1),
    Axis(size=9, out=9, kernel=3, stride=1, padding=4, dilation=4),
    Axis(size=3, out=7, kernel=3, stride=1, padding=3, dilation=1),
    Axis(size=1, out=1, kernel=1, stride=1, padding=0, dilation=1),
]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("axis", AXES)
def test_column_tiles_cover_every_column_once(axis: Axis[int], parts: int) -> None:
    """In order, and each column with what it reads inside; neighbours differ in something."""
    found = column_tiles(axis, parts)
    column = 0
    for tiles in found:
        assert tiles.first == column
        for number in range(tiles.count):
            assert tiles.start(as_index(number)) == column
            for tap in range(axis.kernel):
                assert tiles.inside[tap] == tuple(axis.inside(column + c, tap) for c in range(tiles.columns))
            column += tiles.columns
    assert column == axis.out
    assert all((a.columns, a.inside) != (b.columns, b.inside) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("axis", AXES)
def test_the_interior_reads_no_padding(axis: Axis[int]) -> None:
    """Output positions whose windows lie inside the input, all of them."""
    first, end = axis.interior()
    inside = [o for o in range(axis.out) if all(axis.inside(o, tap) for tap in range(axis.kernel))]
    assert list(range(first, end)) == inside


@pytest.mark.parametrize("axis", AXES)
def test_the_width_that_neighbours_read(axis: Axis[int]) -> None:
    """`width` reaches from the first position that is read to the last; `in_order` has every tap once, those that share positions together."""
    places = [axis.place(out, tap) for out in range(3) for tap in range(axis.kernel)]
    assert axis.width(3) == max(places) - min(places) + 1
    order = axis.in_order()
    assert sorted(order) == list(range(axis.kernel))
    remainders = [tap * axis.dilation % axis.stride for tap in order]
    assert remainders == sorted(remainders)
    assert axis.in_order([0]) == [0]


def test_wide_kernels_leave_the_test_to_the_loop() -> None:
    """More than fifteen columns are not unrolled: tiles are alike where they are as large."""
    axis = Axis(size=40, out=40, kernel=16, stride=1, padding=8, dilation=1)
    assert is_wide(axis)
    assert not is_wide(dataclasses.replace(axis, kernel=15))
    assert [(t.first, t.count, t.columns, t.inside) for t in column_tiles(axis, 3)] == [(0, 1, 14, ()), (14, 2, 13, ())]


@pytest.mark.parametrize("axis", AXES)
def test_positions_read(axis: Axis[int]) -> None:
    """`source` says where, `inside` whether it exists, `shared` how many positions several columns read."""
    reads: dict[int, set[int]] = {}
    for out, tap in itertools.product(range(axis.out), range(axis.kernel)):
        position = axis.source(as_index(out), tap).const
        assert position == out * axis.stride - axis.padding + tap * axis.dilation
        assert axis.inside(out, tap) == (position in range(axis.size))
        reads.setdefault(position, set()).add(out)
    assert axis.shared(axis.out) == sum(len(outs) > 1 for outs in reads.values())


def test_pointwise_axes() -> None:
    """A pointwise axis reads one element each, at its own place."""
    one = Axis(size=7, out=7, kernel=1, stride=1, padding=0, dilation=1)
    assert one.is_pointwise
    for change in ({"kernel": 3, "out": 5}, {"stride": 2, "out": 4}, {"padding": 1, "out": 9}):
        assert not dataclasses.replace(one, **change).is_pointwise


def test_axes_of_a_kernel() -> None:
    """(rows, columns); a 1-D convolution is one of height 1."""
    kernel, _, _ = make(Case((1, 8, 11, 19), 16, (5, 3), 2, (2, 0)), HOST)
    assert axes(kernel) == (Axis(11, 6, 5, 2, 2, 1), Axis(19, 9, 3, 2, 0, 1))
    kernel, _, _ = make(Case((1, 8, 50), 12, (5,), 2, 2, 2), HOST)
    assert axes(kernel) == (Axis(1, 1, 1, 1, 0, 1), Axis(50, 23, 5, 2, 2, 2))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [(3, 1, 1, 1), (7, 2, 3, 1), (3, 1, 4, 4), (5, 3, 0, 1), (1, 2, 0, 1)]
)
def test_few_columns_of_unknown_sizes_are_tested(kernel: int, stride: int, padding: int, dilation: int) -> None:
    """Columns that are said to read inside the image do, wherever a tile lies and whatever the size is; none is said to read outside."""

    def out(size: Dim) -> Dim:
        return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1

    width = symbol("width", 20)
    axis = Axis(width, out(width), kernel, stride, padding, dilation)
    for columns in (1, 4, 9):
        (tiles,) = open_column_tiles(axis, columns)
        unknown = sum(inside is None for tap in tiles.inside for inside in tap)
        assert unknown <= 2 * kernel * (padding // stride + 1)
        assert (unknown > 0) == (padding > 0)
        for size in range(1, 40):
            known = Axis(size, out(size), kernel, stride, padding, dilation)
            for first in range(known.out - columns + 1):
                for tap, column in itertools.product(range(kernel), range(columns)):
                    assert tiles.inside[tap][column] is None or known.inside(first + column, tap)
