"""Starts and caches: processes that are limited, killed or confined, and share what was compiled. Each is a real process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.fault_processes import ROOT, Nursery
from tests.end_to_end.test_faults_compiler import linker

fault = pytest.mark.fault


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def filled(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds what `check(6)` needs, also by measurement, in a folder that every user can reach."""
    folder = tmp_path_factory.mktemp("filled")
    done = nursery.run("check(6)", folder, HYBRID_PLACEMENT="measure")
    assert (len(done.answers), done.status) == (1, 0), done
    return folder / "cache"


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
    """The number of kernels that the cache in a folder holds."""
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
@pytest.mark.full  # four processes, three of them by a slow linker; tests/end_to_end/test_faults_compiler.py kills compilations in `make test`
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


@fault(
    "a variable `HYBRID_...` that is no setting: another program's, or mistyped",
    "one warning for each variable in a process; it is ignored",
)
def test_a_variable_of_another_program(nursery: Nursery, tmp_path: Path) -> None:
    """Every graph compiles as ever."""
    done = nursery.run("check(6); check(7)", tmp_path, HYBRID_SEARCH_WEIGHTS="0.3,0.7")
    assert (done.answers, done.status) == (["tvm", "tvm"], 0), done
    (warning,) = done.warnings
    assert "HYBRID_SEARCH_WEIGHTS is ignored" in warning


_READ_ONLY = """
namespace(os.getuid())
cache = os.fsencode(os.environ["HYBRID_CACHE_DIR"])
system("mount", cache, cache, None, 0x1000, None)  # MS_BIND
system("mount", None, cache, None, 0x1000 | 0x20 | 0x1, None)  # MS_BIND | MS_REMOUNT | MS_RDONLY
"""
# Another user, who may read everything, as the interpreter may lie where only root can.
_ANOTHER_USER = """
import struct
if os.getuid():
    print("skip only root can be another user", flush=True)
    sys.exit()
system("prctl", 8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
os.setresgid(12345, 12345, 12345)
os.setresuid(12345, 12345, 12345)
system("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 4, 4, 0, 0, 0, 0))  # CAP_DAC_READ_SEARCH
"""


@fault(
    "a cache that was filled as an image was built: on a read-only file system, or root's and another user runs the process",
    "nothing: no kernel is compiled, no region timed",
)
@pytest.mark.parametrize("how", [_READ_ONLY, _ANOTHER_USER], ids=["read-only", "of-root"])
def test_a_cache_of_an_image(how: str, nursery: Nursery, filled: Path, tmp_path: Path) -> None:
    """A cache of an image is read, and nothing has to be written."""
    script = f"{how}\ncheck(6)\nsay(len(workers()))"
    done = nursery.run(script, tmp_path, HYBRID_PLACEMENT="measure", HYBRID_CACHE_DIR=str(filled))
    assert (done.answers[1:], done.warnings, done.status) == (["0"], [], 0), done


@fault("a read-only cache that lacks some kernels", "one warning; those are cached for this process only")
def test_a_cache_of_an_image_that_lacks_a_kernel(nursery: Nursery, filled: Path, tmp_path: Path) -> None:
    """Kernels that the cache of an image has are found all the same."""
    script = f"{_READ_ONLY}\ncheck(6)\nsay(len(workers()))\ncheck(7)\ncheck(8)"
    done = nursery.run(script, tmp_path, HYBRID_CACHE_DIR=str(filled))
    assert (done.answers, done.status) == (["tvm", "0", "tvm", "tvm"], 0), done
    (warning,) = done.warnings
    assert "cannot be made or written" in warning
    assert "Read-only file system" in warning


_WRONG = """
import multiprocessing
multiprocessing.set_executable("/usr/bin/false")
sys.executable = {wrong!r}
sys._base_executable = None
"""
_NOWHERE = "sys.prefix = sys.exec_prefix = sys.base_prefix = sys.base_exec_prefix = '/nonexistent'\n"


@fault(
    "`sys.executable` is no Python: a server's own path (uWSGI), or none (a program that embeds Python)",
    "nothing: the interpreter is found where Python is installed",
)
@pytest.mark.parametrize("wrong", ["/usr/bin/false", None])
def test_a_wrong_interpreter(wrong: str | None, nursery: Nursery, tmp_path: Path) -> None:
    """Kernels are compiled in processes of their own as ever."""
    done = nursery.run(_WRONG.format(wrong=wrong) + "check(6)\nsay(len(workers()) > 0)", tmp_path)
    assert (done.answers, done.warnings, done.status) == (["tvm", "True"], [], 0), done


_SERVER = """
#include <Python.h>

int main(int argc, char **argv) {
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    PyConfig_SetBytesString(&config, &config.program_name, argv[0]);
    PyConfig_SetBytesString(&config, &config.home, argv[1]);
    PyConfig_SetBytesString(&config, &config.run_filename, argv[2]);
    Py_InitializeFromConfig(&config);
    return Py_RunMain();
}
"""
_SERVED = """
import sys
import torch
if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.GELU()).eval()
    x = torch.randn(6, 24)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="hybrid")(x), model(x), rtol=1e-4, atol=1e-5)
    print(sys.executable)
"""


@fault("a program in C that embeds Python", "nothing: kernels are compiled by the Python that it embeds")
def test_a_program_that_embeds_python(tmp_path: Path) -> None:
    """A program that embeds Python is not started again as if it were a Python."""
    variable = sysconfig.get_config_var
    compiler, library = shutil.which("cc"), Path(variable("LIBDIR"), variable("LDLIBRARY"))
    if compiler is None or not library.exists() or library.suffix != ".so":
        pytest.skip("it takes a C compiler and a shared library of Python")
    (tmp_path / "server.c").write_text(_SERVER)
    (tmp_path / "served.py").write_text(_SERVED)
    server = tmp_path / "server"
    flags = [f"-I{variable('INCLUDEPY')}", str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([compiler, str(tmp_path / "server.c"), "-o", str(server), *flags], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "HYBRID_CACHE_DIR": str(tmp_path / "cache"),
        "HYBRID_PLACEMENT": "estimate",
    }
    done = subprocess.run(
        [str(server), sys.base_prefix, str(tmp_path / "served.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.returncode) == ([str(server)], 0), done.stderr
    assert "falls back" not in done.stderr
    assert kernels(tmp_path)


@fault(
    "`sys.executable` is no Python, and none is found",
    "one warning that says how to tell; kernels are compiled in the process itself",
)
def test_no_interpreter(nursery: Nursery, tmp_path: Path) -> None:
    """A later process with an interpreter finds them in the cache."""
    script = _WRONG.format(wrong="/usr/bin/false") + _NOWHERE + "check(6)\nsay(len(workers()))\ncheck(7)"
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["tvm", "0", "tvm"], 0), done
    (warning,) = done.warnings
    assert "multiprocessing.set_executable" in warning
    again = nursery.run("check(6)\nsay(len(workers()))", tmp_path)
    assert (again.answers, again.warnings, again.status) == (["tvm", "0"], [], 0), again


@fault(
    "a process is terminated (SIGTERM) while kernels compile, or is a forked child that leaves by os._exit",
    "nothing: the next process that compiles removes the temporary folders that are left",
)
def test_what_is_left_in_the_temporary_directory(nursery: Nursery, tmp_path: Path) -> None:
    """A service that is restarted every night does not fill /tmp."""
    (tmp_path / "tmp").mkdir()
    settings = {"TMPDIR": str(tmp_path / "tmp")}
    child = nursery.start("check(6)", tmp_path, PATH=linker(tmp_path, "exec sleep 600"), **settings)
    until = time.monotonic() + 60
    while (tmp_path / "once").exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(child.process, signal.SIGTERM)
    assert child.done().status == -signal.SIGTERM
    forked = """
if not os.fork():
    check(6)
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""
    assert nursery.run(forked, tmp_path, HYBRID_CACHE="0", **settings).answers == ["tvm"]
    left = list((tmp_path / "tmp").glob("torch_hybrid_backend*"))
    assert len(left) >= 2, "what is left after a signal, and after os._exit"
    for path in left:
        os.utime(path, (0, 0))  # what is a minute old may be removed
    done = nursery.run("check(6)", tmp_path, **settings)
    assert (done.answers, done.warnings, done.status) == (["tvm"], [], 0), done
    assert not list((tmp_path / "tmp").glob("torch_hybrid_backend*"))
