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
from torch_hybrid_backend.driver.prepared import prepare
from torch_hybrid_backend.partition.regions import Partition, partition_graph


def partitions(
    model: str, engine: Engine, dtype: torch.dtype = torch.float32, precision: str = "as-written"
) -> list[Partition]:
    """Partitions of a model's graphs, as the wiring makes them, at its published size, of one sample. Nothing runs.

    dtype: the model's. precision: the setting, one of `core.precision.PRECISIONS`.
    """
    module, inputs = ZOO[model].make("full").eval().to(dtype), ZOO[model].inputs("full", batch=1)
    config = Config(precision=precision)
    found: list[Partition] = []

    def partitioned(captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        prepared = prepare(captured, model, config, _no_bodies)
        found.append(partition_graph(prepared.hoisted.main, [engine], config))
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


def _no_bodies(name: str, captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
    raise NotImplementedError("models of the zoo have no control flow")
