"""The timer, with a clock that the test moves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from torch_hybrid_backend.measure import measure


class FakeClock:
    """Nanoseconds that pass only when a callable says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def taking(self, *microseconds: float) -> Callable[[], None]:
        """A callable that takes the given times in turn, then the last one again."""
        left = list(microseconds)

        def call() -> None:
            self.now += int((left.pop(0) if len(left) > 1 else left[0]) * 1000)

        return call


def test_median_and_spread_are_in_microseconds() -> None:
    """One slow round moves the median little; the spread is the distance of the quartiles."""
    clock = FakeClock()
    call = clock.taking(50, 10, 11, 12, 13, 1000)  # the first is the warm-up
    (timing,) = measure([call], 1e-9, min_rounds=5, clock=clock)
    # The warm-up was over budget, so a single round is taken.
    assert (timing.median_us, timing.spread_us, timing.rounds) == (10.0, 0.0, 1)
    clock = FakeClock()
    (timing,) = measure([clock.taking(50, 10, 11, 12, 13, 1000)], 60e-6, min_rounds=5, clock=clock)
    assert (timing.median_us, timing.spread_us, timing.rounds) == (12.0, 2.0, 5)


def test_a_first_round_over_budget_is_enough_without_warm_up() -> None:
    """Calls that were warm already take part in one round where that spends the budget, in all of `min_rounds` where it does not."""
    for budget_s, rounds in ((60e-6, 1), (200e-6, 2)):
        clock = FakeClock()
        (timing,) = measure([clock.taking(100)], budget_s, warmup_rounds=0, min_rounds=2, max_rounds=2, clock=clock)
        assert (timing.median_us, timing.rounds) == (100.0, rounds)


def test_rounds_are_interleaved() -> None:
    """Every callable runs once per round, in order, so that a slow phase of the machine hits all alike."""
    order: list[str] = []
    clock = FakeClock()
    tick = clock.taking(100)

    def named(name: str) -> Callable[[], None]:
        def call() -> None:
            order.append(name)
            tick()

        return call

    measure([named("a"), named("b")], 1e-3, min_rounds=3, max_rounds=3, clock=clock)
    assert "".join(order) == "ab" * 4


def test_the_budget_ends_the_rounds() -> None:
    """Rounds go on until the budget is spent, and at most max_rounds are taken."""
    clock = FakeClock()
    (timing,) = measure([clock.taking(100)], 1e-3, clock=clock)
    assert timing.rounds == 9  # ten calls of 100 us in 1 ms, of which one is the warm-up
    clock = FakeClock()
    (timing,) = measure([clock.taking(100)], 1.0, max_rounds=7, clock=clock)
    assert timing.rounds == 7


def test_the_low_time_ignores_disturbed_rounds() -> None:
    """Of few rounds it is the minimum, of many the lower quartile: a disturbed majority does not change it."""
    clock = FakeClock()
    (timing,) = measure([clock.taking(10, 900, 10, 900, 900, 900)], 1e-3, min_rounds=5, max_rounds=5, clock=clock)
    assert (timing.median_us, timing.low_us) == (900.0, 10.0)
    clock = FakeClock()
    (timing,) = measure([clock.taking(10, *([900, 20, 10] * 3))], 1.0, max_rounds=9, clock=clock)
    assert (timing.rounds, timing.low_us) == (9, 10.0)
    clock = FakeClock()
    (timing,) = measure([clock.taking(10, 1, *([30, 20] * 6))], 1.0, max_rounds=13, clock=clock)
    assert timing.low_us == 20.0


def test_an_undecided_comparison_takes_more_rounds() -> None:
    """Only while the two fastest are within their spread, and for no more than three times the budget."""

    def rounds(*microseconds: float, other: float, until_decided: bool = True) -> int:
        clock = FakeClock()
        calls = [clock.taking(*microseconds), clock.taking(other)]
        return measure(calls, 1e-3, until_decided=until_decided, clock=clock)[0].rounds

    noisy = [100.0, 160.0] * 50
    assert rounds(*noisy, other=300.0) == rounds(*noisy, other=300.0, until_decided=False)
    undecided = rounds(*noisy, other=105.0)
    assert 2 * rounds(*noisy, other=105.0, until_decided=False) < undecided <= 15
    assert rounds(100.0, other=101.0) == rounds(100.0, other=101.0, until_decided=False)
    # Each call takes longer than the budget: a clear result needs one round, another a second.
    assert (
        rounds(2000.0, other=4000.0),
        rounds(2000.0, other=2100.0),
        rounds(2000.0, other=2100.0, until_decided=False),
    ) == (1, 2, 1)


def test_a_clear_comparison_ends_early() -> None:
    """With `clear_ratio` the least rounds are enough where one is always so many times faster than the others, and the budget else."""

    def rounds(clear_ratio: float, *others: float) -> int:
        clock = FakeClock()
        calls = [clock.taking(*others), clock.taking(100.0, 90.0), clock.taking(500.0)]
        return measure(calls, 10e-3, clear_ratio=clear_ratio, clock=clock)[0].rounds

    assert rounds(1.5, 150.0) == 3
    whole = rounds(math.inf, 150.0)
    assert whole > 3
    assert rounds(1.7, 150.0) == whole
    assert rounds(1.5, 140.0, 150.0) == 3, "the warm-up does not count"
    assert rounds(1.5, 150.0, 150.0, 130.0) == whole


def test_an_exception_passes_through() -> None:
    """The timer hides no failure."""

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure([fail], 0.1)
