"""Graphs on devices that are not there: fake tensors have a device and no memory, and Dynamo and AOTAutograd trace them all the same.

Inference only: the autograd of a PyTorch without CUDA has no streams of CUDA's to put into a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph


class FakeDevices:
    """Tensors and modules on any device, and the graphs that capture makes of them; all of one fake mode, as Dynamo wants it."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

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
        with torch.no_grad(), _without_guards():
            torch.compile(function, backend=backend, dynamic=False)(*inputs)
        torch._dynamo.reset()


@contextlib.contextmanager
def _without_guards() -> Iterator[None]:
    """Three methods of tensors in the operators that they call: their C++ makes the tensor's device the current one before, which a PyTorch
    without CUDA cannot."""
    item, contiguous, inverse = torch.Tensor.__getitem__, torch.Tensor.contiguous, torch.Tensor.__invert__

    def index(self: torch.Tensor, wanted: Any) -> torch.Tensor:
        if self.device.type != "cuda" or not isinstance(wanted, tuple | torch.Tensor):
            return item(self, wanted)
        return _item(self, wanted if isinstance(wanted, tuple) else (wanted,))

    def dense(self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        if self.device.type != "cuda":
            return contiguous(self, memory_format=memory_format)
        return self if self.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)

    def inverted(self: torch.Tensor) -> torch.Tensor:
        return inverse(self) if self.device.type != "cuda" else torch.ops.aten.bitwise_not.default(self)

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.Tensor, "__getitem__", index)
            patch.setattr(torch.Tensor, "contiguous", dense)
            patch.setattr(torch.Tensor, "__invert__", inverted)
        yield


def _item(tensor: torch.Tensor, wanted: tuple[Any, ...]) -> torch.Tensor:
    """`tensor[wanted]`, of numbers, slices, None, an ellipsis and tensors of whole numbers."""
    found, dim, tensors = tensor, 0, {}
    named = sum(each is not None and each is not Ellipsis for each in wanted)
    for each in wanted:
        if each is Ellipsis:
            dim += tensor.dim() - named
        elif isinstance(each, int):
            found = torch.ops.aten.select.int(found, dim, each)
            continue
        elif each is None:
            found = torch.ops.aten.unsqueeze.default(found, dim)
        elif isinstance(each, torch.Tensor):
            tensors[dim] = each
        elif each != slice(None):
            found = torch.ops.aten.slice.Tensor(found, dim, each.start, each.stop, each.step or 1)
        dim += each is not Ellipsis
    if tensors:
        return torch.ops.aten.index.Tensor(found, [tensors.get(d) for d in range(max(tensors) + 1)])
    return torch.ops.aten.alias.default(found) if found is tensor else found
