"""Peers side by side, on the smallest model and for very short rounds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.compare import Effort, compare
from torch_hybrid_backend.bench.peers import BASELINES, Peer

EAGER = Peer("eager", "eager", "torch_hybrid_backend.bench.peers.eager")


def planted(name: str) -> Peer:
    """A peer of those under tests/benchmarks/planted/."""
    return Peer(name, name, f"tests.benchmarks.planted.{name}")


def test_gaps_do_not_stop_the_others(tmp_path: Path) -> None:
    """A peer that is right is timed; one that is wrong, refuses, dies or is not installed has a gap that says why, and no figures."""
    absent = Peer(
        "absent", "absent", "torch_hybrid_backend.bench.peers.eager", (("no_such_package", "no-such-package"),)
    )
    peers = [planted("wrong"), EAGER, planted("refusing"), planted("dying"), absent]
    effort = Effort(threads=1, seconds=0.05, rounds=3, timeout_s=120)
    said: list[str] = []
    results = compare("lstm", "small", 1, peers, effort, tmp_path / "log", said.append)
    assert [result["peer"] for result in results] == ["wrong", "eager", "refusing", "dying", "absent"]
    wrong, eager, refusing, dying, missing = results
    assert wrong["gap"].startswith("wrong answer: up to 0.5")
    assert refusing["gap"] == "NotImplementedError: no rule for aten.sigmoid"
    assert dying["gap"] == "the process ended by SIGSEGV"
    assert missing["gap"] == "not installed: pip install no-such-package"
    assert not any("median_ms" in result for result in (wrong, refusing, dying, missing))
    assert eager["max_error"] == 0.0
    assert eager["rounds"] == 3
    assert 0 < eager["median_ms"] <= eager["p90_ms"]
    assert len(eager["samples_ms"]) == eager["calls"] >= 3
    assert eager["gflop"] > 0
    assert min(eager["preparing_mib"], eager["running_mib"]) > 50  # torch alone takes more
    assert "timing, round 3 of 3" in said
    assert (
        "the whole graph" in (tmp_path / "log").read_text()
    )  # the first line is the gap, the rest is for who looks into it


@pytest.mark.full
def test_kept_caches_make_compile_times_warm(tmp_path: Path) -> None:
    """The second run finds what the first one compiled and says so; what a stopped run left is not taken for a filled cache."""
    peer = Peer("caching", "caching", "tests.benchmarks.planted.caching", keeps_cache=True)
    effort = Effort(threads=1, seconds=0.05, rounds=1, timeout_s=120, warm=frozenset({"caching"}), caches=tmp_path)

    def run(batch: int) -> dict[str, object]:
        [result] = compare("lstm", "small", batch, [peer], effort, tmp_path / "log", lambda text: None)
        return result

    left = tmp_path / "lstm-small-1-caching" / "inductor"
    left.mkdir(parents=True)
    (left / "compiled").touch()
    first, second, other = run(1), run(1), run(2)
    assert [r["found"] for r in (first, second, other)] == [False, True, False]
    assert "compile_cold_s" in first
    assert "compile_warm_s" in first
    assert "compile_cold_s" not in second
    assert "compile_warm_s" in second
    assert "compile_cold_s" in other


@pytest.mark.full  # four processes; tests/bench/test_worker.py judges such results, tests/bench/peers times peers in each precision
def test_a_precision_is_asked_of_all_that_have_none_of_their_own(tmp_path: Path) -> None:
    """Peers get it with inputs to calibrate by, other ones than are timed; a row tells how far results are off eager's in float32. How far they
    may be is the reader's to say, but for those that are further off than zeros."""
    effort = Effort(threads=1, seconds=0.05, rounds=1, timeout_s=120, precision="int8")
    far = dataclasses.replace(planted("quantizing"), name="far", precision="int4-weights")
    peers = [BASELINES[0], planted("quantizing"), far]
    base, asked, far_off = compare("lstm", "small", 1, peers, effort, tmp_path / "log", lambda _: None)
    assert (base["peer"], base["precision"], base["rms_error"]) == ("eager_float32", "float32", 0.0)
    assert (asked["precision"], asked["asked"]) == ("int8", "int8")
    assert asked["rms_error"] == pytest.approx(0.01, rel=1e-3)
    assert asked["calibrated"] >= 4
    assert asked["others"]
    assert far_off["precision"] == "int4-weights"
    assert far_off["gap"] == "wrong answer: off by 2 times eager's root mean square"


def test_what_a_precision_needs_is_named(tmp_path: Path) -> None:
    """Packages that only quantized models need are not missed in float32."""
    wanted = {"int8": (("no_such_package", "no-such-package"),)}
    peer = Peer("eager", "eager", "torch_hybrid_backend.bench.peers.eager", more_packages=wanted)
    assert peer.missing() == peer.missing("bf16") == ""
    assert peer.missing("int8") == "not installed: pip install no-such-package"
    pinned = Peer("base", "base", "torch_hybrid_backend.bench.peers.eager", more_packages=wanted, precision="float32")
    assert pinned.missing("int8") == ""
