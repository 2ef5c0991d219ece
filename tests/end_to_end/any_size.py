"""A function compiled once with sizes known only at run time, then called at any sizes, also those Dynamo would specialise (0 and 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.size_reader import SizeReader
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import open_session
from torch_hybrid_backend.partition.extract import size_of
from torch_hybrid_backend.sizes.size import Dim, symbols


class AnySize:
    """`fn` of tensors (their sizes symbolic where `dynamic` says so) as the C++ plans of one compilation; no guard stands in the way."""

    def __init__(
        self, fn: Callable[..., Any], example: Sequence[torch.Tensor], dynamic: Sequence[Sequence[int]], config: Config
    ) -> None:
        self._graphs: list[tuple[HybridGraph, CapturedGraph]] = []
        self._session = open_session(config)
        self._config = config
        for tensor, dims in zip(example, dynamic, strict=True):
            for d in dims:
                torch._dynamo.mark_dynamic(tensor, d)
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(_in_order(fn), backend=self._backend, fullgraph=True)(*example)
        ((self.graph, captured),) = self._graphs
        self._inputs = [n for n in captured.graph_module.graph.nodes if n.op == "placeholder"]

    def _backend(self, gm: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        def compile_captured(captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
            graph = HybridGraph(captured, self._session, self._config)
            self._graphs.append((graph, captured))
            return graph

        keep = frozenset[torch._ops.OpOverload]().union(*(engine.keep_ops for engine in self._session.engines))
        return capture(gm, example, compile_captured, keep)

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        described: list[TensorSpec | Dim | None] = []
        given = iter(tensors)
        arguments: list[Any] = []
        for node in self._inputs:
            is_tensor = isinstance(node.meta["val"], torch.Tensor)
            described.append(TensorSpec.of(node.meta["val"]) if is_tensor else None)
            arguments.append(next(given) if is_tensor else None)
        needed = symbols([d for item in described if isinstance(item, TensorSpec) for d in item.shape])
        values = SizeReader(described, [s.name for s in needed]).values(arguments)
        for i, node in enumerate(self._inputs):
            if arguments[i] is None:
                size = size_of(node)
                assert size is not None, node.meta["val"]
                arguments[i] = values[str(size)]
        return self.graph(arguments)


def _in_order(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` whose graph takes its arguments in their order: Dynamo takes them in the order of their first use."""

    def called(*tensors: torch.Tensor) -> Any:
        assert all(tensor.dim() >= 0 for tensor in tensors)
        return fn(*tensors)

    return called
