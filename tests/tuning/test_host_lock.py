"""The lock of a host, between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.tuning.host_lock import HostLock, host

_HOLD = """
import sys, time
from torch_hybrid_backend.tuning.host_lock import HostLock
lock = HostLock(sys.argv[1].encode().decode("unicode_escape"))
lock.acquire()
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def name() -> str:
    """A lock of this test alone."""
    return f"\0torch_hybrid_backend.tests.{os.getpid()}"


def _holder(name: str, seconds: float) -> subprocess.Popen[str]:
    """A process that waits for the lock, says so when it has it, and ends after some seconds."""
    command = [sys.executable, "-c", _HOLD, name.replace("\0", "\\x00"), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_one_process_holds_it_and_its_death_frees_it(name: str) -> None:
    with _holder(name, 60) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = HostLock(name)
        assert not lock.try_acquire()
        holder.send_signal(signal.SIGKILL)
        lock.acquire()
        assert lock.is_held
        lock.release()


def test_who_gives_way_lets_another_in(name: str) -> None:
    """A process that waits gets the lock between two rounds of the one that holds it."""
    lock = HostLock(name)
    lock.acquire()
    assert lock.try_acquire()  # it is ours
    with _holder(name, 0.1) as waiting:
        deadline = time.monotonic() + 60
        while waiting.poll() is None and time.monotonic() < deadline:
            lock.give_way()
            assert lock.is_held
        waiting.kill()
        assert waiting.stdout is not None
        assert waiting.stdout.read() == "held\n"
    lock.release()
    assert not lock.is_held


def test_a_name_that_cannot_be_bound() -> None:
    with pytest.raises(HybridError, match="lock for tuning cannot be taken"):
        HostLock("\0" + "x" * 200).try_acquire()


def test_all_processes_of_a_host_have_one_name_for_it() -> None:
    """The name is neither a container's nor a process's."""
    code = "from torch_hybrid_backend.tuning.host_lock import host; print(host())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == host()
