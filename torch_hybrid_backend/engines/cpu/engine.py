"""The TVM engine: regions as kernels with our own schedules, compiled by TVM in worker processes.

Nothing here imports tvm: support is decided by the lowering table, kernels are plain data, and only the workers compile. A process that
finds every kernel in the cache never pays for the import.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch.fx

from torch_hybrid_backend.codegen.engine import KernelEngine, shared_compiler
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import LinkedLibrary
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.operands.quantized import keeps_codebook
from torch_hybrid_backend.engines.cpu.tir import compiler
from torch_hybrid_backend.engines.cpu.tir.linker import link_together, object_of
from torch_hybrid_backend.services import Services
from torch_hybrid_backend.storage.store import read_entry
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder


class TvmEngine(KernelEngine):
    """Compiles regions to kernels of the processor."""

    NAME: ClassVar[str] = TvmBackend.name

    @staticmethod
    def load_compiler(config: Config, processes: int) -> None:
        """Start up to so many processes of its compiler, without waiting for them."""
        shared_compiler(compiler, config.compile_threads).start_processes(processes)

    def __init__(self, config: Config, services: Services) -> None:
        self._cpu = TvmBackend.for_setting(config.target, times=config.placement != "estimate")
        super().__init__(self._cpu, config, services)

    def keeps_packed(self, weights: torch.fx.Node) -> bool:
        return keeps_codebook(weights)

    def link(self, libraries: Sequence[str]) -> LinkedLibrary | None:
        with TemporaryFolder() as folder:
            objects = []
            for number, library in enumerate(libraries):
                content = object_of(read_entry(Path(library)))
                if content is None:
                    return None
                objects.append(folder / f"{number:06}.o")
                objects[-1].write_bytes(content)
            linked = folder / "library.so"
            target = self._cpu.target
            link_together(objects, linked, target)
            code = linked.read_bytes()
        system = "linux" if target.architecture else platform.system().lower()
        return LinkedLibrary(code, system, target.architecture or platform.machine(), target.features)
