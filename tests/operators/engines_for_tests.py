"""Engines as the operator tests need them: TVM with the kernels of many graphs compiled together, and the lowerings interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.loops.interpret import evaluate
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase, EngineBase
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Verdict
from torch_hybrid_backend.engines.tvm.engine import TvmEngine
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.loops.graph import LoopGraph, lower_region
from torch_hybrid_backend.services import Services

DEADLINE_S = 600.0  # for the kernels of one batch


class BatchedTvm(TvmEngine):
    """The TVM engine; regions are compiled when one of them is first needed, all that wait together."""

    def __init__(self, config: Config, services: Services) -> None:
        super().__init__(config, services)
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

    def __init__(self, region: Region, engine: BatchedTvm) -> None:
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


class Interpreted(CompiledRegionBase):
    """A lowered region; calling it interprets every operation."""

    def __init__(self, region: Region, graph: LoopGraph) -> None:
        self._region = region
        self._graph = graph

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        env: dict[Any, torch.Tensor] = dict(zip(self._graph.inputs, inputs, strict=True))
        env.update(self._graph.literals)
        for op in self._graph.ops:
            assert all(buffer in env for buffer in op.reads()), "an operation reads a buffer that nothing has filled"
            evaluate(op, env)
        return [self._output(k, env[buffer]) for k, buffer in enumerate(self._graph.outputs)]

    def _output(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        spec = self._region.outputs[position]
        assert spec is not None
        # Through offsets: outputs may overlap themselves (expanded ones).
        storage = torch.empty(spec.span, dtype=spec.torch_dtype)
        offsets = torch.arange(spec.span).as_strided(tensor.shape, tuple(map(int, spec.strides)))
        storage[offsets.reshape(-1)] = tensor.reshape(-1)
        return storage.as_strided(tensor.shape, tuple(map(int, spec.strides)))


class InterpreterEngine(EngineBase):
    """The loops language run by the tests' interpreter: what is wrong here is wrong in a lowering, and not in a kernel."""

    name: str = "interpreter"

    def __init__(self) -> None:
        self.keep_ops = frozenset(lowering.table())

    def supports(self, node: torch.fx.Node) -> Verdict:
        return lowering.supports(node)

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[Any]:
        results: list[Any] = []
        for region in regions:
            try:
                results.append(Interpreted(region, lower_region(region)))
            except Exception as error:
                results.append(error)
        return results
