"""The TVM engine: regions as kernels with our own schedules, compiled by TVM in worker processes.

Nothing here imports tvm: support is decided by the lowering table, kernels are plain data, and only the workers compile. A process that
finds every kernel in the cache never pays for the import.
"""

from __future__ import annotations

import torch.fx

from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.operands.quantized import keeps_codebook
from torch_hybrid_backend.services import Services


class TvmEngine(KernelEngine):
    """Compiles regions to kernels of the processor."""

    def __init__(self, config: Config, services: Services) -> None:
        super().__init__(TvmBackend(), config, services)

    def keeps_packed(self, weights: torch.fx.Node) -> bool:
        return keeps_codebook(weights)
