"""Arena planning."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.runtime.memory import ALIGNMENT, LiveRange, alignment_on, plan_arena

RANGES = st.lists(
    st.builds(
        lambda size, first, length: LiveRange(size, first, first + length),
        st.integers(0, 5000),
        st.integers(0, 30),
        st.integers(0, 10),
    ),
    max_size=40,
)


@given(RANGES, st.sampled_from([alignment_on(CPU), alignment_on(Device("cuda"))]))
def test_buffers_alive_together_never_overlap(ranges: list[LiveRange], alignment: int) -> None:
    """Whatever the sizes and live ranges: aligned as the device needs it, inside the block, and disjoint while alive together."""
    layout = plan_arena(ranges, alignment)
    assert layout.size_bytes % alignment == 0
    placed = list(zip(ranges, layout.offsets, strict=True))
    for live, offset in placed:
        assert offset % alignment == 0
        assert offset >= 0
        assert offset + live.size_bytes <= layout.size_bytes
    for (a, a_offset), (b, b_offset) in combinations(placed, 2):
        together = a.first <= b.last and b.first <= a.last
        if together and a.size_bytes and b.size_bytes:
            assert a_offset + a.size_bytes <= b_offset or b_offset + b.size_bytes <= a_offset


@given(RANGES)
def test_the_block_is_between_the_peak_and_the_sum(ranges: list[LiveRange]) -> None:
    """Never smaller than what is alive at once, never larger than giving every buffer its own place."""
    sizes = [-(-live.size_bytes // ALIGNMENT) * ALIGNMENT for live in ranges]
    alive = [
        sum(size for size, live in zip(sizes, ranges, strict=True) if live.first <= time <= live.last)
        for time in range(41)
    ]
    assert max(alive) <= plan_arena(ranges).size_bytes <= sum(sizes)


def _random_plan(seed: int, longest: int) -> list[LiveRange]:
    """60 buffers, each written at a step and read until up to `longest` steps later."""
    numbers = random.Random(seed)
    steps = (numbers.randrange(60) for _ in range(60))
    return [LiveRange(numbers.randint(1, 100_000), step, step + numbers.randint(1, longest)) for step in steps]


@pytest.mark.parametrize(("longest", "worst"), [(5, 1.05), (20, 1.12)])
def test_random_plans_are_near_the_bound(longest: int, worst: float) -> None:
    """Random plans, 40 of them, take at most `worst` times what is alive at once, which no placement may reach."""
    for seed in range(40):
        ranges = _random_plan(seed, longest)
        bound = max(
            sum(-(-live.size_bytes // ALIGNMENT) * ALIGNMENT for live in ranges if live.first <= step <= live.last)
            for step in range(60)
        )
        assert bound <= plan_arena(ranges).size_bytes <= worst * bound


def test_another_order_is_tried_where_the_largest_first_misses_the_bound() -> None:
    """Largest first, this plan takes 768 bytes; it has 704 alive at step 3."""
    ranges = [
        LiveRange(192, 3, 6),
        LiveRange(192, 3, 4),
        LiveRange(256, 0, 3),
        LiveRange(384, 5, 7),
        LiveRange(128, 5, 6),
        LiveRange(64, 2, 4),
    ]
    assert plan_arena(ranges).size_bytes == 704


def test_a_chain_needs_two_buffers() -> None:
    """In a chain of equal buffers each step reads one and writes the next: two places serve all."""
    chain = [LiveRange(1000, step, step + 1) for step in range(20)]
    assert plan_arena(chain).size_bytes == 2 * 1024


def test_the_smallest_gap_that_fits_is_taken() -> None:
    """The tighter of two gaps is filled, so that the wider one stays for others."""
    ranges = [
        LiveRange(640, 0, 0),  # its end leaves a gap of 640 below the next
        LiveRange(576, 0, 9),
        LiveRange(512, 0, 0),  # its end leaves a gap of 512
        LiveRange(448, 0, 9),
        LiveRange(384, 5, 9),
    ]
    layout = plan_arena(ranges)
    assert layout.offsets[4] == layout.offsets[2]
    assert layout.size_bytes == 640 + 576 + 512 + 448


def test_nothing_needs_nothing() -> None:
    """No buffers, or empty ones, make an empty arena."""
    assert plan_arena([]).size_bytes == 0
    assert plan_arena([LiveRange(0, 0, 3)]).size_bytes == 0
