"""Starts and caches: processes that are limited, killed or confined, and share what was compiled. Each is a real process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.fault_processes import Nursery
from tests.end_to_end.test_faults_compiler import linker

fault = pytest.mark.fault


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


# Nobody may have more processes than there are: root neither, once it runs for another user and may not exceed limits.
_NO_PROCESSES = """
import resource, struct
torch.set_num_threads(1)
if os.getuid() == 0:
    os.setresuid(12345, 0, 0)
    data = ctypes.create_string_buffer(24)
    header = struct.pack("Ii", 0x20080522, 0)
    system("capget", header, data)
    words = list(struct.unpack("6I", data.raw))
    words[0] &= ~(1 << 21 | 1 << 24)  # effective: CAP_SYS_ADMIN, CAP_SYS_RESOURCE
    system("capset", header, struct.pack("6I", *words))
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
check(6)
"""
_FEW_FILES = """
import resource
used = set(map(int, os.listdir("/proc/self/fd")))
left = [number for number in range(1000) if number not in used][5]  # enough to write into the cache, not for pipes
resource.setrlimit(resource.RLIMIT_NOFILE, (left, left))
check(6)
"""


@fault(
    "the kernel compiler cannot be started in one of several processes that share a cache (no file or process is left)",
    "one warning in that process, which runs in eager; the others compile as ever",
)
@pytest.mark.parametrize("limits", [_FEW_FILES, _NO_PROCESSES], ids=["files", "processes"])
def test_a_worker_that_could_not_start_its_compiler(limits: str, nursery: Nursery, tmp_path: Path) -> None:
    """A kernel is not taken for one that cannot be compiled because one process had no file left: the next process compiles it."""
    limited = nursery.run(limits, tmp_path)
    assert (limited.answers, limited.status) == (["eager"], 0), limited
    assert any("cannot be started" in warning for warning in limited.warnings), limited
    healthy = nursery.run("check(6)", tmp_path)
    assert (healthy.answers, healthy.warnings, healthy.status) == (["tvm"], [], 0), healthy


def kernels(folder: Path) -> int:
    """How many kernels the cache in a folder holds."""
    return len(list((folder / "cache").glob("kernels/*/*.so")))


_LARGER = """
layers = nn.ModuleList(nn.Linear(*sizes) for sizes in [(24, 40), (40, 56), (56, 72)]).eval()

def larger(x):
    for layer in layers:
        x = layer(x).softmax(-1).cumsum(0)
    return x

check(6, larger)
"""


@fault(
    "a process is killed (SIGKILL) in its first call, again and again: by a liveness probe, or a server's time limit",
    "each restart finds what the ones before it have traced and compiled, and gets further",
)
def test_a_server_that_is_killed_while_it_starts(nursery: Nursery, tmp_path: Path) -> None:
    """Every kernel is kept as soon as it is compiled: after a few restarts there is little left to do."""
    slowly = linker(tmp_path, "")
    (tmp_path / "programs" / "ld").write_text(
        f'#!/bin/sh\necho >> {tmp_path}/linked; sleep 0.3\nPATH={os.environ["PATH"]} exec ld "$@"\n'
    )
    settings = {"PATH": slowly, "HYBRID_COMPILE_THREADS": "1"}
    found = []
    for _ in range(3):
        before = kernels(tmp_path)
        child = nursery.start(_LARGER, tmp_path, **settings)
        until = time.monotonic() + 60
        while kernels(tmp_path) == before and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(child.process, signal.SIGKILL)
        assert child.done().status == -signal.SIGKILL
        found.append(kernels(tmp_path))
        assert list((tmp_path / "cache").glob("captures/*/*")), "the traced graph is kept before kernels are compiled"
    assert 0 < found[0] < found[1] < found[2], found
    done = nursery.run(_LARGER, tmp_path, **settings)
    assert (done.answers, done.warnings, done.status) == (["tvm"], [], 0), done
    assert kernels(tmp_path) >= 5
    # Of each killed process one kernel may have been linked and not kept.
    assert len((tmp_path / "linked").read_text().splitlines()) <= kernels(tmp_path) + 3
