from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.cpu.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.workers import pool
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.errors import CompileError, CompilerCrashError, DeadlineError
from torch_hybrid_backend.processes import child

pytest.importorskip("tvm")

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell started pytest in the background and thus with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(size: int, key: str = "") -> Job:
        key = key or f"key{size}"
        return Job(key, f"kernel_{size}", scale_kernel(size), Target.host(), str(tmp_path / f"{key}_{size}.so"))

    return make


@pytest.fixture(scope="module")
def shared() -> Iterator[KernelCompiler]:
    compiler = KernelCompiler(tir_compiler, threads=1)
    yield compiler
    compiler.close()


@pytest.fixture
def warm(shared: KernelCompiler, job: Callable[..., Job]) -> tuple[KernelCompiler, int]:
    """A compiler of one process that is idle and ready, and the process's id."""
    assert isinstance(shared.compile([job(16)], PATIENCE_S)[0], Path)
    (process,) = shared.process_ids()
    return shared, process


def gone(process: int) -> bool:
    """True if a process is gone, or at least dead, within a few seconds."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_jobs_come_back_in_order_and_equal_ones_once(shared: KernelCompiler, job: Callable[..., Job]) -> None:
    """Each job gets its library; two jobs of one key share one."""
    jobs = [job(16), job(24), job(16), job(32)]
    jobs[2] = dataclasses.replace(jobs[2], output=jobs[2].output + ".second")
    made = shared.compile(jobs, PATIENCE_S)
    assert made == [Path(jobs[0].output), Path(jobs[1].output), Path(jobs[0].output), Path(jobs[3].output)]
    assert all(path.is_file() for path in made if isinstance(path, Path))
    assert not Path(jobs[2].output).exists()


def test_nothing_to_do_starts_nothing() -> None:
    """No process is started before there is a job."""
    compiler = KernelCompiler(tir_compiler, threads=2)
    assert compiler.compile([], PATIENCE_S) == []
    assert compiler.process_ids() == []


def test_processes_start_ahead(job: Callable[..., Job]) -> None:
    """`start` starts as many processes as the jobs would use and no more than allowed; `close` ends them, and one can go on."""
    compiler = KernelCompiler(tir_compiler, threads=2)
    compiler.start(jobs=100)
    processes = compiler.process_ids()
    assert len(processes) == 2
    compiler.close()
    assert all(gone(process) for process in processes)
    assert compiler.process_ids() == []
    assert isinstance(compiler.compile([job(16)], PATIENCE_S)[0], Path)
    compiler.close()


def test_a_crash_costs_one_job(warm: tuple[KernelCompiler, int], job: Callable[..., Job]) -> None:
    """The job at which the compiler dies fails and names the signal; a new process does the others."""
    compiler, process = warm
    os.kill(process, signal.SIGSTOP)  # so that the first job is surely still at work
    threading.Timer(0.3, os.kill, (process, signal.SIGKILL)).start()
    first, *others = compiler.compile([job(40), job(48), job(56)], PATIENCE_S)
    assert isinstance(first, CompilerCrashError)
    assert "SIGKILL" in str(first)
    assert "kernel_40" in str(first)
    assert all(isinstance(made, Path) for made in others)
    assert compiler.process_ids() != [process]


def test_the_deadline_kills_a_process_that_hangs(warm: tuple[KernelCompiler, int], job: Callable[..., Job]) -> None:
    """Kernels that are not compiled at the deadline fail, the one at work as those that wait, and the process at work is gone."""
    compiler, process = warm
    os.kill(process, signal.SIGSTOP)
    made = compiler.compile([job(40), job(48)], 0.3)
    assert [type(error) for error in made] == [DeadlineError, DeadlineError]
    assert "0.3 s" in str(made[0])
    assert gone(process)


def test_ctrl_c_kills_what_is_at_work(warm: tuple[KernelCompiler, int], job: Callable[..., Job]) -> None:
    """KeyboardInterrupt passes through; the process at work is gone, and the compiler can be used again."""
    compiler, process = warm
    os.kill(process, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        compiler.compile([job(40)], PATIENCE_S)
    assert gone(process)
    assert isinstance(compiler.compile([job(40)], PATIENCE_S)[0], Path)


def test_two_threads(shared: KernelCompiler, job: Callable[..., Job]) -> None:
    """Compilations from two threads share one process without mixing up their jobs."""
    made: dict[int, list[Path | CompileError]] = {}

    def compile_some(first: int) -> None:
        made[first] = shared.compile([job(first + 8 * i) for i in range(3)], PATIENCE_S)

    threads = [threading.Thread(target=compile_some, args=(first,)) for first in (1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for first in (1000, 2000):
        assert made[first] == [Path(job(first + 8 * i).output) for i in range(3)]
    assert len(shared.process_ids()) == 1


def test_a_thread_that_waits_for_a_process_keeps_its_deadline(
    warm: tuple[KernelCompiler, int], job: Callable[..., Job]
) -> None:
    """While another thread holds every process, a compilation gives up at its own deadline."""
    compiler, process = warm
    os.kill(process, signal.SIGSTOP)
    other = threading.Thread(target=compiler.compile, args=([job(40)], PATIENCE_S))
    other.start()
    while not any(worker.job for worker in compiler._processes()._all):
        time.sleep(0.01)
    assert isinstance(compiler.compile([job(48)], 0.2)[0], DeadlineError)
    os.kill(process, signal.SIGCONT)
    other.join()
    assert compiler.process_ids() == [process]


def test_idle_processes_leave(job: Callable[..., Job]) -> None:
    """A process without work for a while ends by itself; the next compilation starts another."""
    compiler = KernelCompiler(tir_compiler, threads=1, idle_s=0.2)
    assert isinstance(compiler.compile([job(16)], PATIENCE_S)[0], Path)
    (process,) = {worker.process.pid for worker in compiler._processes()._all}
    assert gone(process)
    assert isinstance(compiler.compile([job(24)], PATIENCE_S)[0], Path)
    compiler.close()


def test_what_cannot_be_sent(shared: KernelCompiler, job: Callable[..., Job]) -> None:
    """A job that does not pickle fails alone."""
    bad = dataclasses.replace(job(40), kernel=lambda: None)
    failed, made = shared.compile([bad, job(48)], PATIENCE_S)
    assert isinstance(failed, CompileError)
    assert "cannot be sent" in str(failed)
    assert isinstance(made, Path)


@pytest.mark.parametrize(
    ("program", "says"), [("/nonexistent/python", "cannot be started"), ("/bin/false", "before it was ready")]
)
def test_a_compiler_that_does_not_start(
    program: str, says: str, job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job fails with one message that names the program; nothing is tried for ever."""
    for module in (child, pool):
        monkeypatch.setattr(module, "interpreter", lambda: program)
    made = KernelCompiler(tir_compiler, threads=1).compile([job(16), job(24)], PATIENCE_S)
    assert all(type(error) is CompileError for error in made)
    assert says in str(made[1])
    assert program in str(made[1])


def test_without_an_interpreter_kernels_are_compiled_here(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning, in time, and with the failure of a job as its result; each is told of as it is finished."""
    for module in (child, pool):
        monkeypatch.setattr(module, "interpreter", lambda: None)
    pool._warn_of_no_interpreter.cache_clear()
    compiler = KernelCompiler(tir_compiler, threads=2)
    compiler.start(2)
    bad = dataclasses.replace(job(40), kernel=lambda: None)
    told: list[str] = []
    made, failed, other = compiler.compile(
        [job(16), bad, job(24)], PATIENCE_S, lambda job, made: told.append(job.symbol)
    )
    assert isinstance(made, Path)
    assert made.is_file()
    assert isinstance(other, Path)
    assert isinstance(failed, CompileError)
    assert told == ["kernel_16", "kernel_40", "kernel_24"]
    assert isinstance(compiler.compile([job(48)], 0.0)[0], DeadlineError)
    assert compiler.process_ids() == []
    (record,) = caplog.records
    assert "multiprocessing.set_executable" in record.getMessage()


# Not under `if __name__ == "__main__"`: users' scripts often are not.
SCRIPT = """
import os, sys, time
from tests.engines.cpu.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler

compiler = KernelCompiler(tir_compiler, threads=1)

def compile_one(size):
    job = Job(f"key{size}", f"kernel_{size}", scale_kernel(size), Target.host(), f"{sys.argv[1]}/{os.getpid()}_{size}.so")
    (made,) = compiler.compile([job], 60)
    assert os.path.exists(made), made

compile_one(16)
print(*compiler.process_ids(), flush=True)
"""


def run_script(tmp_path: Path, more: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + more)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_processes_end_with_the_interpreter(tmp_path: Path) -> None:
    """A script, run once although it has no main guard, leaves no process behind."""
    printed, _ = run_script(tmp_path, "").communicate()
    (process,) = map(int, printed.split())
    assert gone(process)


def test_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Even SIGKILL of the user's process ends its compilers."""
    parent = run_script(tmp_path, "time.sleep(60)")
    assert parent.stdout is not None
    process = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert gone(process)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_processes_at_work_end_with_their_parent(sent: signal.Signals, tmp_path: Path) -> None:
    """A compiler that would work on for a minute when its parent is killed ends at once, and so does the linker it started."""
    (tmp_path / "ld").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "ld").chmod(0o755)
    parent = run_script(tmp_path, f"os.environ['PATH'] = {str(tmp_path)!r}\ncompiler.close()\ncompile_one(24)")
    assert parent.stdout is not None
    parent.stdout.readline()
    linkers: list[int] = []
    while not linkers:  # until the linker sleeps
        time.sleep(0.02)
        assert parent.poll() is None
        linkers = [child for worker in children(parent.pid) for child in children(worker)]
    workers = children(parent.pid)
    parent.send_signal(sent)
    parent.communicate()
    assert all(gone(process) for process in (*workers, *linkers))


def test_a_compiler_of_other_sources_is_refused(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that were edited after this process imported them: no kernel of theirs is accepted under this process's keys."""
    monkeypatch.setattr(pool, "compiler_version", lambda module: "as it was imported")
    compiler = KernelCompiler(tir_compiler, threads=1)
    made = compiler.compile([job(16), job(24)], PATIENCE_S)
    assert [type(error) for error in made] == [CompileError, CompileError]
    assert "other sources" in str(made[0])
    assert "Start this process again" in str(made[1])
    assert compiler.process_ids() == []
    assert not Path(job(16).output).exists()


def test_an_interrupt_while_the_last_one_is_dealt_with(
    warm: tuple[KernelCompiler, int], job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, before the process at work was killed: the next compilation ends it, and has the place that it took."""
    compiler, process = warm

    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool._Batch, "_release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiler.compile([job(40)], PATIENCE_S)
    assert compiler.process_ids() == [process]
    assert isinstance(compiler.compile([job(48)], 20)[0], Path)
    assert gone(process)


def test_interrupts_at_any_time(tmp_path: Path) -> None:
    """Ctrl-C wherever it strikes, twice in a row too: the one process of the pool is never lost, and nothing is left at work."""
    interrupts = """
import random, signal, threading
armed = False
def strike(*_):
    if armed:  # one that comes late, when nothing is compiled any more, shows nothing
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, strike)
def interrupt():
    time.sleep(random.random() * 0.05)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(random.random() * 0.002)
struck = 0
for size in range(64, 80):
    random.seed(size)
    striking = threading.Thread(target=interrupt)
    striking.start()  # unarmed: an interrupted start leaves a thread that cannot be joined
    try:
        try:
            armed = True
            compile_one(size)
            striking.join()
        finally:  # where the second one may strike
            armed = False
    except KeyboardInterrupt:
        armed = False
        struck += 1
    striking.join()
compile_one(200)
print(struck, len(compiler.process_ids()))
"""
    parent = run_script(tmp_path, interrupts)
    printed, _ = parent.communicate(timeout=PATIENCE_S * 2)
    assert parent.returncode == 0
    struck, processes = map(int, printed.split()[1:])
    assert struck >= 8
    assert processes == 1


def test_a_forked_child_has_its_own(tmp_path: Path) -> None:
    """After a fork both sides compile, the child with a process of its own that ends with it."""
    child = """
mine = compiler.process_ids()
if os.fork() == 0:
    compile_one(24)
    assert not set(mine) & set(compiler.process_ids())
    sys.exit(0)
assert os.wait()[1] == 0
assert compiler.process_ids() == mine
compile_one(32)
assert compiler.process_ids() == mine
"""
    parent = run_script(tmp_path, child)
    parent.communicate()
    assert parent.returncode == 0
