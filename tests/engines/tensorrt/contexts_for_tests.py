"""A fake engine whose contexts record their calls, and fake streams: there is no GPU to run engines on."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest, Layout, SerializedEngine, make_constants
from torch_hybrid_backend.engines.tensorrt.log import LogMessages
from torch_hybrid_backend.graph.graph_json import graph_from_text
from torch_hybrid_backend.sizes.size import evaluate


class FakeStream:
    def __init__(self, number: int, log: list[tuple[object, ...]] | None = None, *, is_done: bool = True) -> None:
        self.cuda_stream = number
        self.calls: list[tuple[object, ...]] = [] if log is None else log
        self.is_done = is_done

    def wait_stream(self, stream: FakeStream) -> None:
        self.calls.append(("wait_stream", self.cuda_stream, stream.cuda_stream))

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.calls.append(("synchronize", self.cuda_stream))


class FakeStreams:
    def __init__(self, now: FakeStream, other: FakeStream | None = None) -> None:
        self.now = now
        self.other = other
        self.capturing = False

    def entered(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def current(self) -> FakeStream:
        return self.now

    def side(self) -> FakeStream:
        assert self.other is not None, "the caller's stream is no default one"
        return self.other


class FakeContext:
    def __init__(self, engine: FakeEngine, log: list[tuple[object, ...]] | None) -> None:
        self.calls: list[tuple[Any, ...]] = [] if log is None else log
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self._engine = engine

    def tensor(self, name: str, layout: Layout, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor at the address of `name`. `shape`: sizes in memory order, if the layout's own are dynamic."""
        return _at(self.addresses[name], shape or tuple(int(layout.spec.shape[d]) for d in layout.order), layout)  # type: ignore[call-overload]

    def _told(self, method: str, *told: object) -> bool:
        self.calls.append((method, *told))
        return self._engine.refuses != method

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return self._told("set_input_shape", name, shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return self._told("set_tensor_address", name, address)

    def set_device_memory(self, address: int, size_bytes: int) -> None:
        self._told("set_device_memory", address, size_bytes)

    def execute_async_v3(self, stream: int) -> bool:
        self._engine.during()
        went = self._told("execute_async_v3", stream)
        if went:
            self._engine.compute(self)
        return went


class FakeEngine:
    """A fake engine that records. `compute`: called with the context in each run; `during`: called before."""

    def __init__(
        self,
        scratch_bytes: int = 0,
        log: list[tuple[object, ...]] | None = None,
        compute: Callable[[FakeContext], None] = lambda context: None,
    ) -> None:
        self.scratch_bytes = scratch_bytes
        self.contexts: list[FakeContext] = []
        self.compute = compute
        self.during: Callable[[], object] = lambda: None
        self.refuses = ""
        self.is_capturable = True
        self.kernels = b""  # what its calls compiled
        self.takes_kernels = True
        self.messages = LogMessages()  # what TensorRT says in calls
        self._log = log

    def collect_log(self) -> contextlib.AbstractContextManager[LogMessages]:
        return contextlib.nullcontext(self.messages)

    def context(self) -> FakeContext:
        self.contexts.append(FakeContext(self, self._log))
        return self.contexts[-1]

    def can_be_captured(self, context: object, stream: int) -> bool:
        return self.is_capturable

    def take_kernels(self, kernels: bytes) -> bool:
        if self.takes_kernels:
            self.kernels = kernels
        return self.takes_kernels

    def compiled_kernels(self) -> bytes:
        return self.kernels


def computing(
    region: Region, change: Callable[[torch.Tensor], torch.Tensor] = lambda result: result
) -> Callable[[FakeContext], None]:
    """Compute a region by PyTorch's operators, on the memory at the addresses that the context was told. `change`: applied to each result."""
    return _computing(BuildRequest.of(region, {}), region.graph_module, change)


def computing_request(data: bytes) -> Callable[[FakeContext], None]:
    """Compute a request's region likewise, with the request's constants, whatever the weights are now."""
    request = BuildRequest.from_bytes(data)
    graph = graph_from_text(request.graph, FakeTensorMode())
    make_constants(graph, request)
    return _computing(request, graph)


def _computing(
    request: BuildRequest,
    graph: torch.fx.GraphModule,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda result: result,
) -> Callable[[FakeContext], None]:
    def compute(context: FakeContext) -> None:
        inputs: list[object] = []
        names = {position: f"input{number}" for number, position in enumerate(request.engine_inputs)}
        sizes: dict[str, int] = {}
        for position, name in names.items():
            layout = request.inputs[position]
            assert isinstance(layout, Layout)
            inputs.append(_at(context.addresses[name], context.shapes[name], layout))
            in_memory = (layout.spec.shape[d] for d in layout.order)
            sizes |= {str(size): known for size, known in zip(in_memory, context.shapes[name], strict=True)}
        for position, each in enumerate(request.inputs):
            if not isinstance(each, Layout):
                inputs.insert(position, sizes[str(each)] if str(each) in sizes else evaluate(each, sizes))
        with torch.no_grad():
            results: Sequence[torch.Tensor] = graph(*inputs)
        for number, (result, layout) in enumerate(zip(results, request.outputs, strict=True)):
            in_memory = [result.shape[d] for d in layout.order]
            _at(context.addresses[f"output{number}"], tuple(in_memory), layout).copy_(change(result))

    return compute


def build_named(request: bytes, going_on: Callable[[float], bool]) -> bytes:
    """A builder that needs no TensorRT: the plan is the name of the requested accumulation precision."""
    wanted = BuildRequest.from_bytes(request)
    inputs = [f"input{i}" for i in range(len(wanted.engine_inputs))]
    outputs = [f"output{i}" for i in range(len(wanted.outputs))]
    return SerializedEngine(wanted.accumulation.encode(), tuple(inputs), tuple(outputs), (), "none").to_bytes()


def _at(address: int, shape: tuple[int, ...], layout: Layout) -> torch.Tensor:
    """The tensor at an address, whose dimensions lie there in the layout's order."""
    dtype = layout.spec.torch_dtype
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    tensor = torch.frombuffer(memory, dtype=dtype).reshape(shape)
    return tensor.permute([layout.order.index(d) for d in range(len(layout.order))])
