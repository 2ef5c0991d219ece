"""The TVM engine: regions as kernels with our own schedules, compiled by TVM in worker processes.

Nothing here imports tvm: support is decided by the lowering table, kernels are plain data, and only the workers compile. A process that
finds every kernel in the cache never pays for the import.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.codegen.search import RunProgram
from torch_hybrid_backend.engines.tvm.backend import TvmBackend
from torch_hybrid_backend.store import Store


class TvmEngine(KernelEngine):
    """Compiles regions to kernels of the processor; the arguments are those of `KernelEngine`."""

    def __init__(
        self,
        store: Store,
        compile_threads: int,
        run_program: RunProgram,
        placement: str = "estimate",
        machine: Callable[[], str] = lambda: "",
        progress: bool = False,
    ) -> None:
        super().__init__(TvmBackend(), store, compile_threads, run_program, placement, machine, progress)
