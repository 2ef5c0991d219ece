"""Compiled kernels: found in this process, else on disk, else compiled and put there.

A kernel is looked for by its key (`kernel_key`) in the memo of this process, in the store (which verifies checksums, and drops files that
fail), and in the failures of the last day (`builds.failures`). Then the compiler processes compile it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_hybrid_backend.builds.failures import Failures
from torch_hybrid_backend.codegen.compiler import CodeTarget
from torch_hybrid_backend.codegen.kernel_key import kernel_key
from torch_hybrid_backend.codegen.kernel_name import symbol_of
from torch_hybrid_backend.codegen.operator_kernel import OperatorKernel
from torch_hybrid_backend.codegen.workers.pool import Finished, KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.errors import CacheError, CompileError, ScheduleError, failures
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.storage.store import Store, is_collecting
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder

_log = logging.getLogger(__name__)

KIND = "kernels"
_NOTHING = ""  # the key of what needs no artifact: an operator of PyTorch's

# (store, key) -> artifact. Writes of single items are atomic; two threads that compile one kernel at once write equal things.
_memo: dict[tuple[str, str], Artifact] = {}
_spares: dict[tuple[int, str], Store] = {}  # (process, store) -> what takes its place when it is full


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled kernel: a file, and the kernel's name in it. All fields are empty for an operator of PyTorch's."""

    path: str
    symbol: str
    key: str


def compile_kernels(
    kernels: Sequence[Kernel],
    target: CodeTarget,
    compiler: KernelCompiler,
    store: Store,
    deadline_s: float,
    limit_s: float | None = None,
) -> list[Artifact | Exception]:
    """The artifact of each kernel, or the exception that stopped it: a CompileError, or CacheError if the store cannot be written.

    Compiles kernels that neither this process nor the store has, in parallel and equal ones once, and gives up after `deadline_s` seconds. Each
    artifact is kept at once: if this process is killed, the next one compiles only the rest.
    A kernel that failed within a day is not compiled again. One that was late is, if `limit_s`, the time for all kernels of a graph (None:
    `deadline_s`), is longer than it was.
    """
    limit_s = deadline_s if limit_s is None else limit_s
    remembered = Failures(store)
    start = time.monotonic()
    keys = [_key(kernel, target, compiler) for kernel in kernels]
    found: dict[str, Artifact | Exception] = {_NOTHING: Artifact("", "", _NOTHING)}
    missing: dict[str, Kernel] = {}
    for key, kernel in zip(keys, kernels, strict=True):
        if isinstance(key, Exception) or key in found or key in missing:
            continue
        known = _lookup(key, kernel, store)
        failed = remembered.get(KIND, key, limit_s) if known is None else None
        if known is not None:
            found[key] = known
        elif failed is not None:
            found[key] = failed.as_exception()
        else:
            missing[key] = kernel
    if missing:
        _log.debug("%d kernels found, %d to compile", len(found), len(missing))

        progress = Progress("compiling kernels", len(missing), delay_s=2.0)

        def finished(job: Job, made: Path | CompileError) -> None:
            progress.step()
            found[job.key] = made if isinstance(made, CompileError) else _keep(job, made, store)
            # That no schedule serves a kernel shows at once.
            if isinstance(made, CompileError) and not isinstance(made, ScheduleError):
                remembered.put(KIND, job.key, made, limit_s)

        try:
            with progress:
                _compile(missing, target, compiler, deadline_s - (time.monotonic() - start), finished)
        except failures(OSError) as error:  # no temporary directory can be made, say
            why = f"kernels cannot be compiled: {error}"
            found.update((key, CompileError(why, recurs=False)) for key in missing.keys() - found.keys())
    return [key if isinstance(key, Exception) else found[key] for key in keys]


def _key(kernel: Kernel, target: CodeTarget, compiler: KernelCompiler) -> str | CompileError:
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


def _compile(
    kernels: dict[str, Kernel], target: CodeTarget, compiler: KernelCompiler, deadline_s: float, finished: Finished
) -> None:
    with TemporaryFolder() as folder:
        jobs = [
            Job(key, symbol_of(kernel, key), kernel, target, str(folder / f"{key}{compiler.module.SUFFIX}"))
            for key, kernel in kernels.items()
        ]
        compiler.compile(jobs, deadline_s, finished)


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
