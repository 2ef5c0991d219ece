"""An engine with a planted bug: it computes sigmoid 10% too large, and everything else as eager does.

As an installed package would, it is found through the entry-point group `torch_hybrid_backend.engines` (see `install`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase, EngineBase
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Supported, Verdict

NAME = "planted"


class PlantedRegion(CompiledRegionBase):
    """A region run operator by operator."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self._graph_module = graph_module

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(_Interpreter(self._graph_module).run(*inputs))


class _Interpreter(torch.fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().call_function(target, args, kwargs)
        return value * 1.1 if target is torch.ops.aten.sigmoid.default else value


class PlantedEngine(EngineBase):
    """Takes every operator."""

    name = NAME

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Supported()

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [PlantedRegion(region.graph_module) for region in regions]


def make(_config: object, _services: object) -> PlantedEngine:
    """The factory that the entry point names."""
    return PlantedEngine()


def install(folder: Path) -> None:
    """Makes `folder`, put on PYTHONPATH, an installed distribution that brings this engine."""
    shutil.copy(__file__, folder / "planted_engine.py")
    metadata = folder / "planted_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch_hybrid_backend.engines]\n{NAME} = planted_engine:make\n")
