"""The Triton engine: regions as kernels with our own schedules, compiled by Triton in worker processes. Nothing here imports Triton."""

from __future__ import annotations

from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.interpreted import is_wanted as interpreter_is_wanted
from torch_hybrid_backend.engines.triton.target import INTERPRETER
from torch_hybrid_backend.services import Services


class TritonEngine(KernelEngine):
    """Compiles regions to kernels of an NVIDIA GPU."""

    name: str = "triton"

    def __init__(self, config: Config, services: Services) -> None:
        """Named in `engines` under TRITON_INTERPRET=1, it serves the CPU, by Triton's interpreter."""
        interpreted = self.name in config.engines and interpreter_is_wanted()
        super().__init__(TritonBackend(INTERPRETER if interpreted else None), config, services)
