"""Other load is felt while something is timed."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

import pytest

from benchmarks.other_load import beside
from torch_hybrid_backend.measuring.other_load import OtherLoad, thread_waits

_S = 1_000_000_000


class _Threads:
    """Threads that wait as the test says, and a clock."""

    def __init__(self) -> None:
        self.ns = {"1": 5 * _S, "2": 0}
        self.now = 0

    def waits(self) -> Mapping[str, int]:
        return dict(self.ns)

    def load(self) -> OtherLoad:
        return OtherLoad(self.waits, lambda: self.now)


def test_all_threads_count_from_the_start() -> None:
    """Waits of threads before the start do not count; one that began meanwhile counts whole, one that ended not at all."""
    threads = _Threads()
    load = threads.load()
    assert (load.share, load.is_felt()) == (0.0, False)
    threads.now = 10 * _S
    threads.ns = {"2": _S, "3": _S}
    assert load.share == pytest.approx(0.2)
    assert not load.is_felt()
    threads.ns["1"] = 6 * _S
    assert load.share == pytest.approx(0.3)
    assert load.is_felt()


def test_where_the_system_does_not_tell_nothing_is_felt() -> None:
    """Without Linux's schedstat all is as on a quiet machine."""
    load = OtherLoad(dict, iter((0, _S)).__next__)
    assert not load.is_felt()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the system does not tell how long threads waited"
)
def test_processes_that_hold_every_core_are_felt() -> None:
    """Real threads beside twice as many processes as there are cores: they wait for half of the time or more."""
    cores = len(os.sched_getaffinity(0))
    with beside(2 * cores):
        load, total = OtherLoad(thread_waits), 0
        while load._clock() - load._start < _S // 2:
            total += sum(range(10_000))
        assert load.is_felt()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the system does not tell how long threads waited"
)
def test_each_thread_has_an_entry() -> None:
    """A thread that only sleeps is there too."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        waits = thread_waits()
        assert str(thread.native_id) in waits
        assert all(ns >= 0 for ns in waits.values())
    finally:
        done.set()
        thread.join()
