"""Tile sizes: plain arithmetic on shapes and the target."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engines.cpu.schedule_runner import HOST
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import (
    Split,
    copies_panels,
    lane_chunks,
    max_rows,
    output_block,
    reads_unpacked,
    split_at_most,
    split_into,
    strips,
    tile_n,
)
from torch_hybrid_backend.sizes.size import symbol


@pytest.mark.parametrize(
    ("images", "rows", "cores", "count"), [(1, 56, 2, 2), (1, 3, 8, 3), (2, 56, 8, 4), (8, 56, 2, 1), (3, 56, 2, 2)]
)
def test_strips_are_the_fewest_that_keep_all_cores_busy(images: int, rows: int, cores: int, count: int) -> None:
    """Each strip repeats rows of its neighbour."""
    assert strips(images, rows, dataclasses.replace(HOST, cores=cores)) == count


@pytest.mark.parametrize(
    ("m", "k", "n", "copies"),
    [
        (128, 768, 768, True),
        (197, 3072, 768, True),  # rows need not fill vectors
        (63, 768, 768, False),  # too few rows share a copy
        (128, 768, 776, False),  # the last panel is not whole
        (128, 768, 704, False),  # fewer than a dozen panels a core
    ],
)
def test_which_products_copy_panels(m: int, k: int, n: int, copies: bool) -> None:
    """Enough rows, whole panels, panels enough for every core."""
    target = Target(HOST.mcpu, HOST.cpu, HOST.features, 16, 2, 32 << 10, 1 << 20)
    assert copies_panels(m, k, n, target) == copies
    assert not copies_panels(symbol("s0", m), k, n, target)


@pytest.mark.parametrize(
    ("m", "k", "n", "plain"),
    [
        (128, 768, 768, True),
        (1024, 768, 3072, True),
        (197, 768, 3072, False),  # padding to 208 rows costs more than a thirtieth
        (8, 768, 3072, False),
        (1, 2048, 1000, True),  # dot products, as fast as memory
        (1, 2048, 100, False),  # too few columns to matter
        (1, 32, 1000, False),
        (128, 32, 3072, False),
        (128, 768, 700, False),  # each core would pack A for too few columns
    ],
)
def test_where_the_plain_weight_is_read(m: int, k: int, n: int, plain: bool) -> None:
    """The rule, for two cores with AVX-512."""
    target = dataclasses.replace(HOST, lanes=16, cores=2)
    assert reads_unpacked(m, k, n, target) == plain


def test_sizes_known_at_run_time_are_packed() -> None:
    """The schedule is for sizes that are numbers."""
    assert not reads_unpacked(symbol("s0", 128), 768, 768, HOST)


@pytest.mark.parametrize(("total", "parts"), [(197, 15), (10, 3), (7, 7), (3, 5), (1, 1)])
def test_parts_are_as_equal_as_can_be(total: int, parts: int) -> None:
    """Parts cover everything in order, and differ by one at most, the larger ones first."""
    split = split_into(total, parts)
    sizes = [size for _, count, size in split.runs() for _ in range(count)]
    assert sizes == sorted(sizes, reverse=True)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert max(sizes) - min(sizes) <= 1
    assert [split.start(part) for part in range(parts)] == [sum(sizes[:part]) for part in range(parts)]


def test_the_fewest_parts_of_a_size() -> None:
    """2 of 14 and 13 of 13."""
    assert split_at_most(197, 14) == Split(15, 14, 2)
    assert split_at_most(14, 14).parts == 1


@pytest.mark.parametrize("count", [1, 5, 8, 15, 16, 17, 43])
def test_vectors_of_a_ragged_row(count: int) -> None:
    """Whole vectors, then ever smaller powers of two."""
    chunks = lane_chunks(count, 16)
    assert [start for start, _ in chunks] == [sum(w for _, w in chunks[:n]) for n in range(len(chunks))]
    widths = [width for _, width in chunks]
    assert sum(widths) == count
    assert widths == sorted(widths, reverse=True)
    assert set(widths) <= {1, 2, 4, 8, 16}
    assert len(set(widths) - {16}) == len([width for width in widths if width != 16])


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("vectors", [1, 2, 3, 4])
def test_tiles_fit_the_registers(vectors: int, lanes: int) -> None:
    """Accumulators, a row of vectors and a scalar; one row more would not, unless taller gains nothing."""
    target = dataclasses.replace(HOST, lanes=lanes)
    rows, registers = max_rows(vectors, target), 32 if lanes == 16 else 16
    assert rows * vectors + vectors + 1 <= registers
    assert rows == 14 or (rows + 1) * vectors + vectors + 1 > registers


@pytest.mark.parametrize(("vectors", "rows"), [(1, 14), (2, 9), (3, 7), (4, 5)])
def test_tiles_by_element_have_a_register_for_each_row(vectors: int, rows: int) -> None:
    """Beside the accumulators and a row of vectors, with one to spare."""
    assert max_rows(vectors, Target.named("neoverse-n1"), by_element=True) == rows


def test_panels_of_columns() -> None:
    """Two vectors, or the power of two that holds all columns; two where their number is known at run time."""
    target = dataclasses.replace(HOST, lanes=16)
    assert [tile_n(n, target) for n in (1, 3, 16, 17, 1000, symbol("n"))] == [1, 4, 16, 32, 32, 32]


@pytest.mark.parametrize(
    ("outputs", "groups", "block"),
    [(64, 1, 16), (5, 1, 8), (12, 3, 4), (14, 2, 1), (96, 3, 16), (20, 20, 16), (3, 3, 4)],
)
def test_blocks_of_output_channels(outputs: int, groups: int, block: int) -> None:
    """Whole vectors, padded, where there is one group or each channel is its own; else what divides a group."""
    assert output_block(outputs, groups, dataclasses.replace(HOST, lanes=16)) == block
