"""The one timer: placement and benchmarks time with it, so that their numbers mean the same.

Candidates are timed in interleaved rounds (a, b, c, a, b, c, ...): a machine that slows down for a while slows all of
them, and ratios hold. The median of the rounds is the result; the spread is the distance between the quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Returns nanoseconds that only grow; tests pass a fake.
Clock = Callable[[], int]

_MAX_ROUNDS = 200  # beyond it the median of a steady call no longer moves


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: the median over `rounds` rounds, and the distance between the quartiles."""

    median_us: float
    spread_us: float
    rounds: int


def measure(
    callables: Sequence[Callable[[], object]],
    budget_s: float,
    *,
    min_rounds: int = 3,
    max_rounds: int = _MAX_ROUNDS,
    warmup_rounds: int = 1,
    clock: Clock = time.perf_counter_ns,
) -> tuple[Timing, ...]:
    """Time the callables against each other for about `budget_s` seconds, warm-up included.

    At least `min_rounds` rounds are taken even over budget; only where one warm-up round already exceeded the
    budget is a single round taken. An exception of a callable passes through.
    """
    start = clock()
    budget_ns = int(budget_s * 1e9)
    for _ in range(warmup_rounds):
        for call in callables:
            call()
    needed = 1 if warmup_rounds and clock() - start > budget_ns else max(min_rounds, 1)
    samples: list[list[int]] = [[] for _ in callables]
    rounds = 0
    while rounds < needed or (rounds < max_rounds and clock() - start < budget_ns):
        for call, taken in zip(callables, samples, strict=True):
            before = clock()
            call()
            taken.append(clock() - before)
        rounds += 1
    return tuple(_timing(taken) for taken in samples)


def _timing(nanoseconds: Sequence[int]) -> Timing:
    spread = 0.0
    if len(nanoseconds) > 1:
        first, _, third = statistics.quantiles(nanoseconds, n=4, method="inclusive")
        spread = third - first
    return Timing(statistics.median(nanoseconds) / 1e3, spread / 1e3, len(nanoseconds))
