"""Engines in calls: what contexts are told, on which streams, and the number of contexts. There is no GPU: contexts and streams record."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.engines.tensorrt.contexts_for_tests import FakeEngine, FakeStream, FakeStreams
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.engines.tensorrt.runtime import (
    SCRATCH_ALIGNMENT,
    CudaStreams,
    EngineRunner,
    scratch_buffer_bytes,
)
from torch_hybrid_backend.errors import HybridError

IN, OUT = [("input0", (0, 1))], [("output0", (0, 1))]


def runner(engine: FakeEngine, streams: FakeStreams, **options: object) -> EngineRunner:
    return EngineRunner(engine, IN, OUT, streams, **options)  # type: ignore[arg-type]


def test_a_call_sets_shapes_and_addresses_and_enqueues_on_the_callers_stream() -> None:
    """A call makes these calls in this order on that stream: no wait, no event, no copy."""
    engine, streams = FakeEngine(scratch_bytes=100), FakeStreams(FakeStream(7))
    run = runner(engine, streams)
    x, y, scratch = torch.ones(2, 3), torch.empty(2, 3), torch.empty(scratch_buffer_bytes(100), dtype=torch.uint8)
    run([x, y, scratch])
    (context,) = engine.contexts
    aligned = -(-scratch.data_ptr() // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    assert context.calls == [
        ("set_input_shape", "input0", (2, 3)),
        ("set_tensor_address", "input0", x.data_ptr()),
        ("set_tensor_address", "output0", y.data_ptr()),
        ("set_device_memory", aligned, 100),
        ("execute_async_v3", 7),
    ]
    assert aligned + 100 <= scratch.data_ptr() + scratch.nbytes
    assert not streams.now.calls


def test_shapes_are_set_where_they_changed_and_addresses_always() -> None:
    """For each shape that is set, TensorRT computes all other shapes."""
    engine, streams = FakeEngine(), FakeStreams(FakeStream(7))
    run = runner(engine, streams)
    for rows in (2, 2, 4, 2):
        run([torch.ones(rows, 3), torch.empty(rows, 3)])
    (context,) = engine.contexts
    assert [call[2][0] for call in context.calls if call[0] == "set_input_shape"] == [2, 4, 2]
    assert sum(call[0] == "set_tensor_address" for call in context.calls) == 8


def test_dimensions_are_told_as_they_lie_in_memory() -> None:
    """A tensor of another memory order is passed by its address, without a contiguous copy."""
    engine, streams = FakeEngine(), FakeStreams(FakeStream(7))
    x = torch.ones(2, 16, 8, 4).to(memory_format=torch.channels_last)
    run = EngineRunner(engine, [("input0", (0, 2, 3, 1))], OUT, streams)
    run([x, torch.empty(2, 3)])
    assert engine.contexts[0].calls[:2] == [
        ("set_input_shape", "input0", (2, 8, 4, 16)),
        ("set_tensor_address", "input0", x.data_ptr()),
    ]


def test_the_default_stream_is_left_to_others() -> None:
    """On the default stream TensorRT would wait for the whole device. So the engine runs on a side stream, between two events."""
    log: list[tuple[object, ...]] = []
    default, side = FakeStream(0, log), FakeStream(5, log)
    engine = FakeEngine(log=log)
    runner(engine, FakeStreams(default, side))([torch.ones(2, 3), torch.empty(2, 3)])
    assert [call for call in log if call[0] in ("wait_stream", "execute_async_v3")] == [
        ("wait_stream", 5, 0),
        ("execute_async_v3", 5),
        ("wait_stream", 0, 5),
    ]


def test_every_thread_and_stream_has_a_context_of_its_own() -> None:
    """Threads never share a context, nor do two streams of a thread."""
    engine = FakeEngine()
    streams = FakeStreams(FakeStream(7))
    run = runner(engine, streams)
    inside = threading.Barrier(4)
    engine.during = lambda: inside.wait(10)

    def work() -> None:
        run([torch.ones(2, 3), torch.empty(2, 3)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(engine.contexts) == 4
    assert all(sum(call[0] == "execute_async_v3" for call in context.calls) == 1 for context in engine.contexts)
    engine.during = lambda: None
    run([torch.ones(2, 3), torch.empty(2, 3)])
    streams.now = FakeStream(8)
    run([torch.ones(2, 3), torch.empty(2, 3)])
    assert len({id(context) for context in engine.contexts}) == 6


def test_contexts_are_bounded() -> None:
    """The least recently used context whose stream has finished is dropped. Only if none has, one is waited for."""
    engine = FakeEngine()
    log: list[tuple[object, ...]] = []
    made = [FakeStream(number, log, is_done=number != 1) for number in range(1, 5)]
    streams = FakeStreams(made[0])
    run = runner(engine, streams, max_contexts=2)
    tensors = [torch.ones(2, 3), torch.empty(2, 3)]
    for stream in made[:3]:
        streams.now = stream
        run(tensors)
    assert len(run._contexts) == 2
    streams.now = made[0]
    run(tensors)  # its context stayed: the work on it was not done
    assert len(engine.contexts) == 3
    assert not [call for call in log if call[0] == "synchronize"]
    for stream in made:
        stream.is_done = False
    streams.now = made[3]
    run(tensors)
    assert [call for call in log if call[0] == "synchronize"] == [("synchronize", 3)]


def test_a_runner_that_is_closed_lets_its_calls_end() -> None:
    """A destroyed context frees memory, so its work must be done. Later calls raise an error and start nothing."""
    engine = FakeEngine()
    log: list[tuple[object, ...]] = []
    run = runner(engine, FakeStreams(FakeStream(7, log)))
    inside, may_end = threading.Event(), threading.Event()

    def during() -> None:
        inside.set()
        assert may_end.wait(10)
        log.append(("enqueued",))

    engine.during = during
    tensors = [torch.ones(2, 3), torch.empty(2, 3)]
    calling = threading.Thread(target=run, args=(tensors,))
    calling.start()
    assert inside.wait(10)
    closing = threading.Thread(target=run.close)
    closing.start()
    while not run._is_closed:
        pass
    assert not run.try_run(tensors)  # it does not wait for those who close it
    assert not log
    may_end.set()
    for thread in (calling, closing):
        thread.join(10)
    assert log == [("enqueued",), ("synchronize", 7)]
    assert len(engine.contexts) == 1
    assert not run._contexts
    with pytest.raises(HybridError, match="closed"):
        run(tensors)


def test_what_tensorrt_refuses_is_an_error_of_ours() -> None:
    """A shape outside the range, an address, a run that fails: each has its error, and the next call works."""
    tensors = [torch.ones(2, 3), torch.empty(2, 3)]
    engine = FakeEngine()
    run = runner(engine, FakeStreams(FakeStream(7)))
    engine.messages.errors.append("a kernel is missing")
    for method, says in (
        ("set_input_shape", "was not built for input0 of shape"),
        ("set_tensor_address", "the address of input0"),
        ("execute_async_v3", "could not run an engine: a kernel is missing"),
    ):
        engine.refuses = method
        with pytest.raises(HybridError, match=says):
            run([torch.ones(3 + len(engine.contexts[0].calls) if engine.contexts else 3, 3), torch.empty(2, 3)])
        engine.refuses = ""
        run(tensors)
        assert engine.contexts[0].calls[-1] == ("execute_async_v3", 7)
    assert len(engine.contexts) == 1


def test_captures_that_cannot_hold_it_are_refused() -> None:
    """TensorRT-RTX compiles in calls, which no CUDA graph can hold: an error says so, and nothing is enqueued."""
    engine, streams = FakeEngine(), FakeStreams(FakeStream(7))
    run = runner(engine, streams)
    tensors = [torch.ones(2, 3), torch.empty(2, 3)]
    streams.capturing = True
    run(tensors)
    engine.is_capturable = False
    with pytest.raises(HybridError, match="cannot be captured into a CUDA graph"):
        run(tensors)
    streams.capturing = False
    run(tensors)
    assert sum(call[0] == "execute_async_v3" for call in engine.contexts[0].calls) == 2


class OnDevice(FakeStreams):
    """Streams that record if their device is current."""

    def __init__(self, log: list[tuple[object, ...]]) -> None:
        super().__init__(FakeStream(7, log))
        self._log = log

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self._log.append(("enter",))
        yield
        self._log.append(("leave",))


def test_contexts_live_and_run_on_the_engines_device() -> None:
    """With several GPUs, a context is made, told, run and destroyed while its engine's device is current."""
    log: list[tuple[object, ...]] = []
    engine = FakeEngine(log=log)
    run = runner(engine, OnDevice(log))
    run([torch.ones(2, 3), torch.empty(2, 3)])
    weakref.finalize(engine.contexts.pop(), log.append, ("destroyed",))
    run.close()
    depth = 0
    for step, *_ in log:
        depth += {"enter": 1, "leave": -1}.get(str(step), 0)
        assert depth or step == "leave", log
    assert ("destroyed",) in log
    assert ("execute_async_v3", 7) in log


def test_streams_of_a_gpu_are_that_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's query for a capture, too, is about the current device's stream."""
    now = [0]

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, now[0] = now[0], wanted.index
        yield
        now[0] = before

    fake = SimpleNamespace(
        device=device,
        current_stream=lambda on: f"current of {on}",
        Stream=lambda on: f"new on {on}",
        is_current_stream_capturing=lambda: now[0] == 1,
    )
    monkeypatch.setattr("torch_hybrid_backend.engines.tensorrt.runtime.torch.cuda", fake)
    first, second = CudaStreams(Device("cuda", 0)), CudaStreams(Device("cuda", 1))
    assert (first.capturing, second.capturing) == (False, True)
    assert (second.current(), second.side()) == ("current of cuda:1", "new on cuda:1")
    with second.entered():
        assert now == [1]
    assert now == [0]
