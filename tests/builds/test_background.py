"""Graphs built in the background, by engines that compile on command: calls before, during and after the swap."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.background_for_tests import SlowEngine, compiled_with, eventually
from torch_hybrid_backend.builds.background import InBackground, copies_of, wait_for_builds
from torch_hybrid_backend.partition import whole_call
from torch_hybrid_backend.partition.whole_call import price_call
from torch_hybrid_backend.storage.store import Store

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Start each test with an empty cache, and leave no build to the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()
    assert wait_for_builds(60)
    assert not any(thread.name == "hybrid-build" for thread in threading.enumerate())


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def test_eager_answers_until_the_swap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No call waits for the compiler: eager answers, then the plan's engine. Threads that call during the swap get right results. The caller's
    generator stays as it was, and the caller may change its inputs during the build."""
    engine, model, x = SlowEngine(), _model(), torch.randn(4, 16)
    compiled = compiled_with(engine, model, monkeypatch, tmp_path)
    before = torch.get_rng_state()
    with torch.no_grad():
        expected = model(x)
        given = x.clone()
        for _ in range(3):
            torch.testing.assert_close(compiled(given), expected)
        given.fill_(torch.nan)
        eventually(lambda: engine.compiling)
        assert not wait_for_builds(0.01)
        stop, wrong, calls = threading.Event(), [], []

        def call() -> None:
            with torch.no_grad():
                while not stop.is_set():
                    if not torch.allclose(compiled(x), expected, atol=1e-6):
                        wrong.append(1)
                    calls.append(1)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(calls) > 10)
        assert engine.threads == set()
        engine.may.release()
        assert wait_for_builds(60)
        assert "hybrid-build" in engine.threads
        done = len(calls)
        eventually(lambda: len(calls) > done + 10)
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        ran = engine.calls
        torch.testing.assert_close(compiled(x), expected)
        assert engine.calls == ran + 1
    assert torch.equal(torch.get_rng_state(), before)


def test_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The forward and the backward graph are swapped separately while an optimizer steps. Every step equals eager's in every mixture."""
    engine = SlowEngine()
    model, twin = _model(), _model()
    twin.load_state_dict(model.state_dict())
    compiled = compiled_with(engine, model, monkeypatch, tmp_path)
    optimizers = [torch.optim.SGD(m.parameters(), 0.001) for m in (model, twin)]

    def step() -> None:
        x = torch.randn(4, 16)
        for run, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            run(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()

    mixtures = []
    step()
    for graphs in (1, 2):  # the forward graph first
        eventually(lambda wanted=graphs: engine.compiling == wanted)
        step()
        mixtures.append(engine.calls)
        engine.may.release()
        if graphs == 1:
            eventually(lambda: engine.compiling == 2)
    assert wait_for_builds(60)
    ran = engine.calls
    step()
    assert engine.calls == ran + 2
    assert mixtures[0] == 0
    assert mixtures[1] >= 2  # the trial, and a step with one of two graphs compiled


def test_what_is_built_in_the_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph with another library's operator, which may have side effects, cannot be tried twice: it is compiled in the call, with one
    warning."""

    @torch.library.custom_op("background_of_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    engine = SlowEngine()
    engine.may.release()
    compiled = compiled_with(engine, lambda x: twice(x.sigmoid()), monkeypatch, tmp_path)
    compiled(torch.randn(8))
    assert wait_for_builds(0)
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "not in the background: it calls background_of_tests.twice.default" in record.getMessage()


def _drawing(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All operators that draw random numbers in graphs on the CPU."""
    kept = nn.functional.dropout(x.sigmoid(), 0.3)
    weights = kept.exp() @ x.t()
    return (
        weights + torch.rand(4, 4) + torch.randn_like(weights),
        torch.bernoulli(x.sigmoid()) + torch.normal(x, 1.0) + x.clone().uniform_(),
        torch.randint(0, 9, (5,)).double() + torch.randperm(5),
        torch.multinomial(x.exp(), 3),
        nn.functional.scaled_dot_product_attention(*(x.reshape(1, 2, 4, 8),) * 3, dropout_p=0.5).tanh(),
    )


def test_random_numbers_are_eagers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph that draws random numbers is built in the background, with a generator of its own. Every call has eager's numbers, and leaves the
    caller's generator as eager does."""
    engine, x = SlowEngine(), torch.randn(4, 16)
    compiled = compiled_with(engine, _drawing, monkeypatch, tmp_path)

    def same_numbers(seed: int) -> None:
        torch.manual_seed(seed)
        expected = _drawing(x)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        for ours, theirs in zip(compiled(x), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert torch.equal(torch.get_rng_state(), after)

    with torch.no_grad():
        same_numbers(0)
        eventually(lambda: engine.compiling)
        same_numbers(1)
        engine.may.release()
        for seed in range(2, 8):
            same_numbers(seed)
        before = torch.get_rng_state()
        assert wait_for_builds(60)
        assert torch.equal(torch.get_rng_state(), before)
        assert "hybrid-build" in engine.threads
        ran = engine.calls
        same_numbers(9)
        assert engine.calls > ran
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_training_with_dropout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both graphs are built in the background while an optimizer steps. Losses and gradients equal eager's with the same seed."""
    engine = SlowEngine()
    engine.may.release(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.4), nn.GELU(), nn.Linear(32, 8))
    twin = deepcopy(model)
    compiled = compiled_with(engine, model, monkeypatch, tmp_path)
    optimizers = [torch.optim.SGD(m.parameters(), 0.001) for m in (model, twin)]
    for seed in range(6):
        x = torch.randn(4, 16)
        losses = []
        for run, optimizer in zip((compiled, twin), optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss = run(x).square().sum()
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
        if seed == 2:
            assert wait_for_builds(60)
            ran = engine.calls
    assert engine.compiling == 2
    assert engine.calls >= ran + 6  # each graph, in each of three steps


def test_control_flow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Branches and loop bodies are built in the background too, each from its first use on. Their random numbers are eager's."""
    from torch._higher_order_ops import while_loop

    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin() + torch.rand_like(x), lambda x: x.cos() * 2, (x,))
        return while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y.tanh() * 2), (torch.tensor(0), y))[1].exp()

    engine = SlowEngine()
    engine.may.release(100)
    compiled = compiled_with(engine, program, monkeypatch, tmp_path)
    up, down = torch.rand(4, 16), -torch.rand(4, 16)

    def same(x: torch.Tensor) -> None:
        torch.manual_seed(5)
        expected = program(x)
        after = torch.get_rng_state()
        torch.manual_seed(5)
        torch.testing.assert_close(compiled(x), expected)
        assert torch.equal(torch.get_rng_state(), after)

    with torch.no_grad():
        same(up)
        assert wait_for_builds(60)
        first = engine.compiling
        assert first >= 4  # the graph, the branch that was taken, the loop's condition and its body
        ran = engine.calls
        same(up)
        assert engine.calls > ran + 4
        same(down)
        assert wait_for_builds(60)
        assert engine.compiling == first + 1
        for x in (down, up, down):
            same(x)
        assert engine.compiling == first + 1
    assert engine.threads == {"hybrid-build", "MainThread"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("background", [True, False])
def test_whole_calls_are_priced_off_the_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, background: bool
) -> None:
    """Dynamo's own graph answers meanwhile. No call times regions or whole calls, at any size, and times measured beside calls are not kept.
    Without a background build, calls do both."""
    engine, model = SlowEngine(), _model()
    options = {"placement": "measure", "measure_budget_s": 0.02, "background": background}
    compiled = compiled_with(engine, model, monkeypatch, tmp_path, **options)
    engine.may.release()
    timed_in: set[str] = set()
    monkeypatch.setattr(
        whole_call, "price_call", lambda *args: timed_in.add(threading.current_thread().name) or price_call(*args)
    )
    inputs = [torch.randn(n, 16) for n in (4, 6, 9, 64, 300)]
    torch._dynamo.mark_dynamic(inputs[0], 0)
    with torch.no_grad():
        for _ in range(2):
            for x in inputs:
                torch.testing.assert_close(compiled(x), model(x))
                assert wait_for_builds(60)
    assert engine.compiling == 1
    assert timed_in == {"hybrid-build" if background else "MainThread"}
    assert ("placements" in {usage.kind for usage in Store(tmp_path).usage()}) is not background


def test_a_dropped_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A build is cancelled when the graph cannot be called any more, even if the compiler never answers. The model is freed."""
    engine, model = SlowEngine(), _model()
    compiled = compiled_with(engine, model, monkeypatch, tmp_path)
    with torch.no_grad():
        compiled(torch.randn(4, 16))
    eventually(lambda: engine.compiling)
    weight = weakref.ref(model[0].weight)
    torch.compiler.reset()
    del compiled, model
    gc.collect()
    assert wait_for_builds(60)
    assert engine.calls == 0
    engine.may.release()  # the thread of a third-party engine is not ended
    gc.collect()
    assert weight() is None


def test_graphs_queue_and_interrupts_are_the_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several graphs are built one after the other. Ctrl-C is raised in the main thread, and the builds go on."""
    engine = SlowEngine()
    functions = [compiled_with(engine, f, monkeypatch, tmp_path) for f in (torch.sin, torch.cos, torch.tanh)]
    x = torch.randn(32)
    for function, eager in zip(functions, (torch.sin, torch.cos, torch.tanh), strict=True):
        torch.testing.assert_close(function(x), eager(x))
    eventually(lambda: engine.compiling == 1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # libraries of other tests leave theirs
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert not wait_for_builds(0.01)
    assert engine.compiling == 1
    engine.may.release(3)
    assert wait_for_builds(60)
    assert engine.compiling == 3


def test_explain_says_what_is_compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`explain` does not wait. It says that eager runs the graph meanwhile; after the build, it shows the plan."""
    engine, model = SlowEngine(), _model()
    compiled_with(engine, model, monkeypatch, tmp_path)
    monkeypatch.setenv("HYBRID_PLACEMENT", "estimate")
    with torch.no_grad():
        explanation = torch_hybrid_backend.explain(model, torch.randn(4, 16), options={"background": True})
    assert (explanation.plans, explanation.compiling) == ((), 1)
    assert str(explanation) == "a graph: eager meanwhile: compiling"
    engine.may.release()
    assert wait_for_builds(60)
    after = explanation.updated()
    assert after.compiling == 0
    assert [region.engine for region in after.plans[0].regions] == ["slow"]
    assert str(after).startswith("Sequential (inference")


def test_with_the_real_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels are compiled in processes and run after the swap, with results near float64's. Parameters stay live."""
    pytest.importorskip("tvm")
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    model, x = _model(), torch.randn(4, 16)
    options = {"background": True, "placement": "estimate"}
    with torch.no_grad():
        explanation = torch_hybrid_backend.explain(model, x, options=options)
        assert explanation.compiling == 1
        compiled = torch.compile(model, backend="hybrid", options=options)
        torch.testing.assert_close(compiled(x), model(x))
        assert wait_for_builds(120)
        assert "tvm" in {region.engine for region in explanation.updated().plans[0].regions}
        for _ in range(2):
            exact = deepcopy(model).double()(x.double())
            torch.testing.assert_close(compiled(x).double(), exact, rtol=1e-5, atol=1e-5)
            model[0].weight.mul_(1.5)


class _Planned:
    """A compiled graph of one input, whose first call lasts until it is released."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.may = threading.Event()
        self.is_ready = False
        self.inputs: list[Any] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            assert self.may.wait(60)
            if self.error is not None:
                raise self.error
            self.inputs.append(weakref.ref(x))
            self.is_ready = True
        return x + 1

    def graph(self, *, strict: bool = False) -> InBackground:
        """A compiled graph in the background, with eager in its place."""
        return InBackground(
            "the graph",
            lambda x: x + 1,
            self,
            lambda _: not self.is_ready,
            lambda x: copies_of([x], lambda *_: False),
            once=True,
            strict=strict,
        )


def test_an_error_of_the_build(caplog: pytest.LogCaptureFixture) -> None:
    """An error of the build logs one warning, and eager goes on. Under strict, all later calls raise the error."""
    for strict in (False, True):
        caplog.clear()
        planned = _Planned(RuntimeError("the machine is on fire"))
        graph = planned.graph(strict=strict)
        assert graph.call(torch.ones(1)) == 2
        assert graph.compiling
        planned.may.set()
        assert wait_for_builds(60)
        assert not graph.compiling
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        for _ in range(2):
            if strict:
                with pytest.raises(RuntimeError, match="on fire"):
                    graph.call(torch.ones(1))
            else:
                assert graph.call(torch.ones(1)) == 2
        assert len(warnings) == (0 if strict else 1)
        assert all("the graph runs in eager" in warning and "on fire" in warning for warning in warnings)


def test_copies_are_freed() -> None:
    """Inputs are copied in the first call. The copies are freed when the build is done."""
    planned = _Planned()
    graph, x = planned.graph(), torch.ones(3)
    graph.call(x)
    planned.may.set()
    assert wait_for_builds(60)
    (copy,) = planned.inputs
    assert copy() is None
    assert graph.call(x).tolist() == [2, 2, 2]


def test_copies() -> None:
    """Copies have the same values and strides, memory of their own, and no gradients. Static tensors and numbers are not copied."""
    base = torch.arange(24.0).reshape(4, 6)
    tensors = [
        base,
        base.t(),
        base[1:, ::2],
        torch.ones(3).expand(5, 3),
        base.as_strided((3, 4), (6, 1), 2),
        torch.empty(0, 3),
        torch.tensor(7),
        base.requires_grad_(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.eye(3).to_sparse(),
    ]
    for tensor, copy in zip(tensors, copies_of(tensors, lambda *_: False), strict=True):
        assert not copy.requires_grad
        if tensor.layout is torch.strided:
            assert copy.stride() == tensor.stride()
            assert (copy.is_conj(), copy.is_neg()) == (tensor.is_conj(), tensor.is_neg())
            assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()
            torch.testing.assert_close(copy, tensor.detach())
        else:
            torch.testing.assert_close(copy.to_dense(), tensor.to_dense())
    values = [3, base, None]
    assert all(new is old for new, old in zip(copies_of(values, lambda k, _: k == 1), values, strict=True))


_PROGRAM = """
import os, sys, threading
from pathlib import Path
import pytest, torch
from tests.background_for_tests import SlowEngine, compiled_with, eventually
from torch_hybrid_backend import wait_for_builds

engine, model, x = SlowEngine(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.randn(2, 8)
torch.set_grad_enabled(False)
expected = model(x)
compiled = compiled_with(engine, model, pytest.MonkeyPatch(), Path(sys.argv[1]))
torch.testing.assert_close(compiled(x), expected)
eventually(lambda: engine.compiling)
"""


@pytest.mark.parametrize(
    "end",
    ["leaves", pytest.param("raises", marks=pytest.mark.full), pytest.param("is interrupted", marks=pytest.mark.full)],
)
def test_a_process_that_ends_meanwhile(tmp_path: Path, end: str) -> None:
    """A process with a compiler that never answers ends at once and silently, as without a build."""
    last = {
        "leaves": "print('done')",
        "raises": "raise SystemExit(3)",
        "is interrupted": "import signal; signal.raise_signal(signal.SIGINT)",
    }[end]
    done = _run(_PROGRAM + last, tmp_path)
    assert done.returncode == {"leaves": 0, "raises": 3, "is interrupted": -signal.SIGINT}[end]
    assert done.stderr == "" or end == "is interrupted"
    assert "builder" not in done.stderr


@pytest.mark.full
def test_a_process_that_forks_meanwhile(tmp_path: Path) -> None:
    """The child runs calls in eager and starts its own build. The parent's build goes on."""
    script = """
child = os.fork()
engine.may.release()
torch.testing.assert_close(compiled(x), expected)
assert wait_for_builds(60)
calls = engine.calls
torch.testing.assert_close(compiled(x), expected)
assert engine.calls == calls + 1, (child, engine.calls)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    done = _run(_PROGRAM + script, tmp_path)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


@pytest.mark.full
def test_a_process_that_ends_while_kernels_are_compiled(tmp_path: Path) -> None:
    """The same with the real compiler: its processes end too, without a warning."""
    pytest.importorskip("tvm")
    script = """
import torch
from torch_hybrid_backend.builds.background import build_thread
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(n, n + 1), torch.nn.GELU()) for n in range(8, 20)))
compiled = torch.compile(model, backend="hybrid", options={"background": True})
with torch.no_grad():
    compiled(torch.randn(2, 8))
assert not build_thread().wait(0)
"""
    done = _run(script, tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)


def _run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(script)}",
            str(folder),
        ],
        check=False,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "HYBRID_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
