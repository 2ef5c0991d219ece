"""Real captured graphs for the passes to work on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.passes.values import verify_values
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.verify import Contract, verify


class Subject:
    """A captured graph, the inputs it was run on, and what it returned before any pass."""

    def __init__(self, captured: CapturedGraph, inputs: list[Any], before: list[Any]) -> None:
        self.captured, self.inputs, self.before = captured, inputs, before
        self.gm = captured.graph_module
        self.ctx = PassContext.of(captured)
        self.contract = Contract.of(self.gm)

    def operators(self, gm: torch.fx.GraphModule | None = None) -> Counter[str]:
        nodes = (gm or self.gm).graph.nodes
        return Counter(str(node.target).removeprefix("aten.") for node in nodes if node.op == "call_function")

    def run(self) -> list[Any]:
        self.gm.recompile()
        return list(self.gm(*self.inputs))

    def apply(self, *passes: Callable[..., bool], exact: bool = False) -> bool:
        """Run passes, check the graph is legal and its results are what they were; returns whether any changed it."""
        changed = [graph_pass(self.gm, self.ctx) for graph_pass in passes]
        verify(self.gm, self.contract)
        verify_values(self.gm)
        tolerance = 0.0 if exact else 1e-5
        torch.testing.assert_close(
            self.run(), self.before, rtol=tolerance, atol=tolerance, check_stride=True, equal_nan=True
        )
        return any(changed)


@pytest.fixture
def captured() -> Iterator[Callable[..., Subject]]:
    """`captured(function, *inputs)`: the first graph that capture makes of the function."""

    def make(function: Callable[..., Any], *inputs: Any, grad: bool = False, **options: Any) -> Subject:
        subjects: list[Subject] = []

        def compile_graph(graph: CapturedGraph) -> Callable[[list[Any]], Any]:
            def run(arguments: list[Any]) -> Any:
                outputs = graph.graph_module(*arguments)
                subjects.append(Subject(graph, list(arguments), list(outputs)))
                return outputs

            return run

        def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            return capture(gm, example_inputs, compile_graph, ())

        with torch.set_grad_enabled(grad):
            torch.compile(function, backend=backend, **options)(*inputs)
        return subjects[0]

    torch._dynamo.reset()
    torch.manual_seed(0)
    yield make
    torch._dynamo.reset()
