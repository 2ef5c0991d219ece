"""Worker processes: answers, and their end."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import torch_hybrid_backend
from torch_hybrid_backend.bench import worker
from torch_hybrid_backend.bench.process import ROOT, WorkerError, WorkerProcess, wait_until_quiet
from torch_hybrid_backend.bench.worker import State


@dataclass(frozen=True, slots=True)
class Spin:
    """Message. Answer: the worker's process id; a thread of the worker then computes for `seconds`."""

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
    """Message that is never answered."""

    def answer(self, state: State) -> None:
        time.sleep(3600)


@dataclass(frozen=True, slots=True)
class Where:
    """Message. Answer: the files of the package and of its `bench` in the worker."""

    def answer(self, state: State) -> tuple[str, str]:
        return str(torch_hybrid_backend.__file__), str(worker.__file__)


def test_a_worker_has_the_package_of_its_tree(tmp_path: Path) -> None:
    """A worker imports the package of its tree. For an older tree without `bench`, only `bench` comes from here: so two revisions can be
    compared."""
    package = tmp_path / "torch_hybrid_backend"
    package.mkdir()
    for path in (ROOT / "torch_hybrid_backend").iterdir():
        if path.name != "bench":
            (package / path.name).symlink_to(path)
    with WorkerProcess({}, tmp_path / "log", tmp_path) as process:
        where, bench = process.ask(Where(), within_s=120)
    assert where == str(package / "__init__.py")
    assert bench == str(worker.__file__)


def _is_waited_for(worker: WorkerProcess) -> bool:
    """True if the wait lasts as long as a thread of the worker spins, and the worker then sleeps."""
    worker.ask(Spin(0.5), within_s=120)
    waited = wait_until_quiet([worker], at_most_s=60)
    before = worker.cpu_ns()
    time.sleep(0.1)
    return waited > 0.3 and worker.cpu_ns() - before < 10e6


def test_a_worker_that_spins_is_waited_for_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    """The next round starts when the worker's threads sleep. A worker that does not answer in time is ended, and no process is left."""
    with WorkerProcess({}, tmp_path / "log") as spinning:
        process = spinning.ask(Spin(0.5), within_s=120)
        if spinning.cpu_ns() == 0:
            pytest.skip("this system does not tell the processor time of threads")
        # Amid other load a thread that spins may get no core for a while, and looks as if it slept.
        assert any(_is_waited_for(spinning) for _ in range(10))
        with pytest.raises(WorkerError, match="no answer within 0 s"):
            spinning.ask(Hang(), within_s=0.2)
        assert not Path(f"/proc/{process}").exists()
