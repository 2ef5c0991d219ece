"""`cuda_graphs` in whole models without a GPU: plans, graphs and changed parameters are what they are on one. The Triton engine's driver
for the CPU runs a graph's kernels in another order than they were added in, as far as the graph allows (`engines/triton/host_driver.py`)."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.compiling import by_estimate, fresh_dynamo
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.triton.host_driver import DRIVER, DriverError, HostDriver, Status

__all__ = ["by_estimate", "fresh_dynamo"]

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend="hybrid"` has the Triton engine, interpreted, in place of TVM."""
    monkeypatch.setattr(session, "_sessions", {})
    for name, value in (
        ("TRITON_INTERPRET", "1"),
        ("HYBRID_ENGINES", "triton"),
        ("HYBRID_PLACEMENT", "estimate"),
        ("HYBRID_STRICT", "1"),
    ):
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests to the driver: "launch", "graph" (a new executable one), "change", "launch_graph"."""
    asked: list[str] = []
    for name in ("launch", "graph", "change", "launch_graph"):
        method = getattr(HostDriver, name)

        def told(self: HostDriver, *arguments: object, _name: str = name, _method: object = method) -> object:
            if _name != "graph" or arguments:
                asked.append(_name)
            return _method(self, *arguments)  # type: ignore[operator]

        monkeypatch.setattr(HostDriver, name, told)
    return asked


class Block(nn.Module):
    """Kernels that reductions keep apart, and an operator of PyTorch's between them; `seen` counts its calls."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(24)
        self.linear = nn.Linear(24, 24)
        self.second = nn.LayerNorm(24)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += 1
        x = self.linear(self.first(x)).softmax(-1)
        return self.second(24 * x + self.seen), x.sort(-1).values.cumsum(0).sum(-1)


def by_turns(x: torch.Tensor) -> torch.Tensor:
    """Three kernels: each softmax reads what the one before it wrote, along the other axis."""
    for axis in (-1, 0, -1):
        x = (3 * x).softmax(axis)
    return x


def close(own: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(own.double(), exact, rtol=1e-4, atol=1e-5)


def test_models_compute_what_eager_does(done: list[str]) -> None:
    """Call by call with other inputs, over a mutated buffer; results stay valid after later calls."""
    torch.manual_seed(0)
    model = Block()
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="hybrid", mode="reduce-overhead")
    inputs = [torch.randn(3, 24) for _ in range(4)]
    results = []
    with torch.no_grad():
        for x in inputs:
            done.append("call")
            results.append(compiled(x))
        for x, got in zip(inputs, results, strict=True):
            for own, other in zip(got, exact(x.double()), strict=True):
                close(own, other)
    _, first, second, third, fourth = " ".join(done).split("call")
    assert set(first.split()) == {"launch"}, "what runs once is not worth a graph"
    assert "graph launch_graph" in second
    assert "graph" not in third.split()
    assert "graph" not in fourth.split()
    assert "change launch_graph" in fourth, "later calls change parameters"


@pytest.mark.full
def test_graph_breaks_and_sizes(done: list[str]) -> None:
    """Two graphs of Dynamo's at two sizes, in turn: each has graphs of its own."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = by_turns(x)
        torch._dynamo.graph_break()
        return by_turns(x + 1)

    compiled = torch.compile(function, backend="hybrid", dynamic=True, options={"cuda_graphs": True})
    inputs = [torch.randn(rows, 5) for _ in range(4) for rows in (3, 6)]
    results = [compiled(x) for x in inputs]
    for x, got in zip(inputs, results, strict=True):
        close(got, function(x.double()))
    assert done.count("graph") == 4


def test_training(done: list[str]) -> None:
    """Forward and backward; gradients of several calls are added up; the next call's outputs leave those that backward still needs alone."""
    torch.manual_seed(0)
    model = Block()
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="hybrid", mode="reduce-overhead")
    for _ in range(3):
        inputs = [torch.randn(3, 24) for _ in range(2)]
        for run, dtype in ((compiled, torch.float32), (exact, torch.float64)):
            losses = [sum(out.square().sum() for out in run(x.to(dtype))) for x in inputs]
            for loss in losses:
                assert isinstance(loss, torch.Tensor)
                loss.backward()
    for own, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-3, atol=1e-4)
    assert done.count("graph") >= 2


def test_dropout_advances() -> None:
    """Every call has a mask of its own: that of eager with the same seed."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return by_turns(nn.functional.dropout(by_turns(x), 0.5) + 1)

    compiled = torch.compile(function, backend="hybrid", mode="reduce-overhead")
    x = torch.randn(6, 8)
    torch.manual_seed(0)
    got = [compiled(x) for _ in range(4)]
    torch.manual_seed(0)
    for own in got:
        torch.testing.assert_close(own, function(x), rtol=1e-4, atol=1e-5)
    assert not torch.equal(got[2], got[3])


def test_a_driver_without_graphs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels are launched one by one, after one warning that says why; nothing falls back to eager."""

    def refused(self: HostDriver, of: int | None = None) -> int:
        raise DriverError(Status.NOT_SUPPORTED)

    monkeypatch.setattr(HostDriver, "graph", refused)
    compiled = torch.compile(by_turns, backend="hybrid", mode="reduce-overhead")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            x = torch.randn(6, 8)
            close(compiled(x), by_turns(x.double()))
    (warning,) = (record.message for record in caplog.records)
    assert warning == (
        "kernels are launched one by one, not as a CUDA graph: making a CUDA graph failed: CUDA_ERROR_NOT_SUPPORTED (801)"
    )


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_other_modes_have_none(mode: str, done: list[str]) -> None:
    """Kernels are launched one by one."""
    compiled = torch.compile(by_turns, backend="hybrid", mode=mode)
    for _ in range(3):
        compiled(torch.randn(6, 8))
    assert set(done) == {"launch"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_they_are_explained(dynamic: bool) -> None:
    """By the names that the regions' kernels have; where the setting asks for none, none are shown."""
    x = torch.randn(6, 8)
    found = torch_hybrid_backend.explain(by_turns, x, options={"cuda_graphs": True}, dynamic=dynamic)
    (plan,) = found.plans
    kernels = tuple(kernel for region in plan.regions for kernel in region.kernels)
    assert len(kernels) == 3
    assert plan.cuda_graphs == (kernels,)
    assert "one CUDA graph of 3 kernels: " in str(found)
    assert Plan.from_json(plan.to_json()) == plan
    (plan,) = torch_hybrid_backend.explain(by_turns, x, dynamic=dynamic).plans
    assert plan.cuda_graphs == ()


def test_graphs_go_with_their_plan(caplog: pytest.LogCaptureFixture) -> None:
    """The log says how many kernels a graph has; the driver has none of a plan that is not there any more."""
    gc.collect()
    before = DRIVER.graphs
    compiled = torch.compile(by_turns, backend="hybrid", mode="reduce-overhead")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            compiled(torch.randn(6, 8))
    assert "kernels in each CUDA graph of this plan: 3" in caplog.messages
    assert DRIVER.graphs == before + 2
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert DRIVER.graphs == before
