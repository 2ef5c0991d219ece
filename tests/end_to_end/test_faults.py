"""Faults that are made inside this process; test_faults_*.py have those of processes of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from tests.end_to_end import models
from tests.test_errors import accelerator_error
from torch_hybrid_backend import backend
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import CompiledRegionBase, EngineBase
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.verdict import Supported
from torch_hybrid_backend.driver import hybrid_graph, prepared, session, stages
from torch_hybrid_backend.errors import HybridError

LOGGER = "torch_hybrid_backend"


@pytest.mark.fault(
    "kernel libraries are deleted between compilation and first call",
    "one warning `runtime_error`; falls back to eager",
)
def test_libraries_deleted_between_compilation_and_call(
    tmp_path: Path, settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernel libraries that vanish before the first call: the region goes to eager with one warning that names it."""
    settings.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    made: list[hybrid_graph.HybridGraph] = []
    original = hybrid_graph.HybridGraph.__init__

    def recording(self: hybrid_graph.HybridGraph, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        made.append(self)
        shutil.rmtree(tmp_path / "cache" / "kernels")

    settings.setattr(hybrid_graph.HybridGraph, "__init__", recording)
    model, x = models.perceptron(), models.rows()
    with torch.no_grad(), caplog.at_level(logging.WARNING, LOGGER):
        torch.testing.assert_close(torch.compile(model, backend="hybrid")(x), model(x), rtol=1e-4, atol=1e-5)
    assert made
    assert made[0].plan is not None
    assert {r.engine for r in made[0].plan.regions} == {"eager"}
    (record,) = caplog.records
    assert "runtime_error" in record.message
    assert made[0].plan.regions[0].name in record.message


class _WrongEngine(EngineBase):
    """An engine that returns wrong numbers, or raises where `fault` says so; "later call": while `meeting` is there to wait for others."""

    name = "wrong"

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.meeting: threading.Barrier | None = None

    def supports(self, node: torch.fx.Node) -> object:
        if self.fault == "supports":
            raise ValueError("cannot say")
        return Supported()

    def compile(self, regions: list, deadline: object) -> list:
        if self.fault == "compile":
            raise ValueError("cannot compile")
        engine, fault = self, self.fault

        class Region(CompiledRegionBase):
            def __init__(self, graph_module: torch.fx.GraphModule) -> None:
                self.graph_module = graph_module

            def __call__(self, inputs: list) -> list:
                if fault == "first call":
                    raise ValueError("cannot run")
                if fault == "later call" and engine.meeting is not None:
                    with contextlib.suppress(threading.BrokenBarrierError):
                        engine.meeting.wait(20)
                        engine.meeting.abort()  # they meet once
                    raise ValueError("cannot run any more")
                if fault == "device error" and engine.meeting is not None:
                    raise accelerator_error("CUDA error: an illegal memory access was encountered", 700)
                outputs = list(self.graph_module(*inputs))
                return [o + 1 for o in outputs] if fault == "wrong numbers" else outputs

        return [Region(region.graph_module) for region in regions]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("supports", ""),
        ("compile", "compile_failed"),
        ("first call", "runtime_error"),
        ("wrong numbers", "accuracy"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_faulty_engine(
    fault: str, code: str, strict: bool, settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that fails in any of its phases is replaced by eager with one warning; under strict the fault is raised."""
    settings.setattr(
        session, "ENGINES", (("wrong", lambda config, services: _WrongEngine(fault)), *session.ENGINES[-1:])
    )
    session._sessions.clear()
    settings.setenv("HYBRID_STRICT", str(int(strict)))
    model, x = models.perceptron(), models.rows()
    fast = torch.compile(model, backend="hybrid")
    try:
        with torch.no_grad(), caplog.at_level(logging.WARNING, LOGGER):
            if strict:
                with pytest.raises((HybridError, torch._dynamo.exc.BackendCompilerFailed)):
                    fast(x)
                return
            for _ in range(2):
                torch.testing.assert_close(fast(x), model(x))
        assert len(caplog.records) == 1
        assert code in caplog.records[0].message
    finally:
        session._sessions.clear()


def test_region_that_fails_in_two_threads_at_once(
    settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A region that fails in two threads goes to eager, with one warning; the thread that comes second calls the plan that the first one has
    made."""
    engine = _WrongEngine("later call")
    settings.setattr(session, "ENGINES", (("wrong", lambda config, services: engine), *session.ENGINES[-1:]))
    session._sessions.clear()
    model, x = models.perceptron(), models.rows()
    fast = torch.compile(model, backend="hybrid")
    answers: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            answers.append(fast(x))

    try:
        call()
        engine.meeting = threading.Barrier(2)
        threads = [threading.Thread(target=call) for _ in range(2)]
        with caplog.at_level(logging.WARNING, LOGGER):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        session._sessions.clear()
    (record,) = caplog.records
    assert "runtime_error" in record.message
    assert len(answers) == 3
    for answer in answers:
        torch.testing.assert_close(answer, model(x))


def test_a_device_that_cannot_be_used_any_more(settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is recovered: the caller gets the error as PyTorch raised it, in every call, and the region stays with its engine."""
    engine = _WrongEngine("device error")
    settings.setattr(session, "ENGINES", (("wrong", lambda config, services: engine), *session.ENGINES[-1:]))
    session._sessions.clear()
    model, x = models.perceptron(), models.rows()
    fast = torch.compile(model, backend="hybrid")
    try:
        with torch.no_grad(), caplog.at_level(logging.WARNING, LOGGER):
            fast(x)
            engine.meeting = threading.Barrier(1)
            for _ in range(2):
                with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
                    fast(x)
            engine.meeting = None
            torch.testing.assert_close(fast(x), model(x))
    finally:
        session._sessions.clear()
    assert not caplog.records


@pytest.mark.fault("Ctrl-C (SIGINT) at any line of placement", "KeyboardInterrupt; the next call is right")
@pytest.mark.full
def test_interrupted_at_every_line(settings: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt before each line, in turn, of what a first call runs in the wiring; the next call is right, and fast."""
    model = nn.Sequential(nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    x = torch.randn(3, 24)
    expected = model(x)
    line = 0

    def at_the_line(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal line
        if frame.f_code.co_filename not in (hybrid_graph.__file__, prepared.__file__, stages.__file__):
            return None
        line -= event == "line"
        if event == "line" and line == 0:
            raise KeyboardInterrupt
        return at_the_line

    def interrupted(call: Callable[[], object]) -> bool:
        outer = sys.gettrace()
        sys.settrace(at_the_line)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(outer)
        return False

    with torch.no_grad():
        for at in range(1, 1000):
            graphs: list[Plan] = []
            graph = torch.fx.symbolic_trace(model)
            (output,) = graph.graph.find_nodes(op="output")
            output.args = ((output.args[0],),)  # a tuple, as Dynamo's graphs return
            graph.recompile()
            compiled = backend.compile_graph(graph, [x], Config.from_env(os.environ), graphs.append)
            line = at
            if not interrupted(lambda compiled=compiled: compiled(x)):
                break
            (answer,) = compiled(x)
            torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
            (again,) = compiled(x)
            torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)
            assert [region.engine for region in graphs[-1].regions] == ["tvm"]
    assert 20 < at < 999
