"""Faults of the process: no memory, closed descriptors, missing parts. Each in a process of its own."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.fault_processes import ROOT, Nursery

fault = pytest.mark.fault

_LIMIT = """
import resource
def limit(more_mib):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (more_mib << 20) if more_mib else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def _meets_the_limit(before: str, mebibytes: int, size: int = 5000) -> str:
    """A script that runs `before`, leaves the process so much more memory, calls, lifts the limit and calls again.

    A call returns 4 * size * size bytes.
    """
    return f"""{_LIMIT}
def outer(a, b):
    return torch.relu(a[:, None] * b[None, :]) + 1
a, b = torch.randn({size}), torch.randn({size})
fast, plans = compiled(outer, dynamic=False)
with torch.no_grad():
    {before}
    limit({mebibytes})
    try:
        fast(a, b)
    except RuntimeError as error:
        say("memory" in str(error).lower())
    limit(0)
    assert (fast(a, b) - outer(a, b)).abs().max() < 1e-5
say(*sorted({{region.engine for region in plans[-1].regions}}), "right")
"""


@fault(
    "no memory for a call's outputs",
    "one warning, and eager runs that call: it may do with less, or raises PyTorch's RuntimeError; later calls are compiled as before",
)
def test_out_of_memory_in_a_call(nursery: Nursery, tmp_path: Path) -> None:
    """The call raises what eager would raise, and the function works on when there is memory again."""
    # Held: memory of a large result that nobody holds would serve the next call. A result is 309 MiB: nothing else is of that size.
    script = _meets_the_limit(
        "held = [fast(a, b) for _ in range(3)]; assert (held[2] - outer(a, b)).abs().max() < 1e-5", 16, size=9000
    )
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["True", "tvm right"], 0), done
    (warning,) = done.warnings
    assert "eager runs this call, later ones are tried as before: could not allocate a tensor of" in warning


@fault("no memory for a small tensor while a large one is kept for later calls", "nothing: what is kept is freed")
def test_kept_memory_is_freed_for_others(nursery: Nursery, tmp_path: Path) -> None:
    """Results under 32 MiB, which the C library allocates, get the memory of a dropped result of 309 MiB."""
    script = f"""{_LIMIT}
def outer(a, b):
    return torch.relu(a[:, None] * b[None, :]) + 1
large, small = torch.randn(9000), torch.randn(2500)
fast, plans = compiled(outer, dynamic=False)
with torch.no_grad():
    for _ in range(2):
        fast(large, large), fast(small, small)
    for _ in range(2):
        dropped = fast(large, large)
    del dropped
    limit(16)
    found = fast(small, small)
    limit(0)
    say(bool((found - outer(small, small)).abs().max() < 1e-5))
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.warnings, done.status) == (["True"], [], 0), done


@pytest.mark.full
@fault("no memory for a first call", "PyTorch's RuntimeError, as in eager; the next call that fits is right")
def test_out_of_memory_in_the_first_call(nursery: Nursery, tmp_path: Path) -> None:
    """The graph is not broken by a first call that found no memory."""
    # Threads take memory too, and libgomp ends the process where it cannot start one: they are started before.
    script = _meets_the_limit("torch.randn(1 << 20).exp().sum()", 110)
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["True", "tvm right"], 0), done


@pytest.mark.full
@fault("a call that needs more memory than any machine has", "PyTorch's RuntimeError, as in eager")
def test_impossible_allocation(nursery: Nursery, tmp_path: Path) -> None:
    """2 EiB: refused when the graph is traced or called, by an exception."""
    script = """
def huge(a):
    return a.expand(1 << 59, 1) * 2
try:
    with torch.no_grad():
        compiled(huge, dynamic=False)[0](torch.randn(1, 1))
except Exception as error:
    say(isinstance(error, RuntimeError))
check(6)
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["True", "tvm"], 0), done


@fault("standard input, output and error are closed", "nothing")
def test_closed_descriptors(nursery: Nursery, tmp_path: Path) -> None:
    """Pipes do not take their places, so that what somebody prints goes nowhere instead of to the compiler."""
    script = """
result = os.open("result", os.O_CREAT | os.O_WRONLY)
result = os.dup2(result, 100)
for descriptor in range(50):
    try:
        os.close(descriptor)
    except OSError:
        pass
sys.stdin = sys.stdout = sys.stderr = None
logging.getLogger().handlers.clear()
say = lambda *words: os.write(result, (" ".join(words) + "\\n").encode())
check(6)
for descriptor in range(3):
    try:
        os.write(descriptor, b"noise " * 100)
    except OSError:
        pass
check(7)
"""
    done = nursery.run(script, tmp_path, HYBRID_COMPILE_THREADS="1", HYBRID_COMPILE_DEADLINE_S="60")
    assert done.status == 0, done
    (result,) = tmp_path.glob("child-*/result")
    assert result.read_text().split() == ["tvm", "tvm"]


@pytest.mark.full
@fault("a program that ignores SIGCHLD", "nothing")
def test_ignored_children(nursery: Nursery, tmp_path: Path) -> None:
    """Its children vanish when they end; ours do too, unharmed."""
    script = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
check(6)
(worker,) = workers()
os.kill(worker, signal.SIGKILL)
time.sleep(0.2)
check(7)
"""
    done = nursery.run(script, tmp_path, HYBRID_COMPILE_THREADS="1")
    assert (done.answers, done.warnings, done.status) == (["tvm", "tvm"], [], 0), done


@pytest.mark.full
@fault("the C++ runtime `_runtime.so` is missing or is not a library", "one HybridError that says how to build it")
@pytest.mark.parametrize("how", ["missing", "no library"])
def test_runtime_library(how: str, tmp_path: Path) -> None:
    """A broken installation is an error with what to do, not a crash."""
    package = shutil.copytree(ROOT / "torch_hybrid_backend", tmp_path / "torch_hybrid_backend")
    if how == "missing":
        (package / "_runtime.so").unlink()
    else:
        (package / "_runtime.so").write_text("no library")
    code = (
        "import torch; m = torch.nn.Linear(4, 4).eval(); torch.set_grad_enabled(False);"
        "print(torch.compile(m, backend='hybrid')(torch.randn(2, 4)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "HYBRID_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 1
    assert "HybridError" in done.stderr
    assert "pip install ." in done.stderr


_FORBID_USERFAULTFD = """
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]
# The number of the system call; userfaultfd gets EPERM, all others go on.
filter = (Instruction * 4)((0x20, 0, 0, 0), (0x15, 0, 1, 323), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000))
system("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
system("prctl", 22, 2, ctypes.byref(Program(4, filter)), 0, 0)  # PR_SET_SECCOMP: a filter
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.system() != "Linux", reason="the filter is x86-64's")
@fault(
    "a container that forbids userfaultfd (seccomp)",
    "nothing; a write that PyTorch's version counter misses is seen within 256 calls, with one warning",
)
def test_userfaultfd_is_forbidden(nursery: Nursery, tmp_path: Path) -> None:
    """Live weights stay live: late, with a warning that says so, or at once after `refresh`."""
    script = f"""{_FORBID_USERFAULTFD}
from torch_hybrid_backend import refresh
from torch_hybrid_backend.runtime.native.ops import CALLS_PER_ROUND, watches_writes
say(watches_writes())
module = nn.Sequential(nn.Conv2d(128, 256, 3, bias=False), nn.BatchNorm2d(256)).eval()  # the one is folded into the other
fast, plans = compiled(module)
x = torch.randn(1, 128, 5, 5)
right = lambda: bool((fast(x) - module(x)).abs().max() < 1e-3)
with torch.no_grad():
    assert right()
    module[0].weight.data[133, 5] += 100
    refresh(module)
    say(right())
    module[0].weight.data[133, 5] += 100
    say(any(right() for _ in range(CALLS_PER_ROUND)))
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["False", "True", "True"], 0), done
    assert sum("refresh(model)" in warning for warning in done.warnings) == 1
