"""Division of products on tiles: parts of k, panels and tasks have everything once, and fit the caches."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engines.cpu.amx_for_tests import SAPPHIRE_RAPIDS
from tests.engines.cpu.schedule_runner import printer_of
from tests.engines.cpu.schedules.amx.products_for_tests import Shape, kernel_of
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.schedules.matmul.amx import TileMatMul
from torch_hybrid_backend.engines.cpu.target import Target

_SMALL = dataclasses.replace(SAPPHIRE_RAPIDS, cores=5, l2_bytes=256 << 10)


def blocks_of(shape: Shape, name: str, target: Target = SAPPHIRE_RAPIDS, rank: int = 0) -> TileMatMul:
    kernel = dataclasses.replace(kernel_of(shape, name), schedule_rank=rank)
    printer = printer_of(kernel, rank)
    return TileMatMul(kernel, FORMATS[name], printer.builder, printer, target)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("target", [SAPPHIRE_RAPIDS, _SMALL], ids=["large caches", "small caches"])
@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        ((1, 1, 1, 1), 0),
        ((2, 40, 70, 33), 0),
        ((1, 512, 3072, 768), 0),
        ((1, 512, 3072, 768), 3),
        ((12, 197, 768, 1000), 2),
        ((1, 33, 5000, 64), 0),
    ],
)
def test_everything_once_and_in_the_cache(shape: Shape, name: str, target: Target, rank: int) -> None:
    """No part of k and no block of rows is empty, and together they have all; a task's rows take half of the second-level cache."""
    blocks = blocks_of(shape, name, target, rank)
    _, m, k, n = shape
    depth = blocks.form.depth
    assert (blocks.parts - 1) * blocks.part_steps * depth < k <= blocks.parts * blocks.part_steps * depth
    count, step = blocks.row_blocks()
    assert step == blocks.block
    assert (count - 1) * blocks.block * 32 < m <= count * blocks.block * 32
    assert 1 <= blocks.group <= blocks.column_panels == -(-n // 32)
    rows_bytes = blocks.block * blocks.part_steps * blocks.panel_size * blocks.form.itemsize
    assert blocks.block == 1 or rows_bytes <= target.l2_bytes // 2


def test_parts_of_float32() -> None:
    """The parts of float32 are one of up to 32 steps of 32 elements; where there are more, as many of at most 24 as needed."""
    assert [blocks_of((1, 64, k, 64), "float32").part_steps for k in (32, 1024, 1025, 3072)] == [1, 32, 17, 24]


def test_one_panel_of_rows_is_not_cut() -> None:
    """Each panel of B is read once, from its beginning to its end; rows so long that a task's would not fit are cut all the same."""
    shape = (1, 8, 4096, 512)
    assert blocks_of(shape, "bfloat16").parts == blocks_of(shape, "int8").parts == 1
    assert blocks_of((1, 40, 4096, 512), "bfloat16").parts > 1
    assert blocks_of((1, 8, 1 << 17, 64), "bfloat16").parts > 1


def test_small_caches_make_more_tasks() -> None:
    """A block of rows, with its part of k, must fit; and no core should wait for another."""
    shape = (1, 1024, 768, 768)
    (large, _), (small, _) = (blocks_of(shape, "bfloat16", target).row_blocks() for target in (SAPPHIRE_RAPIDS, _SMALL))
    assert small > large
