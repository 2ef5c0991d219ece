"""Tile sizes: plain arithmetic on shapes and the target."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engines.tvm.schedule_runner import HOST
from torch_hybrid_backend.engines.tvm.cpu.tiles import copies_panels, reads_unpacked, strips
from torch_hybrid_backend.engines.tvm.target import Target
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
