"""Measuring: placement and benchmarks time with it, so that their numbers mean the same.

Candidates are timed in interleaved rounds (a, b, c, a, b, c, ...): a machine that slows down for a while slows all of
them, and ratios hold. The median of the rounds is what a benchmark reports; `low_us` is what a choice compares: other load on the
machine only ever adds time, so the fast rounds tell the candidates apart where the median tells who was disturbed.

A `Timer` says what one round took: the host's clock where calls return when their work is done (`HostTimer`), events on the device's stream
where they return when it was only sent off (`DeviceTimer`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack

import torch

from torch_hybrid_backend.cancellation import check
from torch_hybrid_backend.core.device import Device

Call = Callable[[], object]

_MAX_ROUNDS = 200  # beyond it the median of a steady call no longer moves
_QUARTILE_ROUNDS = 8  # with fewer rounds a quartile is the minimum and a part of the next one: the minimum is steadier
_MAX_EXTENSION = 3  # an undecided comparison may take so many times its budget


class Timer(Protocol):
    """A clock, and how long the work of calls took."""

    def now(self) -> int:
        """Nanoseconds that only grow: what budgets are counted in."""
        ...

    def round(self, calls: Sequence[Call]) -> list[int]:
        """Call them one after the other; the nanoseconds of each one's work, all of which is done. What a call raises passes through."""
        ...


class HostTimer:
    """For calls that return when their work is done. `clock` gives nanoseconds; a test gives its own."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now = clock

    def round(self, calls: Sequence[Call]) -> list[int]:
        return [self._duration(call) for call in calls]

    def _duration(self, call: Call) -> int:
        before = self.now()
        call()
        return self.now() - before


# An event tells its time to about half a microsecond (cudaEventElapsedTime in NVIDIA's CUDA Runtime API). What takes less is timed as several.
_RESOLUTION_NS = 500
_REPEATS = 20


class DeviceTimer:
    """For calls that send work to a device's current stream and may return before it is done: two events a call, one wait a round.

    A call costs what takes longer, sending its work off or the work itself: where sending takes longer, calls one after the other take as long
    as that. Before each the second-level cache is overwritten, outside its events, as whatever runs between two calls of a model does; what is
    shorter than an event tells is called several times between two events.

    The events are on the stream that is current for the device when a round begins. Only ever run against a stand-in for the stream: there was
    no GPU to run it on.

    host_counts: False where the host does not count, as in a graph of launches that is replayed. flush: what overwrites the cache;
    by default twice its size is written. clock: nanoseconds of the host.
    """

    def __init__(
        self,
        device: Device,
        *,
        host_counts: bool = True,
        flush: Call | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._device = torch.device(device.type, device.index)
        self._host_counts = host_counts
        self._flush = flush
        self.now = clock

    def round(self, calls: Sequence[Call]) -> list[int]:
        if self._flush is None:
            self._flush = cache_flush(self._device)
        spent = self._timed(calls, 1)
        short = [position for position, (_, work) in enumerate(spent) if work < _RESOLUTION_NS]
        for position, again in zip(short, self._timed([calls[p] for p in short], _REPEATS), strict=True):
            spent[position] = again
        return [max(sending, work) if self._host_counts else work for sending, work in spent]

    def _timed(self, calls: Sequence[Call], repeats: int) -> list[tuple[int, int]]:
        """Nanoseconds of each call: of the host, and of the device."""
        assert self._flush is not None
        stream = torch.accelerator.current_stream(self._device)
        pairs = [(self._event(), self._event()) for _ in calls]
        sending: list[int] = []
        for call, (start, end) in zip(calls, pairs, strict=True):
            self._flush()
            start.record(stream)
            before = self.now()
            for _ in range(repeats):
                call()
            sending.append(self.now() - before)
            end.record(stream)
        if pairs:
            pairs[-1][1].synchronize()  # the last on its stream: those before it are done
        works = (start.elapsed_time(end) * 1e6 for start, end in pairs)  # elapsed_time tells milliseconds
        return [(host // repeats, round(work / repeats)) for host, work in zip(sending, works, strict=True)]

    def _event(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)


def cache_flush(device: torch.device) -> Call:
    """Function that overwrites a device's second-level cache, on its current stream, by writing twice the cache's size.

    The function does nothing if the device does not tell that size, or has not so much memory left."""
    properties: Any = torch.get_device_module(device.type).get_device_properties(device)
    size_bytes = 2 * int(getattr(properties, "L2_cache_size", 0))
    try:
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        memory = torch.empty(0, dtype=torch.uint8, device=device)
    return memory.zero_ if memory.numel() else lambda: None


def timer_for(device: Device) -> Timer:
    """The timer of work on a device."""
    return HostTimer() if device.is_host else DeviceTimer(device)


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: the median over `rounds` rounds, the distance between the quartiles, and `low_us`: the lower
    quartile, or the minimum of fewer than 8 rounds."""

    median_us: float
    spread_us: float
    rounds: int
    low_us: float


class Rounds(TypedDict, total=False):
    """Numbers of rounds that `measure` and `sample` take; where one is not given, `sample`'s default holds."""

    min_rounds: int
    max_rounds: int
    warmup_rounds: int
    until_decided: bool
    clear_ratio: float
    timer: Timer


def measure(callables: Sequence[Call], budget_s: float, **rounds: Unpack[Rounds]) -> tuple[Timing, ...]:
    """Time the callables against each other for about `budget_s` seconds, warm-up included; see `sample`."""
    return tuple(map(_timing, sample(callables, budget_s, **rounds)))


def sample(
    callables: Sequence[Call],
    budget_s: float,
    *,
    min_rounds: int = 3,
    max_rounds: int = _MAX_ROUNDS,
    warmup_rounds: int = 1,
    until_decided: bool = False,
    clear_ratio: float = math.inf,
    timer: Timer | None = None,
) -> list[list[int]]:
    """Nanoseconds of each round of each callable, in about `budget_s` seconds, as `timer` tells them (by default the host's clock).

    until_decided: go on, for up to three times the budget or to `min_rounds`, while the two fastest differ by less than their spread.
    clear_ratio: stop within the budget, after `min_rounds`, once all others took so many times as long in their best round as the fastest in
    its worst.

    At least `min_rounds` rounds are taken even over budget; only where one round, of warm-up or the first, already exceeded the
    budget is a single round taken. An exception of a callable passes through; Cancelled comes between two rounds.
    """
    timer = timer or HostTimer()
    start = timer.now()
    budget_ns = int(budget_s * 1e9)
    for _ in range(warmup_rounds):
        check()
        timer.round(callables)
    needed = 1 if warmup_rounds and timer.now() - start > budget_ns else max(min_rounds, 1)
    samples: list[list[int]] = [[] for _ in callables]
    rounds = 0

    def goes_on() -> bool:
        spent = timer.now() - start
        if rounds < needed and not (rounds == 1 and not warmup_rounds and spent > budget_ns):
            return True
        if spent < budget_ns:
            return not _is_clear(samples, clear_ratio)
        if not until_decided or _decided(samples):
            return False
        return spent < _MAX_EXTENSION * budget_ns or rounds < min_rounds

    while rounds < max(needed, max_rounds) and goes_on():
        check()
        for durations, nanoseconds in zip(samples, timer.round(callables), strict=True):
            durations.append(nanoseconds)
        rounds += 1
    return samples


def _is_clear(samples: Sequence[Sequence[int]], ratio: float) -> bool:
    fastest = min(samples, key=min)
    return len(samples) > 1 and all(
        min(durations) >= ratio * max(fastest) for durations in samples if durations is not fastest
    )


def _decided(samples: Sequence[Sequence[int]]) -> bool:
    """True if the fastest differs from the next by more than either's lower half spreads: the upper half is other load.

    What a single round tells is believed where one takes 1.5 times as long as the other.
    """
    if len(samples) < 2:
        return True
    timings = [_timing(durations) for durations in samples]
    first, second = sorted(timings, key=lambda timing: timing.low_us)[:2]
    if first.rounds == 1:
        return second.low_us >= 1.5 * first.low_us
    return second.low_us - first.low_us >= max(t.median_us - t.low_us for t in (first, second))


def _timing(nanoseconds: Sequence[int]) -> Timing:
    spread, low = 0.0, float(min(nanoseconds))
    if len(nanoseconds) > 1:
        first, _, third = statistics.quantiles(nanoseconds, n=4, method="inclusive")
        spread = third - first
        low = first if len(nanoseconds) >= _QUARTILE_ROUNDS else low
    return Timing(statistics.median(nanoseconds) / 1e3, spread / 1e3, len(nanoseconds), low / 1e3)
