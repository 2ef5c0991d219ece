"""The Triton engine: regions as kernels with our own schedules, compiled by Triton in worker processes. Nothing here imports Triton."""

from __future__ import annotations

from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.target import INTERPRETER
from torch_hybrid_backend.services import Services


class TritonEngine(KernelEngine):
    """Compiles regions to kernels of an NVIDIA GPU; `interpreted`: of the CPU, where Triton's interpreter runs them."""

    name: str = "triton"

    def __init__(self, config: Config, services: Services, *, interpreted: bool = False) -> None:
        super().__init__(TritonBackend(INTERPRETER if interpreted else None), config, services)
