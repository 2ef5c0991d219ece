"""A kernel compiler, as the rest of `codegen` sees it: what it compiles for, and the module that does it in worker processes.

Nothing here, nor in what a compiler module imports at its top, may import torch: the worker processes run without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch_hybrid_backend.storage.sources import sources_version

if TYPE_CHECKING:
    from torch_hybrid_backend.codegen.workers.protocol import Job


class CodeTarget(Protocol):
    """Target that kernels are compiled for, such as a processor. Frozen, and pickled on its way to a worker process."""

    @property
    def fingerprint(self) -> str:
        """A text for cache keys: equal for two processes exactly where a kernel of one is the right kernel for the other."""
        ...


class KernelCompilerModule(Protocol):
    """A module that compiles kernels. A worker process imports it by its name; the user's process too, and calls `version` only.

    `SOURCES`: the parts of this package that decide what it makes of a kernel (see `sources`). What lies outside the package, an engine of a
    third party with its own sources, belongs in `version`. `SUFFIX`: of the files it writes, with the dot. `ENVIRONMENT`: variables that its
    worker processes are started with.
    """

    __name__: str
    SOURCES: tuple[str, ...]
    SUFFIX: str
    ENVIRONMENT: Mapping[str, str]

    def version(self) -> str:
        """The version of what is installed and decides a kernel besides the sources, without importing it: that may take seconds."""
        ...

    def load(self) -> None:
        """Import what compiling takes; once, in the worker process."""
        ...

    def compile_kernel(self, job: Job) -> None:
        """Write the job's artifact to `job.output`. Raises whatever stops it; ScheduleError where nothing serves the kernel."""
        ...


def compiler_version(compiler: KernelCompilerModule) -> str:
    """Key of what this process and a worker process must have in common: the sources and what is installed."""
    return f"{sources_version(*compiler.SOURCES)} {compiler.__name__} {compiler.version()}"
