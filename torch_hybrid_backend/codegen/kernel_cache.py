"""Compiled kernels: found in this process, else on disk, else compiled and put there.

A kernel is looked for by its key (`kernel_key`) in the memo of this process, in the store (which verifies checksums, and drops files that
fail), and in the failures of the last day (`builds.failures`). Then the compiler processes compile it, under a lock of its key
(`builds.key_lock`): of several processes that want a kernel at once one compiles it, and the others take its result.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch_hybrid_backend.builds.failures import Failures
from torch_hybrid_backend.builds.key_lock import KeyLock
from torch_hybrid_backend.cancellation import check
from torch_hybrid_backend.codegen.compiler import CodeTarget, KernelCompilerModule
from torch_hybrid_backend.codegen.kernel_key import kernel_key
from torch_hybrid_backend.codegen.kernel_name import symbol_of
from torch_hybrid_backend.codegen.operator_kernel import OperatorKernel
from torch_hybrid_backend.codegen.workers.pool import Finished
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.errors import CacheError, CompileError, DeadlineError, ScheduleError, failures
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.storage.store import Store, is_collecting
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder

_log = logging.getLogger(__name__)

KIND = "kernels"
_LOCKS = 128  # that a process holds at once, as each is an open file
_LOOK_EVERY_S = 0.02  # at locks of other processes
_NOTHING = ""  # the key of what needs no artifact: an operator of PyTorch's

# (store, key) -> artifact. Writes of single items are atomic; two threads that compile one kernel at once write equal things.
_memo: dict[tuple[str, str], Artifact] = {}
_spares: dict[tuple[int, str], Store] = {}  # (process, store) -> what takes its place when it is full


class JobCompiler(Protocol):
    """A compiler of kernels: `workers.pool.KernelCompiler`, or one that has other machines compile."""

    @property
    def module(self) -> KernelCompilerModule:
        """The compiler module."""
        ...

    def compile(self, jobs: Sequence[Job], deadline_s: float, finished: Finished = ...) -> list[Path | CompileError]:
        """See `KernelCompiler.compile`."""
        ...


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled kernel: a file, and the kernel's name in it. All fields are empty for an operator of PyTorch's."""

    path: str
    symbol: str
    key: str


def compile_kernels(
    kernels: Sequence[Kernel],
    target: CodeTarget,
    compiler: JobCompiler,
    store: Store,
    deadline_s: float,
    limit_s: float | None = None,
) -> list[Artifact | Exception]:
    """The artifact of each kernel, or the exception that stopped it: a CompileError, or CacheError if the store cannot be written.

    Compiles kernels that neither this process nor the store has, in parallel and equal ones once, and gives up after `deadline_s` seconds. Each
    artifact is kept at once: if this process is killed, the next one compiles only the rest. Waits for kernels that other processes compile.
    A kernel that failed within a day is not compiled again. One that was late is, if `limit_s`, the time for all kernels of a graph (None:
    `deadline_s`), is longer than it was.
    """
    keys = [_key(kernel, target, compiler) for kernel in kernels]
    batch = _Batch(target, compiler, store, deadline_s, deadline_s if limit_s is None else limit_s)
    for key, kernel in zip(keys, kernels, strict=True):
        if not isinstance(key, Exception):
            batch.look_up(key, kernel)
    batch.compile()
    return [key if isinstance(key, Exception) else batch.found[key] for key in keys]


class _Batch:
    """Kernels of one call. Owns the locks of those that it compiles."""

    def __init__(
        self, target: CodeTarget, compiler: JobCompiler, store: Store, deadline_s: float, limit_s: float
    ) -> None:
        self._target = target
        self._compiler = compiler
        self._store = store
        self._deadline_s = deadline_s
        self._limit_s = limit_s
        self._until = time.monotonic() + deadline_s
        self._failures = Failures(store)
        self._locks: dict[str, KeyLock] = {}
        self._missing: dict[str, Kernel] = {}
        self.found: dict[str, Artifact | Exception] = {_NOTHING: Artifact("", "", _NOTHING)}

    def look_up(self, key: str, kernel: Kernel) -> None:
        """Take the kernel, or its failure, if this process or the store has it; else it is missing."""
        if key in self.found or key in self._missing:
            return
        known = self._known(key, kernel)
        if known is None:
            self._missing[key] = kernel
        else:
            self.found[key] = known

    def compile(self) -> None:
        """Compile what is missing, here or in other processes."""
        if not self._missing:
            return
        _log.debug("%d kernels found, %d to compile", len(self.found), len(self._missing))
        self._progress = Progress("compiling kernels", len(self._missing), delay_s=2.0)
        try:
            with self._progress:
                while self._missing:
                    self._lock_some()
                    for key in tuple(self._locks):  # another process may have made it since
                        if (known := self._known(key, self._missing[key])) is not None:
                            self._take(key, known)
                    if self._locks:
                        self._compile_locked()
                    elif self._missing:
                        self._wait()
        except failures(OSError) as error:  # no temporary directory can be made, say
            why = f"kernels cannot be compiled: {error}"
            self.found.update((key, CompileError(why, recurs=False)) for key in self._missing)
        finally:
            for lock in self._locks.values():
                lock.release()

    def _known(self, key: str, kernel: Kernel) -> Artifact | CompileError | None:
        made = _lookup(key, kernel, self._store)
        failure = self._failures.get(KIND, key, self._limit_s) if made is None else None
        return made if failure is None else failure.as_exception()

    def _take(self, key: str, made: Artifact | Exception) -> None:
        self._progress.step()
        self.found[key] = made
        del self._missing[key]
        if key in self._locks:
            self._locks.pop(key).release()

    def _lock_some(self) -> None:
        """Lock kernels that no other process has locked."""
        for key in self._missing:
            if len(self._locks) == _LOCKS:
                return
            lock = KeyLock.try_acquire(self._store.lock_path(KIND, key))
            if lock is not None:
                self._locks[key] = lock

    def _compile_locked(self) -> None:
        def finished(job: Job, made: Path | CompileError) -> None:
            # That no schedule serves a kernel shows at once.
            if isinstance(made, CompileError) and not isinstance(made, ScheduleError):
                self._failures.put(KIND, job.key, made, self._limit_s)
            self._take(job.key, made if isinstance(made, CompileError) else _keep(job, made, self._store))

        with TemporaryFolder() as folder:
            suffix = self._compiler.module.SUFFIX
            jobs = [
                Job(key, symbol_of(kernel, key), kernel, self._target, str(folder / f"{key}{suffix}"))
                for key, kernel in self._missing.items()
                if key in self._locks
            ]
            self._compiler.compile(jobs, self._until - time.monotonic(), finished)

    def _wait(self) -> None:
        """Wait for other processes, which compile all that is missing. At the deadline that is late."""
        left_s = self._until - time.monotonic()
        if left_s > 0:
            check()
            time.sleep(min(_LOOK_EVERY_S, left_s))
            return
        why = f"a kernel was not compiled within {self._deadline_s:.3g} s by another process, which is still at it (HYBRID_COMPILE_DEADLINE_S)"
        for key in tuple(self._missing):
            self._take(key, DeadlineError(why, had_s=0.0))


def _key(kernel: Kernel, target: CodeTarget, compiler: JobCompiler) -> str | CompileError:
    if isinstance(kernel, OperatorKernel):
        return _NOTHING
    try:
        return kernel_key(kernel, target, compiler.module)
    except (TypeError, RecursionError) as error:
        return CompileError(f"a {type(kernel).__name__} has no key: {error}")


def _lookup(key: str, kernel: Kernel, store: Store) -> Artifact | None:
    at = (str(store.root), key)
    known = _memo.get(at)
    if known is not None and not is_collecting() and Path(known.path).is_file():
        return known
    path = store.path_of(KIND, key)
    if path is None:
        return None
    _memo[at] = Artifact(str(path), symbol_of(kernel, key), key)
    return _memo[at]


def _spare(store: Store, error: CacheError) -> Store:
    """A store for kernels that `store` cannot take (a full disk): a temporary folder that ends with this process. Warns once."""
    at = (os.getpid(), str(store.root))
    if at not in _spares:
        _log.warning("%s. This process keeps such kernels in a temporary directory", error)
        _spares[at] = Store.temporary()
    return _spares[at]


def _keep(job: Job, made: Path, store: Store) -> Artifact | Exception:
    try:
        content = made.read_bytes()
        made.unlink()  # the temporary directory may be small
    except failures(OSError) as error:
        return CompileError(f"{job.symbol} was compiled, and cannot be read: {error}", recurs=False)
    try:
        path = store.put(KIND, job.key, content, made.suffix)
    except CacheError as error:
        try:
            path = _spare(store, error).put(KIND, job.key, content, made.suffix)
        except CacheError:
            return error
    known = _memo[(str(store.root), job.key)] = Artifact(str(path), job.symbol, job.key)
    return known
