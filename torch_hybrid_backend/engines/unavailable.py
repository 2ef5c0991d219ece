"""The stand-in for an engine that was not made: it says why and takes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, EngineBase
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Refused, Verdict
from torch_hybrid_backend.errors import CompileError


class UnavailableEngine(EngineBase):
    """Refuses everything, with one reason. `described`: what `hybrid doctor` prints of it, names and values."""

    keeps_deadline: bool = True

    def __init__(self, name: str, refused: Refused, described: Sequence[tuple[str, str]] = ()) -> None:
        self.name = name
        self._refused = refused
        self._described = described

    def available(self) -> Verdict:
        return self._refused

    def describe(self) -> Sequence[tuple[str, str]]:
        return self._described

    def supports(self, node: torch.fx.Node) -> Verdict:
        return self._refused

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [CompileError(self._refused.why)] * len(regions)
