"""The interface of a kernel compiler: the target, and the module that compiles in worker processes.

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

    `SOURCES`: the parts of this package that decide the module's results (see `sources`). Sources outside the package, such as those of a third
    party's engine, belong in `version`. `SUFFIX`: of the files that it writes, with the dot. `ENVIRONMENT`: variables for its worker processes.
    """

    __name__: str
    SOURCES: tuple[str, ...]
    SUFFIX: str
    ENVIRONMENT: Mapping[str, str]

    def version(self) -> str:
        """The version of the installed packages that kernels depend on, without importing them, which may take seconds."""
        ...

    def load(self) -> None:
        """Import the compiler; once, in the worker process."""
        ...

    def compile_kernel(self, job: Job) -> None:
        """Write the job's artifact to `job.output`. Raises ScheduleError if no schedule serves the kernel, and whatever else stops it."""
        ...


def compiler_version(compiler: KernelCompilerModule) -> str:
    """A key that must be the same in this process and a worker process: of the sources and of the installed compiler."""
    return f"{sources_version(*compiler.SOURCES)} {compiler.__name__} {compiler.version()}"
