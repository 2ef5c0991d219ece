"""A test for each model, batch and peer. The peers of a row are timed together, in interleaved rounds in processes of their own
(`benchmarks.compare`), when the first test of the row asks; pytest-benchmark is given the times that were taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.catalogue import MODELS
from benchmarks.compare import Effort, compare
from benchmarks.conftest import chosen_peers


class Replay:
    """A timer whose time passes only in `call`, by the next of the given seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        self._left: Iterator[float] = iter(())

    def load(self, seconds: list[float]) -> None:
        """The time that the following calls take."""
        self._left = iter(seconds)

    def __call__(self) -> float:
        return self._now

    def call(self) -> None:
        """Let the next call's time pass."""
        self._now += next(self._left)


REPLAY = Replay()


@pytest.fixture(scope="session")
def results(
    row: tuple[str, int], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The row's results, by peer."""
    option = request.config.getoption
    peers = chosen_peers(request.config)
    effort = Effort(
        threads=option("--threads") or torch.get_num_threads(),
        seconds=option("--seconds"),
        precision=option("--precision"),
    )
    log: Path = tmp_path_factory.mktemp("benchmarks") / "log"
    found = compare(row[0], option("--size"), row[1], peers, effort, log, lambda _: None)
    return {result["peer"]: result for result in found}


@pytest.mark.benchmark(timer=REPLAY)
def test_peer(results: dict[str, dict[str, Any]], row: tuple[str, int], peer: str, benchmark: Any) -> None:
    """A peer that is right has times; a gap is a skip that says why, and for ours a failure."""
    result = dict(results[peer])
    if "gap" in result:
        assert peer != "hybrid", result["gap"]
        pytest.skip(result["gap"])
    seconds = [ms / 1e3 for ms in result.pop("samples_ms")]
    benchmark.group = f"{MODELS[row[0]].title}, batch {row[1]}"
    benchmark.extra_info.update(result)
    REPLAY.load(seconds)
    benchmark.pedantic(REPLAY.call, rounds=len(seconds), iterations=1)
