"""Starts and caches: processes that start beside others, are killed, limited or confined, and share what was compiled. Each is a real process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.fault_processes import Nursery

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
