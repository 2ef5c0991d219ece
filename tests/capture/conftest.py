"""Compiling through capture alone: every graph is run as captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph


class Recorder:
    """Compiles functions through capture and keeps the graphs it was given."""

    def __init__(self) -> None:
        self.graphs: list[CapturedGraph] = []

    def compile(
        self,
        function: Callable[..., Any],
        keep_ops: tuple[Any, ...] = (),
        backward_takes_s: float = 0.0,
        **options: Any,
    ) -> Callable[..., Any]:
        def compile_graph(captured: CapturedGraph) -> Callable[[list[Any]], Any]:
            self.graphs.append(captured)
            if captured.kind == "backward":
                time.sleep(backward_takes_s)

            def run(inputs: list[Any]) -> Any:
                arguments = list(inputs)
                inputs.clear()  # the boxed convention: the caller must not need them any more
                return captured.graph_module(*arguments)

            return run

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            return capture(gm, inputs, compile_graph, keep_ops)

        return torch.compile(function, backend=backend, **options)

    def operators(self, number: int = 0) -> list[str]:
        graph = self.graphs[number].graph_module.graph
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield Recorder()
    torch._dynamo.reset()
