"""Placement verdicts on disk."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from torch_hybrid_backend.partition.cost_cache import VerdictCache, machine_fingerprint
from torch_hybrid_backend.store import Store

CONTENDERS = {"tvm": "1", "eager": "2.13"}
COSTS = {"tvm": 10.5, "eager": 20.0}


def test_a_second_process_finds_the_costs(tmp_path: Path) -> None:
    """Same region, contenders and machine: the costs are found."""
    VerdictCache(Store(tmp_path), "machine").put("region", CONTENDERS, COSTS)
    assert VerdictCache(Store(tmp_path), "machine").get("region", dict(reversed(CONTENDERS.items()))) == COSTS


def test_any_other_circumstance_is_a_miss(tmp_path: Path) -> None:
    """Another region, engine version, set of contenders or machine has its own entry."""
    store = Store(tmp_path)
    VerdictCache(store, "machine").put("region", CONTENDERS, COSTS)
    assert VerdictCache(store, "other").get("region", CONTENDERS) is None
    cache = VerdictCache(store, "machine")
    assert cache.get("other", CONTENDERS) is None
    assert cache.get("region", {**CONTENDERS, "tvm": "2"}) is None
    assert cache.get("region", {**CONTENDERS, "triton": "1"}) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b'{"tvm": "fast", "eager": 1}',
        b'{"tvm": 1}',
        b'{"tvm": NaN, "eager": 1}',
        b'{"tvm": -1, "eager": 1}',
        b"\xff",
    ],
)
def test_an_entry_of_another_form_is_a_miss(tmp_path: Path, content: bytes) -> None:
    """Whole by checksum, but not what this version writes."""
    store = Store(tmp_path)
    cache = VerdictCache(store, "machine")
    cache.put("region", CONTENDERS, COSTS)
    (entry,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    kind, key = entry.parent.parent.name, entry.parent.name
    entry.unlink()
    store.put(kind, key, content)
    assert cache.get("region", CONTENDERS) is None


def test_a_store_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process times again; this one goes on."""
    store = Store(tmp_path / "cache")
    (tmp_path / "cache" / "verdicts").write_text("in the way")
    with caplog.at_level(logging.INFO):
        VerdictCache(store, "machine").put("region", CONTENDERS, COSTS)
    assert "not kept" in caplog.text


def test_the_fingerprint_names_threads_and_versions() -> None:
    """Timings with another number of threads or another torch are other timings."""
    import torch

    assert f"threads {torch.get_num_threads()}" in machine_fingerprint()
    assert torch.__version__ in machine_fingerprint()


def test_the_fingerprint_is_that_of_the_moment() -> None:
    """Threads or the precision of matrix products set anew make other timings."""
    import torch

    before, threads = machine_fingerprint(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert machine_fingerprint() != before
    finally:
        torch.set_num_threads(threads)
    assert machine_fingerprint() == before
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "highest")
        assert machine_fingerprint() != before
    finally:
        torch.set_float32_matmul_precision(precision)
    with torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled):
        assert machine_fingerprint() != before
