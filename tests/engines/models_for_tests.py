"""Models of the zoo as engines see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from benchmarks.models import ZOO
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.engine import Engine
from torch_hybrid_backend.partition.regions import Partition, partition_graph
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.hoist import hoist
from torch_hybrid_backend.passes.inline_subgraphs import inline_subgraphs
from torch_hybrid_backend.passes.pipeline import run_passes


def partitions(model: str, engine: Engine, dtype: torch.dtype = torch.float32) -> list[Partition]:
    """How the wiring partitions each graph of a model at its published size, of one sample. Nothing runs."""
    module, inputs = ZOO[model].make("full").eval().to(dtype), ZOO[model].inputs("full", batch=1)
    found: list[Partition] = []

    def partitioned(captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        inline_subgraphs(captured.graph_module)
        run_passes(captured.graph_module, PassContext.of(captured))
        hoisted = hoist(captured.graph_module, captured.static_inputs)
        found.append(partition_graph(hoisted.main, [engine], Config()))
        return lambda values: [torch.empty(())] * 100

    def backend(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        capture(graph, examples, partitioned, engine.keep_ops, None)
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, dynamic=False)(
            *(x.to(dtype) if x.is_floating_point() else x for x in inputs)
        )
    return found
