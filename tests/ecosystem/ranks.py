"""Several processes that compute together over gloo.

`run_ranks(program, ...)` runs a function of an importable module once in each process, with the rank's number, after the processes have
met; what it returns (tensors, numbers, text, containers of them) comes back, in the order of the ranks. As a script, one of those
processes: `python -m tests.ecosystem.ranks MODULE FUNCTION RANK WORLD FOLDER TIMEOUT_S`.
"""

from __future__ import annotations

import datetime
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

_ROOT = Path(__file__).resolve().parents[2]
# A rank that waits this long for another one hangs: gloo raises in it, and says in which collective.
_HANG_S = 120

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)


def run_ranks(
    program: Callable[[int], Any],
    folder: Path,
    settings: Sequence[Mapping[str, str]] = ({}, {}),
    timeout_s: float = 280,
    hang_s: float = _HANG_S,
    killed: int | None = None,
) -> list[Any]:
    """Return what `program` returned on each rank; `settings[rank]` are environment variables for that rank alone.

    folder: an empty folder of the caller's. hang_s: how long a rank may wait for another. killed: a rank that kills itself, for which None is
    returned. A rank that fails fails the test, with what it wrote to stderr.
    """
    world = len(settings)
    deadline = time.monotonic() + timeout_s
    names = [program.__module__, program.__name__]
    if killed is not None:
        settings = [{**own, "RANKS_KILLED": str(killed)} for own in settings]
    with ExitStack() as stack:
        ranks = []
        for rank, own in enumerate(settings):
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, *names, str(rank), str(world), str(folder), str(hang_s)],
                cwd=_ROOT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **own},
                stderr=stack.enter_context((folder / f"{rank}.err").open("w")),
            )
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)  # before the process is waited for
        try:
            for process in ranks:
                process.wait(max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            pytest.fail(f"a rank ran for more than {timeout_s} s\n{_written(folder, world)}")
    expected = [-signal.SIGKILL if rank == killed else 0 for rank in range(world)]
    assert [rank.returncode for rank in ranks] == expected, _written(folder, world)
    return [None if rank == killed else torch.load(folder / f"{rank}.pt") for rank in range(world)]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _written(folder: Path, world: int) -> str:
    return "\n".join(f"rank {rank}:\n{(folder / f'{rank}.err').read_text()}" for rank in range(world))


def _main(module: str, function: str, rank: int, world: int, folder: Path, hang_s: float) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=os.environ.get("RANKS_STORE") or f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=hang_s),
    )
    result = getattr(importlib.import_module(module), function)(rank)
    torch.save(result, folder / f"{rank}.pt")
    if isinstance(result, dict) and result.get("error"):
        # Its collectives are unfinished, and gloo's threads still at them. While the interpreter ended, such a rank once in some thirty
        # runs aborted ("terminate called without an active exception"). What is asked of it is written; how PyTorch ends is not.
        os._exit(0)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), float(sys.argv[6]))
