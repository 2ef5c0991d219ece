"""Arena planning."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from torch_hybrid_backend.runtime.memory import ALIGNMENT, LiveRange, plan_arena

RANGES = st.lists(
    st.builds(
        lambda size, first, length: LiveRange(size, first, first + length),
        st.integers(0, 5000),
        st.integers(0, 30),
        st.integers(0, 10),
    ),
    max_size=40,
)


@given(RANGES)
def test_buffers_alive_together_never_overlap(ranges: list[LiveRange]) -> None:
    """Whatever the sizes and live ranges: aligned, inside the block, and disjoint while alive together."""
    layout = plan_arena(ranges)
    placed = list(zip(ranges, layout.offsets, strict=True))
    for live, offset in placed:
        assert offset % ALIGNMENT == 0
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


def test_a_chain_needs_two_buffers() -> None:
    """In a chain of equal buffers each step reads one and writes the next: two places serve all."""
    chain = [LiveRange(1000, step, step + 1) for step in range(20)]
    assert plan_arena(chain).size_bytes == 2 * 1024


def test_the_smallest_gap_that_fits_is_taken() -> None:
    """Of two gaps the tighter one is filled, so that the wider one stays for others."""
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
