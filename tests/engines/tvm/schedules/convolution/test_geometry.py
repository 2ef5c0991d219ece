"""The geometry of a convolution: its axes, and which columns read inside the input."""

from __future__ import annotations

from torch_hybrid_backend.engines.tvm.schedules.convolution.geometry import Axis, column_tiles


def test_column_tiles_say_which_columns_read_inside() -> None:
    """Borders have tiles of their own, the tiles between share one."""
    found = column_tiles(Axis(size=40, out=40, kernel=3, stride=1, padding=1, dilation=1), 5)
    assert [(t.first, t.count, t.columns) for t in found] == [(0, 1, 8), (8, 3, 8), (32, 1, 8)]
    assert found[0].inside[0] == (False,) + (True,) * 7
    assert found[2].inside[2] == (True,) * 7 + (False,)
    assert all(all(inside) for inside in found[1].inside)
