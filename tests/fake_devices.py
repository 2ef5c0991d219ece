"""Graphs on devices that are not there: fake tensors have a device and no memory, and Dynamo and AOTAutograd trace them all the same.

Inference only: the autograd of a PyTorch without CUDA has no streams of CUDA's to put into a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph


class FakeDevices:
    """Tensors and modules on any device, and the graphs that capture makes of them; all of one fake mode, as Dynamo wants it."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, *shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype, device=device)

    def move(self, module: nn.Module, device: str) -> nn.Module:
        """The module with fake parameters and buffers on `device` in place of its own; those that are fake already stay where they are."""
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and not isinstance(parameter, FakeTensor):
                    owner._parameters[name] = nn.Parameter(self._like(parameter, device), requires_grad=False)
            for name, buffer in owner._buffers.items():
                if buffer is not None and not isinstance(buffer, FakeTensor):
                    owner._buffers[name] = self._like(buffer, device)
        return module

    def like(self, tensor: torch.Tensor, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of the same form on `device`; floating-point ones in `dtype` where it is given."""
        changed = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        return self._like(changed, device)

    def _like(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    def captured(
        self, function: Callable[..., Any], *inputs: torch.Tensor, keep_ops: Sequence[torch._ops.OpOverload] = ()
    ) -> CapturedGraph:
        """The one inference graph that capture makes of the function; nothing runs."""
        (graph,) = self.all_captured(function, *inputs, keep_ops=keep_ops)
        return graph

    def all_captured(
        self, function: Callable[..., Any], *inputs: torch.Tensor, keep_ops: Sequence[torch._ops.OpOverload] = ()
    ) -> list[CapturedGraph]:
        """Likewise, where Dynamo may divide the function."""
        graphs: list[CapturedGraph] = []

        def compile_graph(graph: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
            graphs.append(graph)
            return lambda _: []

        self.traced(function, *inputs, on_graph=lambda gm, examples: capture(gm, examples, compile_graph, keep_ops))
        return graphs

    def traced(
        self,
        function: Callable[..., Any],
        *inputs: torch.Tensor,
        on_graph: Callable[[torch.fx.GraphModule, list[Any]], object],
    ) -> None:
        """Have Dynamo trace the function, and give `on_graph` the graph and its example inputs, as it gives them to a backend."""

        def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
            on_graph(gm, examples)
            results = [node.meta["example_value"] for node in gm.graph.output_node().all_input_nodes]
            return lambda *_: results

        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(function, backend=backend, dynamic=False)(*inputs)
        torch._dynamo.reset()
