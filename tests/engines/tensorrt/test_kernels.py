"""Kernels that TensorRT-RTX compiles in calls are kept under the engine's key. Calls that compile nothing cost nothing more."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.tensorrt.contexts_for_tests import FakeEngine, FakeStream, FakeStreams, computing
from tests.engines.tensorrt.regions_for_tests import engine, region
from torch_hybrid_backend.engines.tensorrt.kernels import KIND, KeptKernels
from torch_hybrid_backend.engines.tensorrt.runtime import MAX_SHAPES, EngineRunner
from torch_hybrid_backend.storage.store import Store


def run_of(made: FakeEngine, kept: KeptKernels) -> EngineRunner:
    """A runner that keeps what the engine compiled, with an engine that compiles one kernel for each set of shapes."""
    seen: list[tuple[int, ...]] = []

    def compute(context: object) -> None:
        shape = context.shapes["input0"]  # type: ignore[attr-defined]
        if shape not in seen:
            seen.append(shape)
            made.kernels += f"{shape};".encode()

    made.compute = compute
    kept.give(made)
    tensors = [("input0", (0, 1))], [("output0", (0, 1))]
    return EngineRunner(made, *tensors, FakeStreams(FakeStream(7)), compiled=lambda: kept.keep(made))


def test_what_the_first_run_of_shapes_compiled_is_kept(tmp_path: Path) -> None:
    """Calls with known shapes read and write no kernels. Another process starts with the kept kernels."""
    store = Store(tmp_path)
    made = FakeEngine()
    asked: list[int] = []
    made.compiled_kernels = lambda: asked.append(1) or made.kernels  # type: ignore[method-assign,func-returns-value]
    run = run_of(made, KeptKernels(store, "engine"))
    for rows in (2, 2, 4, 2, 4):
        run([torch.ones(rows, 3), torch.empty(rows, 3)])
    assert store.get(KIND, "engine") == b"(2, 3);(4, 3);"
    assert len(asked) == 2
    later = FakeEngine()
    KeptKernels(store, "engine").give(later)
    assert later.kernels == b"(2, 3);(4, 3);"
    other = FakeEngine()
    KeptKernels(store, "another").give(other)
    assert other.kernels == b""


def test_of_many_shapes_not_all_are_kept(tmp_path: Path) -> None:
    """The number of writes is bounded, whatever shapes a program uses."""
    made, store = FakeEngine(), Store(tmp_path)
    run = run_of(made, KeptKernels(store, "engine"))
    for rows in range(1, MAX_SHAPES + 10):
        run([torch.ones(rows, 3), torch.empty(rows, 3)])
    kept = store.get(KIND, "engine") or b""
    assert kept.count(b";") == MAX_SHAPES


def test_corrupt_and_foreign_kernels_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine starts without kernels that the store finds corrupt or TensorRT rejects, and its own replace them."""
    store = Store(tmp_path)
    path = store.put(KIND, "engine", b"whole")
    path.write_bytes(b"who")
    made = FakeEngine()
    KeptKernels(store, "engine").give(made)
    assert made.kernels == b""
    store.put(KIND, "engine", b"of another release")
    made.takes_kernels = False
    run = run_of(made, KeptKernels(store, "engine"))
    assert store.get(KIND, "engine") is None
    run([torch.ones(2, 3), torch.empty(2, 3)])
    assert store.get(KIND, "engine") == b"(2, 3);"
    # A disk that takes nothing costs the next process its time, not the call.
    (tmp_path / KIND / "full").parent.mkdir(exist_ok=True)
    (tmp_path / KIND / "full").write_text("a file where a folder is to be")
    with caplog.at_level(logging.WARNING):
        run_of(FakeEngine(), KeptKernels(store, "full"))([torch.ones(2, 3), torch.empty(2, 3)])
    assert "are not kept" in caplog.text


def test_engines_without_kernels_of_their_own_keep_nothing(tmp_path: Path) -> None:
    """TensorRT's engines contain machine code from the beginning."""
    store = Store(tmp_path)
    KeptKernels(store, "engine").keep(FakeEngine())
    assert store.get(KIND, "engine") is None


class _EnteredStreams(FakeStreams):
    """Streams that know if their device is current."""

    is_inside = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.is_inside = True
        yield
        self.is_inside = False


@pytest.mark.tensorrt
def test_a_regions_kernels_lie_beside_its_engine(tmp_path: Path) -> None:
    """Another process loads the kernels under the same key before its first call, with their device as the current one."""
    from tests.engines.tensorrt.test_engine import compiled_by

    x = torch.ones(4, 4)
    made = region(lambda x: x.relu() + 1, x)
    engines: list[FakeEngine] = []
    streams = _EnteredStreams(FakeStream(7))
    taken: list[bool] = []  # whether the device was the current one

    class Loaded(FakeEngine):
        def take_kernels(self, kernels: bytes) -> bool:
            taken.append(streams.is_inside)
            return super().take_kernels(kernels)

    def load(plan: bytes, device: object) -> FakeEngine:
        engines.append(Loaded(compute=computing(made)))
        return engines[-1]

    for _ in range(2):
        given = engine(tmp_path, load=load, streams=lambda device: streams)
        (compiled,) = compiled_by(given, made)
        assert not isinstance(compiled, Exception), compiled
        engines[0].kernels = b"compiled in the call"
        compiled([x])
    store = Store(tmp_path)
    assert store.keys(KIND) == store.keys("tensorrt")
    assert engines[1].kernels == b"compiled in the call"
    assert taken == [True]


@pytest.mark.tensorrt
def test_tensorrt_has_what_is_used_of_it() -> None:
    """There is no GPU to make contexts on: at least the names exist in the installed release."""
    from torch_hybrid_backend.engines.tensorrt.loaded import trt

    assert hasattr(trt.ExecutionContextAllocationStrategy, "USER_MANAGED")
    if hasattr(trt, "IRuntimeCache"):
        assert {"serialize", "deserialize"} <= set(dir(trt.IRuntimeCache))
        names = {"create_runtime_cache", "set_runtime_cache", "set_execution_context_allocation_strategy"}
        assert names <= set(dir(trt.IRuntimeConfig))
        assert hasattr(trt.ICudaEngine, "create_runtime_config")
        assert hasattr(trt.IExecutionContext, "is_stream_capturable")
    else:
        assert "rtx" not in trt.__name__
