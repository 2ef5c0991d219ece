"""Running engines: an engine as the runner of an opaque step (`core.program.ExternalCall`), on the caller's stream.

Per call it sets the shapes that changed and the addresses of tensors, and enqueues. It never waits for the device, copies nothing, and
allocates nothing: outputs and working memory are the plan's, so that the engines of a plan share the largest block.

No GPU has run this yet. Tests run it with a context that records what it is told.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.engines.tensorrt.log import Heard
from torch_hybrid_backend.errors import HybridError

MAX_CONTEXTS = 8  # of one engine; each holds some memory of the device
_POLL_S = 0.001
MAX_TOLD = 32  # sets of shapes of one engine: of more, kernels are not kept
SCRATCH_ALIGNMENT = 256  # bytes, of working memory: IExecutionContext.set_device_memory asks for it


def scratch_buffer_bytes(needed: int) -> int:
    """The size of a buffer in which so much working memory can lie, wherever the buffer begins."""
    return needed + SCRATCH_ALIGNMENT if needed else 0


class Context(Protocol):
    """The methods of TensorRT's IExecutionContext that are used."""

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...
    def set_tensor_address(self, name: str, address: int) -> bool: ...
    def set_device_memory(self, address: int, size_bytes: int) -> object: ...
    def execute_async_v3(self, stream: int) -> bool: ...


class LoadedEngine(Protocol):
    """An engine on its device. `scratch_bytes`: the working memory that a call of any of its shapes needs."""

    @property
    def scratch_bytes(self) -> int: ...

    def heard(self) -> contextlib.AbstractContextManager[Heard]:
        """Inside, what TensorRT says in this thread goes to our log, and is told."""
        ...

    def context(self) -> Context:
        """A new context that is given its working memory in each call."""
        ...

    def can_be_captured(self, context: Context, stream: int) -> bool:
        """True if a call may be captured into a CUDA graph, with the shapes that are set."""
        ...

    def take_kernels(self, kernels: bytes) -> bool:
        """Use what `compiled_kernels` gave in another process, in contexts made from now on; false where it is not taken."""
        ...

    def compiled_kernels(self) -> bytes:
        """The kernels that its calls compiled so far; nothing where calls compile none."""
        ...


class Stream(Protocol):
    """The methods of torch.cuda.Stream that are used."""

    @property
    def cuda_stream(self) -> int: ...

    def wait_stream(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Streams(Protocol):
    """The streams of a device."""

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Inside, the device is this thread's current one: TensorRT makes, runs and destroys contexts on that, whatever the stream's is."""
        ...

    def current(self) -> Stream: ...

    def side(self) -> Stream:
        """A stream to use in place of the default one, on which TensorRT would wait for the whole device."""
        ...

    @property
    def capturing(self) -> bool:
        """True if the current one is being captured into a CUDA graph."""
        ...


class CudaStreams:
    """Those of a GPU, of PyTorch's."""

    def __init__(self, device: Device) -> None:
        self._device = torch.device(device.type, device.index)
        self._side: Stream | None = None

    def entered(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self._device)

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def side(self) -> Stream:
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._side

    @property
    def capturing(self) -> bool:
        with self.entered():  # it asks about the current device's stream
            return torch.cuda.is_current_stream_capturing()


@dataclass(slots=True)
class _Lent:
    """A context of one thread and one stream, and the shapes that are set in it."""

    context: Context
    stream: Stream
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    in_use: bool = False


class EngineRunner:
    """An engine as a runner: `inputs` and `outputs` are its tensors by name, with the order of their dimensions in memory; the tensors of a
    call are these, then one of working memory where the engine needs any.

    Threads may call it at once: each has a context of its own for each stream. At most `max_contexts` are kept; the one unused longest goes
    when its stream has done its work. `compiled` is called after the first run of each set of shapes, in which the engine may have compiled
    kernels.
    """

    native = None  # it is called from Python

    def __init__(
        self,
        engine: LoadedEngine,
        inputs: Sequence[tuple[str, tuple[int, ...]]],
        outputs: Sequence[tuple[str, tuple[int, ...]]],
        streams: Streams,
        *,
        max_contexts: int = MAX_CONTEXTS,
        thread: Callable[[], int] = threading.get_ident,
        compiled: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._streams = streams
        self._max_contexts = max_contexts
        self._thread = thread
        self._compiled = compiled
        self._told: set[tuple[tuple[int, ...], ...]] = set()  # shapes after whose first run `compiled` was called
        self._lock = threading.Lock()
        self._contexts: OrderedDict[tuple[int, int], _Lent] = OrderedDict()
        self._is_closed = False

    @property
    def scratch_bytes(self) -> int:
        """The working memory that a call needs."""
        return self._engine.scratch_bytes

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueue the engine's work. Raises HybridError where TensorRT refuses something, or a CUDA graph is captured that cannot hold it."""
        if not self.ran(tensors):
            raise HybridError("a TensorRT engine was called after it was closed")

    def close(self) -> None:
        """Let go of its contexts when the calls under way have done their work. It waits for them, and runs no others."""
        with self._streams.entered():
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            left = list(self._contexts.values())
        for lent in left:
            while lent.in_use:  # a call is only enqueued: microseconds
                time.sleep(_POLL_S)
            lent.stream.synchronize()
        with self._lock:
            self._contexts.clear()

    def ran(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Run the engine as a call does. Returns False, and does not run, where the engine was closed."""
        with self._streams.entered(), self._engine.heard() as heard:
            return self._ran(tensors, heard)

    def _ran(self, tensors: Sequence[torch.Tensor], heard: Heard) -> bool:
        current = self._streams.current()
        stream = current if current.cuda_stream else self._streams.side()
        lent = self._lend(stream)
        if lent is None:
            return False
        try:
            has_new_shapes = self._prepare(lent, tensors)
            if self._streams.capturing and not self._engine.can_be_captured(lent.context, stream.cuda_stream):
                raise HybridError("a TensorRT engine cannot be captured into a CUDA graph with these shapes")
            if stream is not current:
                stream.wait_stream(current)
            if not lent.context.execute_async_v3(stream.cuda_stream):
                raise HybridError(f"TensorRT could not run an engine: {heard.why}")
            if stream is not current:
                current.wait_stream(stream)
            if has_new_shapes:
                self._tell(tuple(lent.shapes.values()))
        finally:
            lent.in_use = False
        return True

    def _tell(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        with self._lock:
            if shapes in self._told or len(self._told) >= MAX_TOLD:
                return
            self._told.add(shapes)
            self._compiled()

    def _prepare(self, lent: _Lent, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell the context of a call's tensors. Returns whether a shape changed."""
        context, changed = lent.context, False
        for (name, order), tensor in zip(self._inputs, tensors, strict=False):
            shape = tuple(tensor.shape[d] for d in order)
            if lent.shapes.get(name) != shape:
                lent.shapes.pop(name, None)
                if not context.set_input_shape(name, shape):
                    raise HybridError(f"the TensorRT engine was not built for {name} of shape {shape}")
                lent.shapes[name], changed = shape, True
            _address(context, name, tensor)
        rest = tensors[len(self._inputs) :]
        for (name, _), tensor in zip(self._outputs, rest, strict=False):
            _address(context, name, tensor)
        for scratch in rest[len(self._outputs) :] if self._engine.scratch_bytes else ():
            address = -(-scratch.data_ptr() // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
            context.set_device_memory(address, self._engine.scratch_bytes)
        return changed

    def _lend(self, stream: Stream) -> _Lent | None:
        key = (self._thread(), stream.cuda_stream)
        with self._lock:
            if self._is_closed:
                return None
            lent = self._contexts.get(key)
            if lent is None:
                self._make_room()
                lent = self._contexts[key] = _Lent(self._engine.context(), stream)
            self._contexts.move_to_end(key)
            lent.in_use = True
            return lent

    def _make_room(self) -> None:
        """Let go of the contexts unused longest. Their work must have ended: one that is destroyed takes memory with it."""
        while len(self._contexts) >= self._max_contexts:
            idle = [(key, lent) for key, lent in self._contexts.items() if not lent.in_use]
            if not idle:
                return  # more threads than contexts to keep: each needs one
            done = next((item for item in idle if item[1].stream.query()), None)
            key, lent = done or idle[0]
            if done is None:
                lent.stream.synchronize()  # of more streams than contexts are kept: the one place that waits
            del self._contexts[key]


def _address(context: Context, name: str, tensor: torch.Tensor) -> None:
    if not context.set_tensor_address(name, tensor.data_ptr()):
        raise HybridError(f"TensorRT does not take the address of {name}")
