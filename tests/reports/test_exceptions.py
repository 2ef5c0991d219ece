"""An error that a program raises in the midst of our work, to limit the time of a job, say, is raised to the program.

The classes of such errors are the program's own (SoftTimeLimitExceeded of Celery, JobTimeoutException of RQ) or TimeoutError. They come at any
moment: while kernels are compiled, results compared, regions or whole calls timed, and in calls of a plan.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend import backend
from torch_hybrid_backend.config import Config

PACKAGE = str(Path(torch_hybrid_backend.__file__).parent)


class TimeUp(Exception):
    """A time limit of the program's."""


class TimeUpAtRunTime(RuntimeError):
    """A time limit that is a RuntimeError too, as those of PyTorch's operators."""


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Exception], None]]:
    """`raising(error)`: from now on the handler of SIGALRM raises `error`."""
    before = signal.getsignal(signal.SIGALRM)

    def limit(error: Exception) -> None:
        def handler(signum: int, frame: FrameType | None) -> None:
            raise error

        signal.signal(signal.SIGALRM, handler)

    yield limit
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 8)).eval()


def _compiled(model: nn.Module | Callable[..., Any], x: torch.Tensor) -> Callable[..., Any]:
    """The model compiled as for Dynamo, without Dynamo's own work, in calls too: its guards, which run before each call of a compiled function
    whatever the backend is, lose what a signal's handler raises within them (PyErr_Clear), and compile anew."""
    graph = torch.fx.symbolic_trace(model)
    (output,) = graph.graph.find_nodes(op="output")
    output.args = ((output.args[0],),)  # a tuple, as Dynamo's graphs return
    graph.recompile()
    return backend.compile_graph(graph, [x], Config.from_env(os.environ))


def _raised_by(call: Callable[[], object], kind: type[Exception], seconds: float = 0.0) -> Exception | None:
    """The error that `call` raises, called again for so many seconds; None where that is nothing."""
    until = time.monotonic() + seconds
    try:
        call()
        while time.monotonic() < until:
            call()
    except kind as error:
        return error
    return None


@pytest.mark.fault(
    "a signal's handler raises, at any moment of a first call: a time limit of Celery or RQ",
    "the error itself; the next call is right",
)
@pytest.mark.parametrize("kind", [TimeUp, TimeoutError, TimeUpAtRunTime])
def test_a_time_limit_at_any_moment_of_a_first_call(
    kind: type[Exception],
    raising: Callable[[Exception], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The handler's own error comes out wherever it strikes, at lines spread over compilation, comparison and timing. Nothing is warned of, and
    the next call is right."""
    monkeypatch.setenv("HYBRID_PLACEMENT", "measure")
    monkeypatch.setenv("HYBRID_MEASURE_BUDGET_S", "0.001")
    model, x = _model(), torch.randn(3, 24)
    expected = model(x)
    error = kind()
    raising(error)
    lines = 0
    line = -1  # at which it strikes

    def count(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        lines += event == "line"
        if lines == line:
            lines += 1
            signal.raise_signal(signal.SIGALRM)
        return count

    def first_call() -> None:
        nonlocal lines
        lines = 0
        outer = sys.gettrace()
        sys.settrace(count)
        try:
            _compiled(model, x)(x)
        finally:
            sys.settrace(outer)

    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        first_call()  # kernels are compiled
        first_call()
        struck: list[Exception | None] = []
        for line in range(lines // 48, lines, lines // 24):  # noqa: B007 (`count` reads it)
            struck.append(_raised_by(first_call, kind))
        # Timing takes another number of rounds each time: the last may be beyond the end.
        assert set(struck[:-8]) == {error}
        assert set(struck) <= {error, None}
        (answer,) = _compiled(model, x)(x)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
    assert not caplog.records


@pytest.mark.fault(
    "a signal's handler raises while `torch.compile` compiles or makes a first call",
    "the error itself, not Dynamo's BackendCompilerFailed; the next call is right",
)
def test_a_time_limit_through_dynamo(raising: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo takes what a backend raises for a fault of the backend: a time limit goes through it as it is."""
    model, x = _model(), torch.randn(3, 24)
    expected = model(x)
    error = TimeUp("too late")
    raising(error)
    original = backend.compile_graph

    def late(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        signal.raise_signal(signal.SIGALRM)
        return result

    compiled = torch.compile(model, backend="hybrid")
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(backend, "compile_graph", late)
            assert _raised_by(lambda: compiled(x), TimeUp) is error
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.fault(
    "a signal's handler raises in a call of a plan that has operators in eager",
    "the error itself; later calls are right",
)
@pytest.mark.parametrize("kind", [TimeUp, TimeUpAtRunTime])
def test_a_time_limit_in_later_calls(
    kind: type[Exception], raising: Callable[[Exception], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The plan calls back to Python for what eager runs. As kernels take their time, most handlers run there, before the first line of what is
    called: nothing of the error is lost on its way through C++."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.sort(x.sin() @ x)[0].cos() @ x
        return x

    x = torch.randn(96, 96)
    compiled = _compiled(function, x)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        for _ in range(3):
            expected = compiled(x)
        for microseconds in range(200, 1400, 20):
            error = kind("too late")
            raising(error)
            signal.setitimer(signal.ITIMER_REAL, microseconds * 1e-6)
            assert _raised_by(lambda: compiled(x), kind, 10.0) is error
        torch.testing.assert_close(compiled(x), expected)
    assert not caplog.records


@pytest.mark.fault(
    "another thread raises an error in this one (PyThreadState_SetAsyncExc), as RQ and stopit limit time without signals",
    "the error itself; the next call is right",
)
def test_a_time_limit_of_another_thread(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A time limit of another thread is raised in the midst of what is timed, and comes out."""
    monkeypatch.setenv("HYBRID_PLACEMENT", "measure")
    model, x = _model(), torch.randn(3, 24)
    expected = model(x)
    here = threading.get_ident()

    def send() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(here), ctypes.py_object(TimeUp))

    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        _compiled(model, x)(x)  # kernels are compiled
        for milliseconds in range(5, 200, 20):
            compiled = _compiled(model, x)

            def limited(compiled: Callable[..., Any] = compiled, seconds: float = milliseconds / 1e3) -> None:
                threading.Timer(seconds, send).start()
                compiled(x)
                time.sleep(seconds)
                while True:  # the call was done before
                    time.sleep(0)

            assert isinstance(_raised_by(limited, TimeUp), TimeUp)
            (answer,) = compiled(x)
            torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
    assert not caplog.records


def test_what_an_engine_raises_is_the_engines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the same class that an engine's own code raises costs the engine its region, and is warned of."""
    from torch_hybrid_backend.codegen.engine import KernelRegion

    def broken(self: KernelRegion, inputs: object) -> object:
        raise TimeUp

    monkeypatch.setattr(KernelRegion, "__call__", broken)
    model, x = _model(), torch.randn(3, 24)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        (answer,) = _compiled(model, x)(x)
    torch.testing.assert_close(answer, model(x))
    (record,) = caplog.records
    assert "TimeUp" in record.message
