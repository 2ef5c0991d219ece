"""The stand-in for an engine that could not be made: it says why and takes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, EngineBase
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Verdict
from torch_hybrid_backend.errors import CompileError


class UnavailableEngine(EngineBase):
    """Refuses everything, with one reason: what the engine's package raised when it was loaded."""

    keeps_deadline: bool = True

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        self._refused = Refused(Reason.MISSING_DEPENDENCY, f"its package fails: {type(error).__name__}: {error}")

    def available(self) -> Verdict:
        return self._refused

    def supports(self, node: torch.fx.Node) -> Verdict:
        return self._refused

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [CompileError(self._refused.why)] * len(regions)
