"""Faults of the kernel compiler: killed, hanging, interrupted, starved, absent. Each in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.fault_processes import Nursery

fault = pytest.mark.fault

# A linker, the last step of a kernel's compilation, that does what a test wants once; `once` is absent afterwards.
_LINKER = """#!/bin/sh
if [ -e {folder}/once ]; then rm {folder}/once; {action}; fi
exec {ld} "$@"
"""


def linker(folder: Path, action: str) -> str:
    """A PATH on which `ld` does `action` the first time."""
    programs = folder / "programs"
    programs.mkdir()
    ld = next(path for part in os.environ["PATH"].split(":") if (path := Path(part) / "ld").exists())
    (programs / "ld").write_text(_LINKER.format(folder=folder, action=action, ld=ld))
    (programs / "ld").chmod(0o755)
    (folder / "once").write_text("")
    return f"{programs}:{os.environ['PATH']}"


pytestmark = pytest.mark.skipif(
    not any((Path(part) / "ld").exists() for part in os.environ["PATH"].split(":")), reason="there is no ld"
)


@fault(
    "the kernel compiler is killed (SIGKILL) while it compiles",
    "one warning `compiler_crashed`; that region falls back to eager",
)
def test_killed_at_work(nursery: Nursery, tmp_path: Path) -> None:
    """The region goes to eager with one warning that names the signal; the next compilation works."""
    path = linker(tmp_path, "kill -9 $PPID; sleep 60")
    done = nursery.run("check(6); check(7)", tmp_path, PATH=path)
    assert done.answers == ["eager", "tvm"], done
    (warning,) = done.warnings
    assert "compiler_crashed" in warning
    assert "SIGKILL" in warning


@fault("the kernel compiler is killed (SIGKILL) between two compilations", "nothing")
def test_killed_between_compilations(nursery: Nursery, tmp_path: Path) -> None:
    """A new one starts; nobody notices."""
    script = """
check(6)
(worker,) = workers()
os.kill(worker, signal.SIGKILL)
os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
check(7)
assert workers() != [worker]
"""
    done = nursery.run(script, tmp_path, HYBRID_COMPILE_THREADS="1")
    assert (done.answers, done.warnings, done.status) == (["tvm", "tvm"], [], 0), done


@fault(
    "the kernel compiler hangs past HYBRID_COMPILE_DEADLINE_S",
    "one warning `deadline`; that region falls back to eager",
)
def test_hangs(nursery: Nursery, tmp_path: Path) -> None:
    """A compiler that hangs is killed at the deadline, with what it started; the next compilation works."""
    path = linker(tmp_path, "exec sleep 600")
    done = nursery.run("check(6); check(7)", tmp_path, PATH=path, HYBRID_COMPILE_DEADLINE_S="5")
    assert done.answers == ["eager", "tvm"], done
    (warning,) = done.warnings
    assert "deadline" in warning
    assert "HYBRID_COMPILE_DEADLINE_S" in warning


@fault("Ctrl-C (SIGINT) during a compilation", "KeyboardInterrupt; the next call compiles")
def test_interrupted(nursery: Nursery, tmp_path: Path) -> None:
    """KeyboardInterrupt reaches the caller, no process stays at work, and the same function can be called again."""
    script = """
x = torch.randn(6, 24)
fast, plans = compiled(model)
with torch.no_grad():
    say("calling")
    try:
        fast(x)
    except KeyboardInterrupt:
        say("interrupted", *workers())
    torch.testing.assert_close(fast(x), model(x))
say(plans[-1].regions[0].engine)
"""
    child = nursery.start(script, tmp_path, PATH=linker(tmp_path, "exec sleep 600"), HYBRID_COMPILE_THREADS="1")
    child.until("calling")
    while (tmp_path / "once").exists():
        time.sleep(0.02)
    os.kill(child.process, signal.SIGINT)
    done = child.done()
    assert done.answers == ["calling", "interrupted", "tvm"], done
    assert done.warnings == []


@pytest.mark.full
@fault("Ctrl-C (SIGINT) at any moment of a first call", "KeyboardInterrupt; the next call is right")
def test_interrupted_at_any_moment(nursery: Nursery, tmp_path: Path) -> None:
    """Tracing, passes, compilation, checking, timing: wherever it strikes, the next call gives the right answer."""
    script = """
struck = 0
for rows in range(2, 26):
    x = torch.randn(rows, 24)
    fast, plans = compiled(model, dynamic=False)
    timer = threading.Timer(0.02 * rows, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with torch.no_grad():
            fast(x)
        timer.cancel()
        timer.join()
    except KeyboardInterrupt:
        struck += 1
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
say("struck" if struck else "never struck")
"""
    done = nursery.run(script, tmp_path, HYBRID_PLACEMENT="measure")
    assert (done.answers, done.status) == (["struck"], 0), done


@fault(
    "the user's process is terminated (SIGTERM) while kernels compile",
    "the process ends and leaves no other process behind",
)
def test_terminated(nursery: Nursery, tmp_path: Path) -> None:
    """The compiler and its linker, which would work on for minutes, end with it."""
    path = linker(tmp_path, "exec sleep 600")
    child = nursery.start("check(6)", tmp_path, PATH=path)
    while (tmp_path / "once").exists():
        time.sleep(0.02)
    assert child.family()
    os.kill(child.process, signal.SIGTERM)
    assert child.done().status == -signal.SIGTERM


@pytest.mark.full
@fault("the kernel compiler runs out of memory", "one warning that says so; that region falls back to eager")
def test_compiler_out_of_memory(nursery: Nursery, tmp_path: Path) -> None:
    """However it fails, as it starts or at work: eager runs the region, with one warning."""
    script = """
import resource
from torch_hybrid_backend.codegen.workers.process import CompilerProcess
def starve():
    while not (found := workers()):
        time.sleep(0.001)
    while found:
        for worker in found:
            resource.prlimit(worker, resource.RLIMIT_AS, (200 << 20, 200 << 20))
        time.sleep(0.01)
        found = workers()
threading.Thread(target=starve, daemon=True).start()
check(6)
"""
    done = nursery.run(script, tmp_path, HYBRID_COMPILE_THREADS="1")
    assert (done.answers, done.status) == (["eager"], 0), done
    (warning,) = done.warnings
    assert "compile_failed" in warning or "compiler_crashed" in warning


@fault("no linker on the PATH", "one warning that names what to install; everything runs in eager")
def test_no_linker(nursery: Nursery, tmp_path: Path) -> None:
    """A missing linker is one warning, and answers are right."""
    done = nursery.run("check(6)", tmp_path, PATH=str(tmp_path))
    assert (done.answers, done.status) == (["eager"], 0), done
    (warning,) = done.warnings
    assert "compile_failed" in warning
    assert "no linker" in warning


@pytest.mark.full
@fault("no linker on the PATH, HYBRID_STRICT=1", "RegionError with the same text")
def test_no_linker_strict(nursery: Nursery, tmp_path: Path) -> None:
    """Under strict the fault is raised, naming the region and the setting."""
    done = nursery.run("check(6)", tmp_path, PATH=str(tmp_path), HYBRID_STRICT="1")
    assert done.status != 0
    assert "no linker" in done.err
    assert "HYBRID_STRICT" in done.err


@pytest.mark.full
@fault("TVM is installed but cannot be imported", "one warning with the import error; everything runs in eager")
def test_tvm_does_not_import(nursery: Nursery, tmp_path: Path) -> None:
    """A TVM that does not import is one warning, and answers are right."""
    fake = tmp_path / "path" / "tvm"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise ImportError('libtvm is broken')")
    script = "sys.path.insert(0, sys.argv[0] or '../path'); check(6)"
    done = nursery.run(script, tmp_path, PYTHONPATH=f"{fake.parent}:{os.environ.get('PYTHONPATH', '')}")
    assert (done.answers, done.status) == (["eager"], 0), done
    (warning,) = done.warnings
    assert "libtvm is broken" in warning


@fault("TVM is not installed", "one warning that names the package; everything runs in eager")
def test_tvm_missing(nursery: Nursery, tmp_path: Path) -> None:
    """A missing TVM is one warning, and answers are right."""
    script = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "tvm_ffi"):
            raise ModuleNotFoundError(name)
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in ("tvm", "tvm_ffi") else real(name, package)
sys.meta_path.insert(0, Blocker())
check(6)
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == ([""], 0), done  # no engine was asked
    assert "pip install 'apache-tvm" in done.warnings[0]


@fault(
    "the package's sources are edited while a process that imported them runs",
    "one warning `compile_failed`; falls back to eager",
)
def test_sources_edited(nursery: Nursery, tmp_path: Path) -> None:
    """The compiler, which imports the edited ones, is refused: nothing of it gets into the cache under the old sources' key."""
    script = """
import shutil, torch_hybrid_backend
from torch_hybrid_backend.processes import child
package = shutil.copytree(os.path.dirname(torch_hybrid_backend.__file__), "copy/torch_hybrid_backend")
with open("copy/torch_hybrid_backend/loops/ops.py", "a") as file:
    file.write("# edited\\n")
child.__file__ = os.path.abspath("copy/torch_hybrid_backend/processes/child.py")  # compilers import the package it lies in
check(6)
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["eager"], 0), done
    (warning,) = done.warnings
    assert "Start this process again" in warning
    kept = [file.name for file in (tmp_path / "cache" / "kernels").rglob("*") if file.is_file()]
    assert set(kept) <= {".lock"}
