"""Compiled kernels: found in this process, else on disk, else compiled and put there.

The order of things for a kernel: its key (`kernel_key`), the memo of this process, the store (which verifies the checksum of what it
hands out, and drops what fails), the compiler processes. A failure is not remembered: the next compilation tries again.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_hybrid_backend.codegen.compiler import CodeTarget
from torch_hybrid_backend.codegen.kernel_key import kernel_key
from torch_hybrid_backend.codegen.kernel_name import symbol_of
from torch_hybrid_backend.codegen.operator_kernel import OperatorKernel
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.errors import CacheError, CompileError
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.store import Store

_log = logging.getLogger(__name__)

KIND = "kernels"
_NOTHING = ""  # the key of what needs no artifact: an operator of PyTorch's

# (store, key) -> artifact. Writes of single items are atomic; two threads that compile one kernel at once write equal things.
_memo: dict[tuple[str, str], Artifact] = {}
_spares: dict[tuple[int, str], Store] = {}  # (process, store) -> what takes its place when it is full


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a kernel was compiled to: a file, and the kernel's name in it. All empty for an operator of PyTorch's."""

    path: str
    symbol: str
    key: str


def compile_kernels(
    kernels: Sequence[Kernel], target: CodeTarget, compiler: KernelCompiler, store: Store, deadline_s: float
) -> list[Artifact | Exception]:
    """The kernels' artifacts, kernel by kernel, or what stopped them: a CompileError, or CacheError where the store cannot be written.

    Compiles, in parallel and equal ones once, what neither this process nor the store has; gives up on those after `deadline_s` seconds.
    """
    start = time.monotonic()
    keys = [_key(kernel, target, compiler) for kernel in kernels]
    found: dict[str, Artifact | Exception] = {_NOTHING: Artifact("", "", _NOTHING)}
    missing: dict[str, Kernel] = {}
    for key, kernel in zip(keys, kernels, strict=True):
        if isinstance(key, Exception) or key in found or key in missing:
            continue
        known = _lookup(key, kernel, store)
        if known is not None:
            found[key] = known
        else:
            missing[key] = kernel
    if missing:
        _log.debug("%d kernels found, %d to compile", len(found), len(missing))
        found.update(_compile(missing, target, compiler, store, deadline_s - (time.monotonic() - start)))
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
    if known is not None and Path(known.path).is_file():
        return known
    path = store.path_of(KIND, key)
    if path is None:
        return None
    _memo[at] = Artifact(str(path), symbol_of(kernel, key), key)
    return _memo[at]


def _compile(
    kernels: dict[str, Kernel], target: CodeTarget, compiler: KernelCompiler, store: Store, deadline_s: float
) -> dict[str, Artifact | Exception]:
    results: dict[str, Artifact | Exception] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="torch_hybrid_backend-") as folder:
            jobs = [
                Job(key, symbol_of(kernel, key), kernel, target, str(Path(folder) / f"{key}{compiler.module.SUFFIX}"))
                for key, kernel in kernels.items()
            ]
            for job, made in zip(jobs, compiler.compile(jobs, deadline_s), strict=True):
                results[job.key] = made if isinstance(made, Exception) else _keep(job, made, store)
    except OSError as error:  # the temporary directory is full, or cannot be made
        for key in kernels.keys() - results.keys():
            results[key] = CompileError(
                f"{symbol_of(kernels[key], key)} cannot be compiled, as the temporary directory cannot be used: {error}"
            )
    return results


def _spare(store: Store, error: CacheError) -> Store:
    """Where kernels go that `store` does not take (a full disk): a temporary directory, gone with this process. Says so once."""
    at = (os.getpid(), str(store.root))
    if at not in _spares:
        _log.warning("%s. This process keeps such kernels in a temporary directory", error)
        _spares[at] = Store.temporary()
    return _spares[at]


def _keep(job: Job, made: Path, store: Store) -> Artifact | CacheError:
    content = made.read_bytes()
    try:
        path = store.put(KIND, job.key, content, made.suffix)
    except CacheError as error:
        try:
            path = _spare(store, error).put(KIND, job.key, content, made.suffix)
        except CacheError:
            return error
    known = _memo[(str(store.root), job.key)] = Artifact(str(path), job.symbol, job.key)
    return known
