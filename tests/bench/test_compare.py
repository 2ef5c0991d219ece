"""Comparison of peers. tests/benchmarks/test_compare.py tests peers that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.work_for_tests import SHORT, SmallWork, TokenWork
from torch_hybrid_backend.bench.compare import compare, reference
from torch_hybrid_backend.bench.peers import by_name


def test_figures(tmp_path: Path) -> None:
    """Figures cover all rounds: first call, median, and the share of other load."""
    work = SmallWork(threads=1, folder=tmp_path, batch=4)
    facts = reference(work, SHORT, tmp_path / "log")
    assert (facts.batch, facts.was_training, facts.is_random) == (4, False, False)
    assert facts.flops == 2 * 4 * (128 * 256 + 256 * 128 + 128 * 16)
    said: list[str] = []
    peers = [by_name()["eager"], by_name()["hybrid"]]
    eager, hybrid = compare(work, facts, peers, SHORT, tmp_path / "log", said.append)
    assert eager["max_error"] == 0.0
    assert eager["items_per_s"] == pytest.approx(4 / eager["median_ms"] * 1e3, rel=1e-3)
    for result in (eager, hybrid):
        assert result["rounds"] == 2
        assert result["median_ms"] > 0
        assert result["other_load"] >= 0
    # Compiling takes more than a call. Eager's first call is rounded to milliseconds, of which it may take less than half of one.
    assert hybrid["first_call_s"] * 1e3 > hybrid["median_ms"]
    assert said == ["eager: preparing", "hybrid: preparing", "timing, round 1 of 2", "timing, round 2 of 2"]


def test_a_model_whose_operations_cannot_be_counted(tmp_path: Path) -> None:
    """Times it all the same."""
    work = TokenWork(threads=1, folder=tmp_path, batch=4)
    facts = reference(work, SHORT, tmp_path / "log")
    assert facts.flops == 0
    (eager,) = compare(work, facts, [by_name()["eager"]], SHORT, tmp_path / "log", lambda _: None)
    assert eager["max_error"] == 0.0
