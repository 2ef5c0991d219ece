"""The loops language run by the tests' interpreter, as an engine: what is wrong here is wrong in a lowering, and not in a kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tests.loops.interpret import evaluate
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Supported, Verdict
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.loops.graph import LoopGraph, lower_region


class Interpreted:
    """A lowered region; calling it interprets every operation."""

    program = None

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


class InterpreterEngine:
    """Takes what the lowering table takes."""

    name: str = "interpreter"

    @functools.cached_property
    def keep_ops(self) -> frozenset[torch._ops.OpOverload]:
        return frozenset(lowering.table())

    def available(self) -> Verdict:
        return Supported()

    def supports(self, node: torch.fx.Node) -> Verdict:
        return lowering.supports(node)

    def compile(self, regions: Sequence[Region], deadline_s: float) -> list[Any]:
        results: list[Any] = []
        for region in regions:
            try:
                results.append(Interpreted(region, lower_region(region)))
            except Exception as error:
                results.append(error)
        return results
