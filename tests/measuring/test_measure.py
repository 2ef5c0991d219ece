"""The timer, with a clock that the test moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.measuring import measure as measure_module
from torch_hybrid_backend.measuring.measure import DeviceTimer, HostTimer, cache_flush, measure, timer_for


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
    """A slow round moves the median little; the spread is the distance of the quartiles."""
    clock = FakeClock()
    call = clock.taking(50, 10, 11, 12, 13, 1000)  # the first is the warm-up
    (timing,) = measure([call], 1e-9, min_rounds=5, timer=HostTimer(clock))
    # The warm-up was over budget, so a single round is taken.
    assert (timing.median_us, timing.spread_us, timing.rounds) == (10.0, 0.0, 1)
    clock = FakeClock()
    (timing,) = measure([clock.taking(50, 10, 11, 12, 13, 1000)], 60e-6, min_rounds=5, timer=HostTimer(clock))
    assert (timing.median_us, timing.spread_us, timing.rounds) == (12.0, 2.0, 5)


def test_a_first_round_over_budget_is_enough_without_warm_up() -> None:
    """Calls that were warm already take part in one round where that spends the budget, in all of `min_rounds` where it does not."""
    for budget_s, rounds in ((60e-6, 1), (200e-6, 2)):
        clock = FakeClock()
        (timing,) = measure(
            [clock.taking(100)], budget_s, warmup_rounds=0, min_rounds=2, max_rounds=2, timer=HostTimer(clock)
        )
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

    measure([named("a"), named("b")], 1e-3, min_rounds=3, max_rounds=3, timer=HostTimer(clock))
    assert "".join(order) == "ab" * 4


def test_the_budget_ends_the_rounds() -> None:
    """Rounds go on until the budget is spent, and at most max_rounds are taken."""
    clock = FakeClock()
    (timing,) = measure([clock.taking(100)], 1e-3, timer=HostTimer(clock))
    assert timing.rounds == 9  # ten calls of 100 us in 1 ms, of which one is the warm-up
    clock = FakeClock()
    (timing,) = measure([clock.taking(100)], 1.0, max_rounds=7, timer=HostTimer(clock))
    assert timing.rounds == 7


def test_the_low_time_ignores_disturbed_rounds() -> None:
    """The low time of few rounds is the minimum, of many the lower quartile: a disturbed majority does not change it."""
    clock = FakeClock()
    (timing,) = measure(
        [clock.taking(10, 900, 10, 900, 900, 900)], 1e-3, min_rounds=5, max_rounds=5, timer=HostTimer(clock)
    )
    assert (timing.median_us, timing.low_us) == (900.0, 10.0)
    clock = FakeClock()
    (timing,) = measure([clock.taking(10, *([900, 20, 10] * 3))], 1.0, max_rounds=9, timer=HostTimer(clock))
    assert (timing.rounds, timing.low_us) == (9, 10.0)
    clock = FakeClock()
    (timing,) = measure([clock.taking(10, 1, *([30, 20] * 6))], 1.0, max_rounds=13, timer=HostTimer(clock))
    assert timing.low_us == 20.0


def test_an_undecided_comparison_takes_more_rounds() -> None:
    """Only while the two fastest are within their spread, and for no more than three times the budget."""

    def rounds(*microseconds: float, other: float, until_decided: bool = True) -> int:
        clock = FakeClock()
        calls = [clock.taking(*microseconds), clock.taking(other)]
        return measure(calls, 1e-3, until_decided=until_decided, timer=HostTimer(clock))[0].rounds

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
        return measure(calls, 10e-3, clear_ratio=clear_ratio, timer=HostTimer(clock))[0].rounds

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


class Stream:
    """A stand-in for a device's stream: work is queued by the host in no time, and takes its time when the host waits for it."""

    def __init__(self) -> None:
        self.queue: list[Event | float] = []
        self.now_ms = 0.0
        self.waits = 0

    def launch(self, milliseconds: float) -> None:
        self.queue.append(milliseconds)


class Event:
    """torch.Event's part of it: raises, as CUDA's do, where its time is asked for before it is known."""

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert (device, enable_timing) == (torch.device("cuda", 1), True)
        self.stream: Stream | None = None
        self.at_ms: float | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream
        stream.queue.append(self)

    def synchronize(self) -> None:
        stream = self.stream
        assert stream is not None
        stream.waits += 1
        while self.at_ms is None:
            item = stream.queue.pop(0)
            if isinstance(item, Event):
                item.at_ms = stream.now_ms
            else:
                stream.now_ms += item

    def elapsed_time(self, end: Event) -> float:
        if self.at_ms is None or end.at_ms is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that is current on the second GPU; overwriting that one's cache takes 0.05 ms."""
    found = Stream()
    monkeypatch.setattr(measure_module, "cache_flush", lambda device: lambda: found.launch(0.05))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", {torch.device("cuda", 1): found}.__getitem__)
    return found


def test_work_on_a_device_is_timed_by_its_events(stream: Stream) -> None:
    """Calls that return at once have the time of their work, in nanoseconds; the host waits once a round, and then all is done."""
    timer = timer_for(Device("cuda", 1))
    assert isinstance(timer, DeviceTimer)
    stream.launch(5.0)  # what others queued before is no call's time
    assert timer.round([lambda: stream.launch(5.25), lambda: stream.launch(52.0)]) == [5_250_000, 52_000_000]
    assert (stream.waits, stream.queue) == (1, [])
    assert stream.now_ms == pytest.approx(5.0 + 5.25 + 52.0 + 2 * 0.05), (
        "the cache is overwritten before each, outside its time"
    )
    assert timer.round([]) == []
    slow, fast = measure(
        [lambda: stream.launch(30.0), lambda: stream.launch(10.0)], 10.0, timer=timer, min_rounds=4, max_rounds=4
    )
    assert (slow.median_us, fast.median_us, fast.rounds) == (30000.0, 10000.0, 4)
    assert stream.waits == 1 + 5  # the warm-up is waited for, too


def test_a_call_on_a_device_costs_what_takes_longer(stream: Stream) -> None:
    """Sending its work off, or the work; in a graph that is replayed the work alone."""
    for host_counts, expected in ((True, [40_000, 900_000]), (False, [10_000, 900_000])):
        clock = FakeClock()
        send = clock.taking(40)

        def call(milliseconds: float, send: Callable[[], None] = send) -> None:
            send()
            stream.launch(milliseconds)

        timer = DeviceTimer(Device("cuda", 1), host_counts=host_counts, clock=clock)
        assert timer.round([lambda: call(0.01), lambda: call(0.9)]) == pytest.approx(expected)


def test_what_events_cannot_tell_is_called_several_times(stream: Stream) -> None:
    """Only that: a call of 0.3 us between two events of its own would be anything from 0 to 0.5."""
    clock, calls = FakeClock(), [0, 0]
    send = clock.taking(0.2)

    def call(which: int, milliseconds: float) -> None:
        calls[which] += 1
        send()
        stream.launch(milliseconds)

    timer = DeviceTimer(Device("cuda", 1), clock=clock)
    assert timer.round([lambda: call(0, 0.0003), lambda: call(1, 0.001)]) == pytest.approx([300, 1000], abs=1)
    assert calls == [1 + 20, 1]


def test_twice_the_cache_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the cache is as large as the device says; nothing where it says nothing, or has no memory for it."""
    sizes: list[int] = []
    told: dict[str, int] = {"L2_cache_size": 1 << 20}
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**told))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    empty = torch.empty

    def made(size: int, **how: Any) -> torch.Tensor:
        sizes.append(size)
        if size > 4 << 20:
            raise torch.OutOfMemoryError("no memory")
        return empty(size, **how).fill_(7)

    monkeypatch.setattr(torch, "empty", made)
    flush = cache_flush(torch.device("cpu"))
    written = flush()
    assert isinstance(written, torch.Tensor)
    assert (written.numel(), written.count_nonzero()) == (2 << 20, 0)
    told["L2_cache_size"] = 4 << 20
    assert cache_flush(torch.device("cpu"))() is None
    told.clear()
    assert cache_flush(torch.device("cpu"))() is None
    assert sizes == [2 << 20, 8 << 20, 0, 0]


def test_a_failing_call_on_a_device_passes_through(stream: Stream) -> None:
    """Nothing is waited for, or taken for a time."""

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        timer_for(Device("cuda", 1)).round([lambda: stream.launch(1.0), fail])
    assert stream.waits == 0


def test_the_host_has_a_clock() -> None:
    """Its calls return when their work is done."""
    timer = timer_for(CPU)
    assert isinstance(timer, HostTimer)
    (taken,) = timer.round([lambda: None])
    assert 0 <= taken < 1e9
