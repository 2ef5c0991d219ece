from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.codegen import faulty_compiler
from tests.engines.cpu.kernels_for_tests import scale_kernel
from tests.interpreter.compiler import Interpreter
from torch_hybrid_backend.builds.failures import Failures
from torch_hybrid_backend.codegen import kernel_cache
from torch_hybrid_backend.codegen.kernel_cache import Artifact, compile_kernels
from torch_hybrid_backend.codegen.kernel_key import kernel_key
from torch_hybrid_backend.codegen.workers.pool import Finished, KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.errors import CacheError, CompileError, CompilerCrashError, DeadlineError
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.storage.store import Store

pytest.importorskip("tvm")

ROOT = Path(__file__).parents[2]


class CountingCompiler(KernelCompiler):
    """A real compiler that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__(tir_compiler, threads=1)
        self.asked: list[str] = []

    def compile(
        self, jobs: Sequence[Job], deadline_s: float, finished: Finished = lambda job, made: None
    ) -> list[Path | CompileError]:
        self.asked += [job.key for job in jobs]
        return super().compile(jobs, deadline_s, finished)


@pytest.fixture(scope="module")
def one_compiler() -> Iterator[CountingCompiler]:
    compiler = CountingCompiler()
    yield compiler
    compiler.close()


@pytest.fixture
def compiler(one_compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    monkeypatch.setattr(kernel_cache, "_memo", {})
    one_compiler.asked.clear()
    return one_compiler


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def build(compiler: KernelCompiler, store: Store, *kernels: Kernel, deadline_s: float = 60) -> list[Artifact]:
    made = compile_kernels(kernels, Target.host(), compiler, store, deadline_s)
    for kernel in made:
        assert isinstance(kernel, Artifact), kernel
        assert f"__tvm_ffi_{kernel.symbol}".encode() in Path(kernel.path).read_bytes()
    return [kernel for kernel in made if isinstance(kernel, Artifact)]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all that this process knows, as a new process."""
    monkeypatch.setattr(kernel_cache, "_memo", {})


def test_equal_kernels_are_compiled_once(compiler: CountingCompiler, store: Store) -> None:
    """In one call, and over calls; different kernels have different libraries."""
    one, same, another = build(compiler, store, scale_kernel(64), scale_kernel(64), scale_kernel(72))
    assert one == same != another
    assert one.key == kernel_key(scale_kernel(64), Target.host(), tir_compiler)
    assert build(compiler, store, scale_kernel(72)) == [another]
    assert compiler.asked == [one.key, another.key]


def test_a_new_process_finds_libraries_on_disk(
    compiler: CountingCompiler, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process finds compiled kernels through the store alone."""
    (made,) = build(compiler, store, scale_kernel())
    forget(monkeypatch)
    assert build(compiler, store, scale_kernel()) == [made]
    assert compiler.asked == [made.key]


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "swapped"])
def test_damaged_libraries_are_never_used(
    damage: str, compiler: CountingCompiler, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not what was written is dropped and the kernel compiled anew."""
    made, other = build(compiler, store, scale_kernel(64), scale_kernel(72))
    good = Path(made.path).read_bytes()
    harm = {
        "truncated": good[: len(good) // 2],
        "garbage": os.urandom(len(good)),
        "empty": b"",
        "swapped": Path(other.path).read_bytes(),
    }
    Path(made.path).unlink()
    Path(made.path).write_bytes(harm[damage])
    forget(monkeypatch)
    compiler.asked.clear()
    (again,) = build(compiler, store, scale_kernel(64))
    assert compiler.asked == [made.key]
    assert f"__tvm_ffi_{made.symbol}".encode() in Path(again.path).read_bytes()


def test_a_library_that_was_removed_is_made_again(compiler: CountingCompiler, store: Store) -> None:
    """Clearing the cache directory under a running process does no harm."""
    (made,) = build(compiler, store, scale_kernel())
    Path(made.path).unlink()
    (again,) = build(compiler, store, scale_kernel())
    assert Path(again.path).is_file()
    assert len(compiler.asked) == 2


def test_two_stores_are_filled(compiler: CountingCompiler, store: Store, tmp_path: Path) -> None:
    """A kernel known from one store is not taken for one that is in another."""
    second = Store(tmp_path / "second")
    (one,) = build(compiler, store, scale_kernel())
    (two,) = build(compiler, second, scale_kernel())
    assert Path(one.path).is_relative_to(store.root)
    assert Path(two.path).is_relative_to(second.root)


def test_failures_are_per_kernel(compiler: CountingCompiler, store: Store) -> None:
    """A kernel that fails leaves the others alone; one that nobody had time for is compiled by the next attempt."""
    no_key = scale_kernel()
    object.__setattr__(no_key, "stores", (len,))
    late, broken = compile_kernels([scale_kernel(64), no_key], Target.host(), compiler, store, 0.0)
    assert isinstance(late, DeadlineError)
    assert isinstance(broken, CompileError)
    assert "no key" in str(broken)
    build(compiler, store, scale_kernel(64))


class _Faulty:
    """A compiler that does what it is told, and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiler = KernelCompiler(faulty_compiler, threads=1)
        self.store = Store(folder / "cache")

    def compile(self, fault: str, deadline_s: float = 60, limit_s: float | None = None) -> Artifact | Exception:
        """Compile one kernel."""
        (self.folder / "fault").write_text(fault)
        (made,) = compile_kernels([scale_kernel()], Interpreter(), self.compiler, self.store, deadline_s, limit_s)
        return made

    @property
    def asked(self) -> int:
        """The number of times that a kernel was tried."""
        return len((self.folder / "asked").read_text().splitlines())


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Faulty]:
    monkeypatch.setenv("FAULTY_COMPILER", str(tmp_path))
    made = _Faulty(tmp_path)
    yield made
    made.compiler.close()


@pytest.mark.parametrize(("fault", "error"), [("fails", CompileError), ("dies", CompilerCrashError)])
def test_what_failed_is_not_tried_again(
    faulty: _Faulty, fault: str, error: type[CompileError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not within a day: no compiler is asked, and the error says so. It is once failures are forgotten, and for another target at once."""
    first = faulty.compile(fault)
    assert type(first) is error
    forget(monkeypatch)
    faulty.compiler.close()
    again = faulty.compile("")
    assert type(again) is error
    assert str(first) in str(again)
    assert "hybrid cache --forget-failures" in str(again)
    assert faulty.asked == 1
    assert not faulty.compiler.process_ids()
    target = Interpreter("another machine")
    (elsewhere,) = compile_kernels([scale_kernel()], target, faulty.compiler, faulty.store, 60)
    assert isinstance(elsewhere, Artifact)
    Failures(faulty.store).forget()
    assert isinstance(faulty.compile(""), Artifact)


def test_what_was_too_slow_is_tried_with_a_later_deadline(faulty: _Faulty) -> None:
    """A kernel that computes for most of the time there is is not tried again, but where there is more. One whose time others took is."""
    assert isinstance(faulty.compile(""), Artifact)  # the process has started
    Failures(faulty.store).forget()
    faulty.store.clear()
    assert isinstance(faulty.compile("is slow", 4.0, 0.4), DeadlineError)  # also where others load the machine
    asked = faulty.asked
    slow = faulty.compile("", 1.0, 0.4)
    assert isinstance(slow, DeadlineError)
    assert "tried again a day later" in str(slow)
    assert faulty.asked == asked
    assert isinstance(faulty.compile("", 60), Artifact)

    faulty.store.clear()
    (faulty.folder / "fault").write_text("is slow")
    slow, waited = compile_kernels(
        [scale_kernel(64), scale_kernel(72)], Interpreter(), faulty.compiler, faulty.store, 8.0, 0.4
    )
    assert isinstance(slow, DeadlineError)
    assert isinstance(waited, DeadlineError)
    (remembered,) = Failures(faulty.store).all()
    assert remembered.key == kernel_key(scale_kernel(64), Interpreter(), faulty_compiler)
    left = compile_kernels([scale_kernel(80)], Interpreter(), faulty.compiler, faulty.store, 0.3, 60)
    assert isinstance(left[0], DeadlineError)
    assert len(Failures(faulty.store).all()) == 1


def test_a_compiler_that_was_not_given_a_processor_is_asked_again(faulty: _Faulty) -> None:
    """A kernel that is late because the compiler slept, or others had the processors, is no slow kernel."""
    assert isinstance(faulty.compile("hangs", 3.0), DeadlineError)
    assert faulty.asked == 1
    assert Failures(faulty.store).all() == []
    assert isinstance(faulty.compile(""), Artifact)


def test_each_kernel_is_kept_as_soon_as_it_is_compiled(faulty: _Faulty) -> None:
    """The first is in the store while the others are still to be compiled: whoever is killed meanwhile leaves it to the next process."""
    (faulty.folder / "fault").write_text("")
    kept = []

    class Watched(KernelCompiler):
        def compile(
            self, jobs: Sequence[Job], deadline_s: float, finished: Finished = lambda job, made: None
        ) -> list[Path | CompileError]:
            def watched(job: Job, made: Path | CompileError) -> None:
                finished(job, made)
                kept.append(len(faulty.store.keys("kernels")))

            return super().compile(jobs, deadline_s, watched)

    compiler = Watched(faulty_compiler, threads=1)
    try:
        compile_kernels([scale_kernel(size) for size in (64, 72, 80)], Interpreter(), compiler, faulty.store, 60)
    finally:
        compiler.close()
    assert kept == [1, 2, 3]


def test_what_comes_from_outside_is_tried_again(faulty: _Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a compiler that somebody killed, or one that does not start, and Ctrl-C: nothing of it is the kernel's fault."""
    for fault in ("has no disk", "is killed"):
        assert isinstance(faulty.compile(fault), CompileError)
    monkeypatch.setattr(faulty_compiler, "version", lambda: "another version")
    assert isinstance(faulty.compile(""), CompileError)  # the process is of other sources
    monkeypatch.undo()
    monkeypatch.setenv("FAULTY_COMPILER", str(faulty.folder))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        faulty.compile("hangs")
    signal.signal(signal.SIGINT, before)
    assert Failures(faulty.store).all() == []
    assert isinstance(faulty.compile(""), Artifact)


def test_a_store_that_cannot_be_written(
    compiler: CountingCompiler, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels go to a temporary directory, with one warning; where that is full too it costs the kernel, and raises nothing."""
    (store.root / "kernels").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        made = build(compiler, store, scale_kernel(64), scale_kernel(72))
    assert len(caplog.records) == 1
    assert "temporary directory" in caplog.text
    assert not any(Path(kernel.path).is_relative_to(store.root) for kernel in made)
    compiler.asked.clear()
    assert build(compiler, store, scale_kernel(64)) == made[:1]  # found again by this process
    assert compiler.asked == []

    def full(*_: object) -> Path:
        raise CacheError("the disk is full")

    monkeypatch.setattr(Store, "put", full)
    (failed,) = compile_kernels([scale_kernel(80)], Target.host(), compiler, store, 60)
    assert isinstance(failed, CacheError)


def test_without_a_temporary_directory(
    compiler: CountingCompiler, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A temporary directory that cannot be made costs the kernels that need one, and raises nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nonexistent"))
    (failed,) = compile_kernels([scale_kernel()], Target.host(), compiler, store, 60)
    assert isinstance(failed, CompileError)
    assert "nonexistent" in str(failed)


def test_a_second_process_needs_no_tvm(compiler: CountingCompiler, store: Store) -> None:
    """The second process finds the library in the store, starts no compiler and never imports TVM."""
    (made,) = build(compiler, store, scale_kernel())
    code = f"""
import sys
from pathlib import Path
from tests.codegen import faulty_compiler
from tests.engines.cpu.kernels_for_tests import scale_kernel
from tests.interpreter.compiler import Interpreter
from torch_hybrid_backend.builds.failures import Failures
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.kernel_cache import compile_kernels
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.storage.store import Store

compiler = KernelCompiler(tir_compiler, threads=1)
(found,) = compile_kernels([scale_kernel()], Target.host(), compiler, Store(Path({str(store.root)!r})), 60)
assert found.path == {made.path!r}, found
assert compiler.process_ids() == []
assert not {{"tvm", "tvm_ffi"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _holder(store: Store, key: str) -> subprocess.Popen[str]:
    """A process that has locked a key, as if it compiled the kernel, and lives until it is killed."""
    code = f"""
import sys, time
from pathlib import Path
from torch_hybrid_backend.builds.key_lock import KeyLock
from torch_hybrid_backend.codegen.kernel_cache import KIND
from torch_hybrid_backend.storage.store import Store
lock = KeyLock.try_acquire(Store(Path({str(store.root)!r})).lock_path(KIND, {key!r}))
print(lock is not None, flush=True)
time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    return holder


def test_a_kernel_that_another_process_compiles_is_waited_for(compiler: CountingCompiler, store: Store) -> None:
    """Other kernels are compiled meanwhile. The process that dies at its kernel leaves it to those that wait."""
    key = kernel_key(scale_kernel(64), Target.host(), tir_compiler)
    holder = _holder(store, key)
    made: list[Artifact] = []
    waits = threading.Thread(target=lambda: made.extend(build(compiler, store, scale_kernel(64), scale_kernel(72))))
    waits.start()
    while len(compiler.asked) < 1 or store.path_of(kernel_cache.KIND, compiler.asked[0]) is None:
        time.sleep(0.01)
    assert compiler.asked == [kernel_key(scale_kernel(72), Target.host(), tir_compiler)]
    holder.kill()
    holder.wait()
    waits.join(60)
    assert [each.key for each in made] == [key, compiler.asked[0]]
    assert compiler.asked[1:] == [key]


def test_what_another_process_compiled_is_taken(
    compiler: CountingCompiler, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is not compiled here."""
    elsewhere = Store(tmp_path / "elsewhere")
    (other,) = build(compiler, elsewhere, scale_kernel(64))
    compiler.asked.clear()
    holder = _holder(store, other.key)
    made: list[Artifact] = []
    waits = threading.Thread(target=lambda: made.extend(build(compiler, store, scale_kernel(64))))
    waits.start()
    store.put(kernel_cache.KIND, other.key, Path(other.path).read_bytes(), ".so")
    holder.kill()
    holder.wait()
    waits.join(60)
    assert [each.key for each in made] == [other.key]
    assert compiler.asked == []


def test_a_process_that_hangs_at_a_kernel_costs_the_kernel_alone(compiler: CountingCompiler, store: Store) -> None:
    """At the deadline; the failure is not remembered."""
    key = kernel_key(scale_kernel(64), Target.host(), tir_compiler)
    holder = _holder(store, key)
    late, made = compile_kernels([scale_kernel(64), scale_kernel(72)], Target.host(), compiler, store, 5.0)
    holder.kill()
    holder.wait()
    assert isinstance(late, DeadlineError)
    assert "another process" in str(late)
    assert isinstance(made, Artifact)
    build(compiler, store, scale_kernel(64))


def test_more_kernels_than_locks(compiler: CountingCompiler, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are compiled, and no lock is left."""
    monkeypatch.setattr(kernel_cache, "_LOCKS", 2)
    build(compiler, store, *(scale_kernel(size) for size in (64, 72, 80, 88, 96)))
    assert len(set(compiler.asked)) == len(compiler.asked) == 5
    assert not list(store.root.rglob(".lock"))
