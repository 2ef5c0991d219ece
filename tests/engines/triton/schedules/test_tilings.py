"""The model that ranks tilings: what it must never propose, and what it must see."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from torch_hybrid_backend.engines.triton.schedules.tilings import (
    MIN_TILE,
    Tiling,
    Work,
    best,
    ranked,
    shares_of,
    tiles_of,
    width_of,
)
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target

HOPPER, AMPERE = Target(90, 132), Target(80, 108)


def _work(m: int, n: int, k: int, dtype: str = "bfloat16", batch: int = 1, *, is_right_along_k: bool = True) -> Work:
    moved = batch * (m * k + k * n + m * n) * width_of(dtype)
    more = {"can_share": True, "can_copy": True, "stored": width_of(dtype)}
    return Work(batch, m, n, k, dtype, moved, k, tf32=True, is_right_along_k=is_right_along_k, **more)


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_every_tiling_can_run(capability: int) -> None:
    """Operands of programs fit the shared memory of each chip, tiles are what `tl.dot` takes, and k is long enough for its parts."""
    shared = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99) << 10
    sizes = (0, 1, 3, 17, 100, 4096)
    for m, n, k, dtype in itertools.product(
        sizes, sizes, (0, 1, 100, 70_000), ("bfloat16", "float32", "float64", "int8")
    ):
        found = ranked(_work(m, n, k, dtype), Target(capability, 100))
        assert found
        for tiling, cost in found:
            assert cost >= 0
            assert all(edge & (edge - 1) == 0 for edge in tiling.constants.values())
            assert tiling.splits * tiling.depth <= max(k, tiling.depth)
            if tiling.sharers:
                assert 0 < tiling.shared < tiling.sharers <= 100
                assert shares_of(tiling, tiles_of(tiling, 1, m, n), -(-k // tiling.depth)).each >= 4
            assert not tiling.persistent or (capability == 90 and dtype in ("bfloat16", "float32"))
            if tiling.is_thin:
                assert min(m, n) <= 8
                continue
            assert min(tiling.rows, tiling.columns) >= MIN_TILE
            assert tiling.depth >= MIN_TILE or dtype == "int8"
            held = tiling.stages * (tiling.rows + tiling.columns) * tiling.depth * width_of(dtype)
            assert held <= shared, tiling


def test_decoding_is_thin() -> None:
    """A row or few by a large weight, which every program reads 16 bytes a thread, along whichever axis is contiguous."""
    along_k, across = best(_work(1, 4096, 4096), HOPPER), best(_work(1, 4096, 4096, is_right_along_k=False), HOPPER)
    assert along_k.is_thin
    assert across.is_thin
    assert along_k.depth >= 128
    assert across.columns >= 64
    assert best(_work(4096, 1, 4096), HOPPER).is_thin
    assert not best(_work(64, 4096, 4096), HOPPER).is_thin


def test_large_products_have_large_tiles() -> None:
    """Tiles are as large as the registers of the chip allow; small ones are for products that would leave multiprocessors idle."""
    large = best(_work(8192, 8192, 8192), HOPPER)
    assert large.rows * large.columns == 128 * 256
    assert all(tiling.rows * tiling.columns <= 128 * 128 for tiling, _ in ranked(_work(8192, 8192, 8192), AMPERE))
    small = best(_work(256, 256, 256), HOPPER)
    assert small.rows * small.columns <= 32 * 64


def test_a_long_epilogue_wants_registers() -> None:
    """A long epilogue needs registers, which a large tile leaves none of. Where k is long, that is a small part of the whole."""
    for k, is_large in ((512, False), (32768, True)):
        tiling = best(dataclasses.replace(_work(8192, 8192, k), has_long_epilogue=True), HOPPER)
        assert (tiling.rows * tiling.columns > 128 * 128) == is_large


def test_few_tiles_of_long_k_are_split() -> None:
    """Not where tiles fill the chip, nor where sizes are known at run time only."""
    assert ranked(_work(64, 64, 70_000), HOPPER)[0][0].splits > 1
    assert ranked(_work(8192, 8192, 4096), HOPPER)[0][0].splits == 1
    assert best(_work(64, 64, 70_000), HOPPER).splits == 1
    unknown = Work(1, 64, 64, 70_000, "bfloat16", 1, 70_000, can_split=False)
    assert all(tiling.splits == 1 for tiling, _ in ranked(unknown, HOPPER))


def test_a_last_round_that_is_badly_filled_is_shared() -> None:
    """72 tiles for 132 multiprocessors, of long k. Not where all rounds are full, or tiles are short, nor by default; and never at a cost."""
    work = _work(1536, 1536, 8192)
    shared, cost = next((tiling, cost) for tiling, cost in ranked(work, HOPPER) if tiling.sharers)
    assert (shared.shared, shared.sharers) == (72, 132)
    assert cost < 0.8 * dict(ranked(work, HOPPER))[best(work, HOPPER)]
    for other in (_work(1536, 1408, 8192), _work(1536, 1536, 64), dataclasses.replace(work, can_share=False)):
        assert not any(tiling.sharers for tiling, _ in ranked(other, Target(90, 66)))
    for m, k in itertools.product((500, 2000, 9000), (512, 2048)):
        found = ranked(_work(m, 3000, k), AMPERE)
        least = min(cost for tiling, cost in found if tiling.splits == 1 and not tiling.sharers)
        assert all(cost < least for tiling, cost in found if tiling.sharers)


def test_persistent_programs_are_for_hopper_and_several_rounds() -> None:
    """A persistent program runs for each multiprocessor. Not where there is one round, on other chips, or where operands cannot be copied."""
    work = _work(8192, 4096, 4096)
    found = [tiling for tiling, _ in ranked(work, HOPPER) if tiling.persistent]
    assert found
    assert all(tiling.persistent == 132 for tiling in found)
    others = ((_work(1024, 1024, 4096), HOPPER), (dataclasses.replace(work, can_copy=False), HOPPER))
    for other, target in (*others, (work, AMPERE), (work, Target(89, 132)), (work, Target(100, 132))):
        assert not any(tiling.persistent for tiling, _ in ranked(other, target))
    assert not best(work, HOPPER).persistent


def test_a_chip_that_is_not_known_counts_as_the_one_before_it() -> None:
    work = _work(4096, 4096, 4096)
    assert ranked(work, Target(103, 132)) == ranked(work, Target(100, 132))


def test_the_interpreter_has_one_way() -> None:
    """With tiles as large as may be."""
    assert ranked(_work(2000, 300, 5000, "float32"), INTERPRETER) == [(Tiling(1024, 512, 4096), 0.0)]
