"""The tiling of a direct convolution, as plain choices."""

from __future__ import annotations

import pytest

from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, parts_of
from torch_hybrid_backend.engines.cpu.schedules.convolution.tiling import (
    Tiling,
    channel_block,
    choose_tiling,
    reads_one_long_row,
)
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import max_rows
from torch_hybrid_backend.errors import ScheduleError

_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


@pytest.mark.parametrize(
    ("case", "is_one"),
    [
        (Case((1, 32, 7, 9), 32, (1, 1)), True),
        (Case((1, 32, 7, 9), 32, (1, 1), blocked_x=False), True),
        (Case((1, 32, 7, 9), 32, (1, 1), 2), False),
        (Case((1, 32, 7, 9), 32, (1, 1), padding=1), False),
        (Case((1, 32, 7, 9), 32, (3, 3)), False),
        (Case((1, 32, 7, 9), 32, (3, 3), padding=1), False),
        (Case((1, 32, 1, 9), 32, (1, 1)), False),  # it is one already
    ],
)
def test_one_long_row(case: Case, is_one: bool) -> None:
    """Pixels are one long row where a pixel's place needs no division into row and column."""
    assert reads_one_long_row(parts_of(case, _AVX512)) == is_one


@pytest.mark.parametrize(
    ("case", "channels"),
    [
        (Case((1, 48, 7, 9), 32, (3, 3)), 16),
        (Case((1, 48, 7, 9), 32, (3, 3), blocked_x=False), 48),
        (Case((1, 96, 7, 9), 32, (3, 3), groups=2), 16),
        (Case((1, 20, 7, 9), 32, (3, 3), groups=2), 10),  # a group's ten channels lie in two blocks
        (Case((1, 5, 7, 9), 32, (3, 3)), 5),
    ],
)
def test_channels_that_lie_together(case: Case, channels: int) -> None:
    """A block's, or all where nothing is blocked or groups do not fill blocks."""
    assert channel_block(parts_of(case, _AVX512)) == channels


def _chosen(case: Case, target: Target, rank: int = 0) -> Tiling:
    parts = parts_of(case, target, rank)
    return choose_tiling(parts, parts.rows, parts.columns, is_flat=False)


def test_ranks_are_different_ways_until_there_are_no_more() -> None:
    """Every rank is another tiling that fits the registers; past the last one the kernel is refused."""
    case = Case((1, 64, 28, 28), 128, (3, 3), padding=1)
    parts = parts_of(case, _AVX512)
    choose_tiling(parts, parts.rows, parts.columns, is_flat=False)
    ways = parts.builder.ways
    found = [_chosen(case, _AVX512, rank) for rank in range(ways)]
    with pytest.raises(ScheduleError, match=f"has {ways} ways"):
        _chosen(case, _AVX512, ways)
    assert len(set(found)) == ways > 1
    for tiling in found:
        assert -(-28 // tiling.column_tiles) <= max_rows(tiling.blocks.size, _AVX512)


def test_small_images_get_several_blocks_of_channels() -> None:
    """A row of seven columns is too few accumulators to hide the latency of a multiply-add."""
    assert _chosen(Case((1, 64, 7, 7), 64, (3, 3), padding=1), _AVX512).blocks.size > 1


def test_weights_that_do_not_fit_the_cache_are_cut_into_chunks() -> None:
    """A chunk is whole blocks of channels and at most a quarter of the cache; where all fits half of it there is one."""
    case = Case((1, 512, 14, 14), 64, (3, 3), padding=1)
    small = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 256 << 10)
    tiling = _chosen(case, small)
    assert 0 < tiling.chunk < 512
    assert tiling.chunk % 16 == 512 % tiling.chunk == 0
    assert tiling.chunk * tiling.blocks.size * 16 * 9 * 4 <= small.l2_bytes // 4
    assert 0 < tiling.chunk_rows <= 14
    whole = _chosen(Case((1, 32, 14, 14), 64, (3, 3), padding=1), small)
    assert (whole.chunk, whole.chunk_rows) == (32, 0)
