"""Numbers with units, for people."""

from __future__ import annotations

import pytest

from torch_hybrid_backend.core.units import flops_in_words, time_in_words


@pytest.mark.parametrize(
    ("microseconds", "words"),
    [
        (0.25, "0.2 us"),
        (31.54, "31.5 us"),
        (999.94, "999.9 us"),
        (8400.0, "8.40 ms"),
        (33214.5, "33.2 ms"),
        (796_400.0, "796 ms"),
        (1.25e6, "1.25 s"),
        (217e6, "217 s"),
    ],
)
def test_times(microseconds: float, words: str) -> None:
    """Three digits, in the unit that a person would use."""
    assert time_in_words(microseconds) == words


def test_flops() -> None:
    """Operations of a call, not a second."""
    assert [flops_in_words(n) for n in (7, 8_200, 13_450_000, 8_170_000_000, 2 * 10**12)] == [
        "7 FLOP", "8.20 kFLOP", "13.45 MFLOP", "8.17 GFLOP", "2.00 TFLOP"
    ]  # fmt: skip
