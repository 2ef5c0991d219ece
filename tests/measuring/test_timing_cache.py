"""Timings on disk."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.measuring.timing_cache import TimingCache, returning_only
from torch_hybrid_backend.storage.store import Store

TIMES = {"tvm": 10.5, "eager": 20.0, "broken": math.inf}


def _cache(folder: Path, machine: str = "machine") -> TimingCache:
    return TimingCache(Store(folder), lambda device: f"{machine} {device}")


def test_a_second_process_finds_the_times(tmp_path: Path) -> None:
    """Same kind, key, device and machine: the times are found, the last that were kept."""
    _cache(tmp_path).put("regions", "key", CPU, {"tvm": 1.0})
    _cache(tmp_path).put("regions", "key", CPU, TIMES)
    assert _cache(tmp_path).get("regions", "key", CPU) == TIMES


def test_disturbed_times_are_found_once_three_processes_took_them(tmp_path: Path) -> None:
    """Until then they are a miss, so that the next process times again. The shortest of all are found, and said to be disturbed."""
    for tvm, eager in ((100.0, 20.0), (10.0, 300.0)):
        cache = _cache(tmp_path)
        for _ in range(3):  # a process counts once
            cache.put("regions", "key", CPU, {"tvm": tvm, "eager": eager}, is_disturbed=True)
        assert _cache(tmp_path).get("regions", "key", CPU) == {}
    _cache(tmp_path).put("regions", "key", CPU, {"tvm": 30.0, "eager": 30.0, "more": 5.0}, is_disturbed=True)
    found = _cache(tmp_path).get("regions", "key", CPU)
    assert found == {"tvm": 10.0, "eager": 20.0, "more": 5.0}
    assert found.is_disturbed


def test_undisturbed_times_replace_disturbed_ones(tmp_path: Path) -> None:
    """Times of a quiet machine stay; other load later on only adds what was not timed yet."""
    cache = _cache(tmp_path)
    cache.put("regions", "key", CPU, {"tvm": 1.0}, is_disturbed=True)
    cache.put("regions", "key", CPU, TIMES)
    assert cache.get("regions", "key", CPU) == TIMES
    assert not cache.get("regions", "key", CPU).is_disturbed
    cache.put("regions", "key", CPU, {"tvm": 1.0, "more": 5.0}, is_disturbed=True)
    assert cache.get("regions", "key", CPU) == {**TIMES, "more": 5.0}


def test_any_other_circumstance_is_a_miss(tmp_path: Path) -> None:
    """Another kind, key, device or machine has its own entry; the machine is asked each time."""
    machine = "machine"
    cache = TimingCache(Store(tmp_path), lambda device: f"{machine} {device}")
    cache.put("regions", "key", CPU, TIMES)
    assert cache.get("regions", "other", CPU) == {}
    assert cache.get("kernels", "key", CPU) == {}
    assert cache.get("regions", "key", Device("cuda")) == {}
    machine = "other"
    assert cache.get("regions", "key", CPU) == {}
    machine = "machine"
    assert cache.get("regions", "key", CPU) == TIMES


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b"\xff",
        b'{"tvm": 1.0}',
        b'{"takers": 0, "times": [1]}',
        b'{"takers": "few", "times": {"tvm": 1.0}}',
        *(b'{"takers": 0, "times": {"tvm": %s}}' % us for us in (b'"fast"', b"NaN", b"-1")),
    ],
)
def test_an_entry_of_another_form_is_a_miss(tmp_path: Path, content: bytes) -> None:
    """Whole by checksum, but not what this version writes."""
    store, cache = Store(tmp_path), _cache(tmp_path)
    cache.put("regions", "key", CPU, TIMES)
    (entry,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    kind, key = entry.parent.parent.name, entry.parent.name
    entry.unlink()
    store.put(kind, key, content)
    assert cache.get("regions", "key", CPU) == {}


def test_a_store_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next process times again; this one goes on."""
    cache = _cache(tmp_path / "cache")
    (tmp_path / "cache" / "regions").write_text("in the way")
    with caplog.at_level(logging.INFO):
        cache.put("regions", "key", CPU, TIMES)
    assert "not kept" in caplog.text


def test_times_of_other_kinds_are_taken_anew(tmp_path: Path) -> None:
    """Kept times of one kind are found within the context, those of others behind it; what is taken anew is kept."""
    cache = _cache(tmp_path)
    cache.put("regions", "key", CPU, TIMES)
    cache.put("kernels", "key", CPU, TIMES)
    with returning_only("kernels"):
        assert cache.get("kernels", "key", CPU) == TIMES
        assert cache.get("regions", "key", CPU) == {}
        cache.put("regions", "key", CPU, {"tvm": 1.0})
    assert cache.get("regions", "key", CPU) == {"tvm": 1.0}


def test_entries_of_other_machines(tmp_path: Path) -> None:
    """Times are kept and found by the keys of entries, disturbed ones as `get` finds them."""
    other = _cache(tmp_path, "other").entry_key("key", CPU)
    _cache(tmp_path).put_entry("regions", other, TIMES)
    _cache(tmp_path).put("regions", "key", CPU, TIMES, is_disturbed=True)
    assert _cache(tmp_path, "other").get("regions", "key", CPU) == TIMES
    own = _cache(tmp_path).entry_key("key", CPU)
    assert _cache(tmp_path).entries("regions") == {other: TIMES, own: {}}
