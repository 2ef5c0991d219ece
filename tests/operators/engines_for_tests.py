"""Engines as the operator tests need them: with the kernels of many graphs compiled together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_hybrid_backend.codegen.backend import KernelBackend
from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.services import Services

DEADLINE_S = 600.0  # for the kernels of one batch


class BatchedEngine(KernelEngine):
    """An engine whose regions are compiled when one of them is first needed, all that wait together."""

    def __init__(self, backend: KernelBackend, config: Config, services: Services) -> None:
        super().__init__(backend, config, services)
        self._waiting: list[_Awaited] = []

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        regions_ = [_Awaited(region, self) for region in regions]
        self._waiting += regions_
        return list(regions_)

    def flush(self) -> None:
        """Compile what waits."""
        waiting, self._waiting = self._waiting, []
        compiled = super().compile([awaited.region for awaited in waiting], Deadline(DEADLINE_S)) if waiting else []
        for awaited, made in zip(waiting, compiled, strict=True):
            awaited.made = made


class _Awaited(CompiledRegionBase):
    """A region that is compiled or about to be."""

    def __init__(self, region: Region, engine: BatchedEngine) -> None:
        self.region = region
        self.made: CompiledRegion | Exception | None = None
        self._engine = engine

    def _compiled(self) -> CompiledRegion:
        if self.made is None:
            self._engine.flush()
        assert self.made is not None
        if isinstance(self.made, Exception):
            raise self.made
        return self.made

    @property
    def program(self) -> Program | None:  # type: ignore[override]
        return self._compiled().program

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._compiled()(inputs)
