"""The timer, with a clock that the test moves."""

from __future__ import annotations

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


def test_an_exception_passes_through() -> None:
    """The timer hides no failure."""

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure([fail], 0.1)
