"""Workers: what they answer, and that they end."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from torch_hybrid_backend.bench.process import WorkerError, WorkerProcess, wait_until_quiet
from torch_hybrid_backend.bench.worker import State


@dataclass(frozen=True, slots=True)
class Spin:
    """Answer: the worker's process id; a thread of it computes for `seconds` after that."""

    seconds: float

    def answer(self, state: State) -> int:
        import threading

        end = time.monotonic() + self.seconds

        def spin() -> None:
            while time.monotonic() < end:
                pass

        threading.Thread(target=spin, daemon=True).start()
        return os.getpid()


@dataclass(frozen=True, slots=True)
class Hang:
    """Never answered."""

    def answer(self, state: State) -> None:
        time.sleep(3600)


def test_a_worker_that_spins_is_waited_for_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    """The next peer's round starts once this one's threads sleep; who does not answer in time leaves no process behind."""
    with WorkerProcess({}, tmp_path / "log") as worker:
        process = worker.ask(Spin(0.5), within_s=120)
        if worker.cpu_ns() == 0:
            pytest.skip("this system does not tell the processor time of threads")
        assert wait_until_quiet([worker], at_most_s=60) > 0.3
        before = worker.cpu_ns()
        time.sleep(0.1)
        assert worker.cpu_ns() - before < 10e6  # idle: nothing of it is left on the cores
        with pytest.raises(WorkerError, match="no answer within 0 s"):
            worker.ask(Hang(), within_s=0.2)
        assert not Path(f"/proc/{process}").exists()
