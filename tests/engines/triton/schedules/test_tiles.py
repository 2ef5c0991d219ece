"""Parts that the schedules share."""

from __future__ import annotations

from torch_hybrid_backend.engines.triton.printer import Printer, Tile
from torch_hybrid_backend.engines.triton.schedules.tiles import (
    axis,
    block_for,
    blocks,
    flattened,
    power_of_2,
    program_start,
)
from torch_hybrid_backend.engines.triton.source import Lines
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.sizes.size import symbol


def test_flattened_loops_are_taken_apart_again() -> None:
    """Addresses of what lies together become the flat index itself; loops of one iteration are 0."""
    i, one, j = LoopVar("i", 4), LoopVar("one", 1), LoopVar("j", 8)
    flat, env = flattened([i, one, j], "k")
    assert flat.extent == 32
    assert env[one] == 0
    assert env[i] * 8 + env[j] == index_of(flat)


def test_blocks() -> None:
    assert [power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert (blocks(10, 4), block_for(10, 64), block_for(10, 8), block_for(3, 64, 16), block_for(100, 48)) == (
        3,
        16,
        8,
        16,
        32,
    )
    assert str(blocks(symbol("s0", 10), 4)) == str((symbol("s0", 10) + 3) // 4)


def test_an_axis_is_bounded_where_its_block_is_too_long() -> None:
    printer = Printer(Lines(), [], [], {})
    tile = Tile(("ROWS", "COLUMNS"))
    with axis(printer, tile, 1, LoopVar("j", 24), program_start(printer), 8) as bounds:
        assert bounds == {}
    with axis(printer, tile, 0, LoopVar("i", 20), "0", 8) as bounds:
        assert bounds[0].text == "i_in"
    assert printer.lines.text.splitlines() == [
        "    j = tl.program_id(0) + tl.arange(0, COLUMNS)[None, :]",
        "    i = 0 + tl.arange(0, ROWS)[:, None]",
        "    i_in = i < 20",
    ]
