"""A kernel compiler process, as seen from the process that needs kernels.

`pool` decides who uses it for what; `main` is what runs inside.
"""

from __future__ import annotations

from torch_hybrid_backend.codegen.compiler import KernelCompilerModule
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.processes.child import Child


class CompilerProcess(Child):
    """A compiler process, and its current job."""

    def __init__(self, compiler: KernelCompilerModule, idle_s: float) -> None:
        self.ready = False
        self.job: Job | None = None
        self.began = 0.0  # what `processor_s` was when it was given the job
        super().__init__(
            "torch_hybrid_backend.codegen.workers.main",
            [compiler.__name__, str(idle_s)],
            "the kernel compiler",
            compiler.ENVIRONMENT,
        )
