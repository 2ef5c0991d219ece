"""A kernel compiler whose jobs are tasks of a Ray cluster: the process that times does not compile meanwhile.

Ray starts a task anew whose process or node ends. What cannot be compiled elsewhere is compiled by this process's own compiler.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_hybrid_backend.cancellation import check
from torch_hybrid_backend.codegen.compiler import KernelCompilerModule
from torch_hybrid_backend.codegen.kernel_cache import JobCompiler
from torch_hybrid_backend.codegen.workers.pool import Finished, KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.errors import CompileError, DeadlineError
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5


class RemoteCompiler:
    """Compiles on `nodes`, by Ray's ids, in turn. `waiting`: a context for the time in which this process waits."""

    def __init__(
        self, own: JobCompiler, nodes: Sequence[str], waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._own = own
        self._nodes = itertools.cycle(nodes)
        self._waiting = waiting

    @property
    def module(self) -> KernelCompilerModule:
        """The compiler module."""
        return self._own.module

    def compile(
        self, jobs: Sequence[Job], deadline_s: float, finished: Finished = lambda job, made: None
    ) -> list[Path | CompileError]:
        """See `KernelCompiler.compile`."""
        until = time.monotonic() + deadline_s
        made: dict[str, Path | CompileError] = {}
        lost: list[Job] = []

        def take(job: Job, result: Path | CompileError) -> None:
            made[job.key] = result
            finished(job, result)

        with self._waiting():
            self._compile(list({job.key: job for job in jobs}.values()), until, take, lost)
        self._own.compile(lost, until - time.monotonic(), take)
        return [made[job.key] for job in jobs]

    def _compile(self, jobs: Sequence[Job], until: float, take: Finished, lost: list[Job]) -> None:
        ray: Any = importlib.import_module("ray")
        running = {self._begin(ray, job, until): job for job in jobs}
        try:
            while running:
                ready, _ = ray.wait(list(running), timeout=max(0.0, min(_LOOK_EVERY_S, until - time.monotonic())))
                for ref in ready:
                    job = running.pop(ref)
                    try:
                        result = ray.get(ref)
                    except ray.exceptions.RayError as error:
                        _log.warning("%s is compiled here, as no other node did: %s", job.symbol, error)
                        lost.append(job)
                        continue
                    if isinstance(result, bytes):
                        Path(job.output).write_bytes(result)
                    take(job, Path(job.output) if isinstance(result, bytes) else result)
                check()
                if running and time.monotonic() >= until:
                    for job in running.values():
                        take(job, DeadlineError(f"{job.symbol} was not compiled in time by other nodes", had_s=0.0))
                    return
        finally:
            for ref in running:
                ray.cancel(ref, force=True)

    def _begin(self, ray: Any, job: Job, until: float) -> Any:
        return (
            ray.remote(compile_here)
            .options(num_cpus=1, max_retries=3, scheduling_strategy=on_node(next(self._nodes), soft=True))
            .remote(self.module.__name__, job, max(1.0, until - time.monotonic()))
        )


def on_node(node: str, *, soft: bool = False) -> Any:
    """Ray's strategy to run on a node, by its id. `soft`: elsewhere if the node is gone."""
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node, soft=soft)


def compile_here(module: str, job: Job, limit_s: float) -> bytes | CompileError:
    """Compile a job in a process of this node; return the artifact, or what stopped it."""
    with TemporaryFolder() as folder:
        (made,) = _compiler(module).compile([replace(job, output=str(folder / Path(job.output).name))], limit_s)
        return made if isinstance(made, CompileError) else made.read_bytes()


@functools.cache
def _compiler(module: str) -> KernelCompiler:
    loaded: Any = importlib.import_module(module)
    return KernelCompiler(loaded, threads=1)
