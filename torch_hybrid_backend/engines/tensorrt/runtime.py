"""Runs engines on the caller's stream: an engine is the runner of an opaque step (`core.program.ExternalCall`).

A call sets the shapes that changed and the addresses of tensors, and enqueues the engine. A call never waits for the device, copies nothing and
allocates nothing. Outputs and working memory belong to the plan, whose engines share the largest block.

No GPU has run this yet. Tests use contexts that record their calls.
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
from torch_hybrid_backend.engines.tensorrt.log import LogMessages
from torch_hybrid_backend.errors import HybridError

MAX_CONTEXTS = 8  # of one engine; each holds some memory of the device
_POLL_S = 0.001
MAX_SHAPES = 32  # sets of shapes of one engine whose compiled kernels are kept
SCRATCH_ALIGNMENT = 256  # bytes; required by IExecutionContext.set_device_memory


def scratch_buffer_bytes(needed: int) -> int:
    """Size of a buffer that holds `needed` bytes of aligned working memory, wherever the buffer begins."""
    return needed + SCRATCH_ALIGNMENT if needed else 0


class Context(Protocol):
    """The methods of TensorRT's IExecutionContext that this module calls."""

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...
    def set_tensor_address(self, name: str, address: int) -> bool: ...
    def set_device_memory(self, address: int, size_bytes: int) -> object: ...
    def execute_async_v3(self, stream: int) -> bool: ...


class LoadedEngine(Protocol):
    """An engine on its device. `scratch_bytes`: working memory that suffices for all shapes."""

    @property
    def scratch_bytes(self) -> int: ...

    def collect_log(self) -> contextlib.AbstractContextManager[LogMessages]:
        """Context that collects TensorRT's messages of this thread, and moves them to this package's log."""
        ...

    def context(self) -> Context:
        """A new execution context, which gets its working memory in each call."""
        ...

    def can_be_captured(self, context: Context, stream: int) -> bool:
        """True if a call with the shapes set in `context` may be captured into a CUDA graph."""
        ...

    def take_kernels(self, kernels: bytes) -> bool:
        """Use kernels from another process's `compiled_kernels`, in contexts made from now on. Returns false if TensorRT rejects them."""
        ...

    def compiled_kernels(self) -> bytes:
        """The kernels compiled by calls so far; empty if calls compile none."""
        ...


class Stream(Protocol):
    """The methods of torch.cuda.Stream that this module calls."""

    @property
    def cuda_stream(self) -> int: ...

    def wait_stream(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Streams(Protocol):
    """The streams of a device."""

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Context in which the device is the current one. TensorRT creates, runs and destroys contexts on the current device."""
        ...

    def current(self) -> Stream: ...

    def side(self) -> Stream:
        """A stream to use instead of the default stream, on which TensorRT would wait for the whole device."""
        ...

    @property
    def capturing(self) -> bool:
        """True if the current stream is being captured into a CUDA graph."""
        ...


class CudaStreams:
    """PyTorch's streams of a GPU."""

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
        with self.entered():  # PyTorch's query is about the current device's stream
            return torch.cuda.is_current_stream_capturing()


@dataclass(slots=True)
class _Lent:
    """A context of one thread and one stream. `shapes`: those set in the context."""

    context: Context
    stream: Stream
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    in_use: bool = False


class EngineRunner:
    """An engine as a runner. `inputs` and `outputs`: names of the engine's tensors, each with its dimensions in memory order. The tensors of a
    call are inputs, outputs, and working memory if the engine needs any.

    Threads may call a runner at once: each has its own context for each stream. At most `max_contexts` are kept. The least recently used
    context is dropped once its stream has finished. `compiled` is called after the first run of each set of shapes, as that run may have
    compiled kernels.
    """

    native = None  # called from Python

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
        self._known_shapes: set[tuple[tuple[int, ...], ...]] = set()  # `compiled` was called for these
        self._lock = threading.Lock()
        self._contexts: OrderedDict[tuple[int, int], _Lent] = OrderedDict()
        self._is_closed = False

    @property
    def scratch_bytes(self) -> int:
        """Working memory that a call needs."""
        return self._engine.scratch_bytes

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueue the engine. Raises HybridError if TensorRT reports an error, or if a CUDA graph is captured that cannot hold the call."""
        if not self.try_run(tensors):
            raise HybridError("a TensorRT engine was called after it was closed")

    def close(self) -> None:
        """Wait for the calls that run, and release the contexts. Later calls raise HybridError."""
        with self._streams.entered():
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            left = list(self._contexts.values())
        for lent in left:
            while lent.in_use:  # enqueueing takes microseconds
                time.sleep(_POLL_S)
            lent.stream.synchronize()
        with self._lock:
            self._contexts.clear()

    def try_run(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Enqueue the engine as a call does. Returns false, without running, if the engine was closed."""
        with self._streams.entered(), self._engine.collect_log() as messages:
            return self._try_run(tensors, messages)

    def _try_run(self, tensors: Sequence[torch.Tensor], messages: LogMessages) -> bool:
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
                raise HybridError(f"TensorRT could not run an engine: {messages.why}")
            if stream is not current:
                current.wait_stream(stream)
            if has_new_shapes:
                self._report_shapes(tuple(lent.shapes.values()))
        finally:
            lent.in_use = False
        return True

    def _report_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        with self._lock:
            if shapes in self._known_shapes or len(self._known_shapes) >= MAX_SHAPES:
                return
            self._known_shapes.add(shapes)
            self._compiled()

    def _prepare(self, lent: _Lent, tensors: Sequence[torch.Tensor]) -> bool:
        """Set a call's shapes and addresses in the context. Returns true if a shape changed."""
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
        """Drop the least recently used contexts. Their work must have ended, as a destroyed context frees memory."""
        while len(self._contexts) >= self._max_contexts:
            idle = [(key, lent) for key, lent in self._contexts.items() if not lent.in_use]
            if not idle:
                return  # each of more than `max_contexts` threads needs a context
            done = next((item for item in idle if item[1].stream.query()), None)
            key, lent = done or idle[0]
            if done is None:
                lent.stream.synchronize()  # more streams than `max_contexts`: the only wait in a call
            del self._contexts[key]


def _address(context: Context, name: str, tensor: torch.Tensor) -> None:
    if not context.set_tensor_address(name, tensor.data_ptr()):
        raise HybridError(f"TensorRT rejects the address of {name}")
