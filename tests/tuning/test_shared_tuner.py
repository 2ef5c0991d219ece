"""A process that takes part: what it claims, and when it holds the host's lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.codegen.search_for_tests import CASES, engine_in
from tests.engines.cpu.regions_for_tests import compiled_region
from torch_hybrid_backend.codegen.tune import tuned_by
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.measuring.timing_cache import TimingCache
from torch_hybrid_backend.storage.store import Store
from torch_hybrid_backend.tuning import shared_tuner
from torch_hybrid_backend.tuning.claims import Claims
from torch_hybrid_backend.tuning.host_lock import HostLock, host
from torch_hybrid_backend.tuning.shared_tuner import SharedTuner

pytest.importorskip("tvm")


@pytest.fixture
def timings(tmp_path: Path) -> TimingCache:
    return TimingCache(Store(tmp_path), lambda device: "machine")


@pytest.fixture(autouse=True)
def lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostLock]:
    """Another holder of the lock, which is this test's alone."""
    name = f"\0torch_hybrid_backend.tests.shared.{os.getpid()}"
    monkeypatch.setattr(shared_tuner, "HostLock", lambda: HostLock(name))
    other = HostLock(name)
    yield other
    other.release()


def test_two_processes_tune_a_region(timings: TimingCache, tmp_path: Path) -> None:
    """The second tries what the first has left. Entries have the keys of the machine, and the times of both."""
    claims = Claims({})
    for worker in ("one", "two"):
        tuner = SharedTuner(worker, claims, timings)
        _, compiled, inputs = compiled_region(engine_in(tmp_path / worker, "tune"), CASES["matmuls"])
        keys = {timings.entry_key(option.key, CPU) for option in compiled.options}
        variants = sum(len(option.untried) for option in compiled.options)
        with tuner.alone(), tuned_by(tuner):
            compiled.refine(inputs, 0.01, Deadline(120.0))
        state = claims.state()
        assert set(claims.entries()) == keys
        assert state.left == 0
        assert state.tried == variants
    assert {interval.host for interval in claims.state().intervals} == {host()}
    rounds = [interval for interval in claims.state().intervals if interval.worker == "two"]
    assert len(rounds) == 2  # before it asked, and behind: all had been tried


def test_the_lock_is_held_but_while_others_compile(timings: TimingCache, lock: HostLock) -> None:
    tuner = SharedTuner("one", Claims({}), timings)
    with tuner.alone():
        assert not lock.try_acquire()
        with tuner.waiting(is_elsewhere=False):
            assert not lock.try_acquire()
        with tuner.waiting(is_elsewhere=True):
            assert lock.try_acquire()
            lock.release()
        assert not lock.try_acquire()
    assert lock.try_acquire()


def test_nothing_is_claimed_after_ctrl_c(timings: TimingCache) -> None:
    claims = Claims({})
    tuner = SharedTuner("one", claims, timings)
    tuner.stop()
    assert tuner.claim(CPU, []) == {}
    assert claims.state().is_over
