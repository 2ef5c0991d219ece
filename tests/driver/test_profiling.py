"""Times of a model's calls by kernel, in every way in which a graph runs: static, dynamic, in several graphs, from Python, in eager."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend import backend
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import KernelTime, Plan, Profile
from torch_hybrid_backend.driver import profiling
from torch_hybrid_backend.driver.profiling import Timeable, Turns, Watch
from torch_hybrid_backend.engines.cpu import ceilings
from torch_hybrid_backend.partition import placement, whole_call
from torch_hybrid_backend.runtime.executor import StepTime
from torch_hybrid_backend.runtime.plan_layout import StepOrigin


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fewest calls, short kernels for the machine's ceilings, and no region or call that eager wins."""
    monkeypatch.setattr(profiling, "_BUDGET_S", 0.0)
    monkeypatch.setattr(profiling, "_CEILINGS", "ceilings-of-tests")
    monkeypatch.setattr(ceilings, "_FMA_STEPS", 50)
    monkeypatch.setattr(ceilings, "_MEMORY_BYTES", 1 << 16)
    for module in (placement, whole_call):  # whatever else the machine does meanwhile
        monkeypatch.setattr(module, "cheapest", lambda costs: next(cost for cost in costs if cost.engine != "eager"))
    torch.compiler.reset()
    with torch.no_grad():
        yield


class Block(nn.Module):
    """A convolution, a layer behind it, and a sort that eager runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.relu(self.conv(x)).mean((2, 3)))
        return torch.sort(y)[0]


def _explained(model: nn.Module, *inputs: torch.Tensor, **settings: Any) -> Sequence[Plan]:
    explanation = torch_hybrid_backend.explain(model.eval(), *inputs, profile=True, **settings)
    assert explanation.call_us is not None
    told = json.loads(explanation.to_json())
    assert [Plan.from_json(json.dumps(plan)) for plan in told["plans"]] == list(explanation.plans)
    return explanation.plans


def _profile(plan: Plan) -> Profile:
    assert plan.profile is not None
    spent = sum(kernel.microseconds for kernel in plan.profile.kernels)
    assert plan.profile.overhead_us == max(0.0, plan.profile.call_us - spent)
    return plan.profile


def _row(profile: Profile, module: str) -> KernelTime:
    return next(kernel for kernel in profile.kernels if module in kernel.modules)


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_kernel_has_a_row(dynamic: bool) -> None:
    """With its time, what it computes, for which modules; so has each operator of PyTorch's. The machine's ceilings are told."""
    (plan,) = _explained(Block(), torch.randn(2, 3, 16, 16), dynamic=dynamic, options={"min_region_nodes": 1})
    profile = _profile(plan)
    assert profile.calls == profiling._LEAST_ROUNDS
    assert all(kernel.microseconds > 0 for kernel in profile.kernels)
    convolution, linear = _row(profile, "conv"), _row(profile, "head.0")
    assert convolution.flops == 2 * (2 * 8 * 16 * 16) * 3 * 9
    assert linear.flops == 2 * 2 * 8 * 16
    assert convolution.source.startswith("test_profiling.py:")
    assert {*linear.nodes} >= {"addmm", "gelu"}
    sort = profile.kernels[-1]
    assert sort.kernel == "aten::sort"
    assert any(node.startswith("sort") for node in sort.nodes)
    assert profile.ceilings is not None
    assert profile.ceilings.threads == torch.get_num_threads()
    assert dict(profile.ceilings.gflops)["float32"] > 0 < profile.ceilings.gbytes


def test_each_graph_has_a_profile() -> None:
    """A graph break makes two; each is told with its own modules."""

    class Breaks(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.relu(self.conv(x)).mean((2, 3))
            torch._dynamo.graph_break()
            return self.head(y)

    first, second = _explained(Breaks(), torch.randn(2, 3, 16, 16))
    assert _row(_profile(first), "conv").flops > 0
    assert _row(_profile(second), "head.0").flops > 0


def test_a_graph_that_is_called_twice_counts_twice() -> None:
    """The time of a kernel is that of all its runs in a call of the model."""
    turns = Turns()
    watch = Watch(turns)
    step = StepTime((StepOrigin("r0", "matmul", frozenset({"mm"})),), 300)
    for turns.by_step in (False, True, False, True):
        for _ in range(2):
            assert watch.run(lambda: "plain", lambda: ("timed", [step])) == ("timed" if turns.by_step else "plain")
        watch.end_call()
    (kernel,) = watch.labels
    assert watch.us(kernel) == 0.6
    assert watch.labels[kernel] == "matmul"
    assert not watch.is_nested


def test_what_runs_inside_another_graph_is_nested() -> None:
    """The time of a graph inside another is part of the other's time."""
    turns = Turns()
    outer, inner = Watch(turns), Watch(turns)
    outer.run(lambda: inner.run(lambda: None, lambda: (None, [])), lambda: (None, []))
    assert (outer.is_nested, inner.is_nested) == (False, True)


def test_bodies_of_control_flow_are_inside_a_row() -> None:
    """The branch that is taken has a profile of its own, the other has no plan."""

    class Either(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.cond(x.sum() < 1e9, lambda x: self.conv(x).relu(), lambda x: x[:, :1].cos(), (x,))
            return y

    plans = _explained(Either(), torch.randn(2, 3, 16, 16))
    (body,) = [plan for plan in plans if _profile(plan).is_nested]
    (whole,) = [plan for plan in plans if not _profile(plan).is_nested]
    assert _row(_profile(body), "conv").flops > 0
    assert any("cond" in kernel.nodes for kernel in _profile(whole).kernels)


def test_what_runs_from_python_has_a_row_for_each_region() -> None:
    """Regions that run from Python have rows, as where sizes depend on data."""

    class Picks(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head(self.relu(self.conv(x)).mean((2, 3)))
            return torch.exp(y[y.sum(1) > 0] * 2)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (plan,) = _explained(Picks(), torch.randn(2, 3, 16, 16), options={"min_region_nodes": 1})
    profile = _profile(plan)
    assert len(profile.kernels) > 1
    named = {node for kernel in profile.kernels for node in kernel.nodes}
    assert named >= {node.name for node in plan.nodes}


def test_a_call_that_eager_runs_has_a_row_for_each_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's graph has a row for each operator: what it calls, what that needs, for which modules."""
    monkeypatch.setenv("HYBRID_PLACEMENT", "measure")
    monkeypatch.setattr(whole_call, "cheapest", lambda costs: next(cost for cost in costs if cost.engine == "eager"))
    (plan,) = _explained(Block(), torch.randn(2, 3, 16, 16))
    assert plan.call is not None
    assert plan.call.engine == "eager"
    profile = _profile(plan)
    convolution = _row(profile, "conv")
    assert (convolution.region, convolution.kernel) == ("", "conv2d")
    assert convolution.flops == 2 * (2 * 8 * 16 * 16) * 3 * 9
    assert convolution.bytes >= 4 * (2 * 3 * 16 * 16 + 8 * 3 * 9 + 2 * 8 * 16 * 16)
    assert [kernel.kernel for kernel in profile.kernels][-2:] == ["sort", "getitem"]


def test_a_training_graph_has_rows_too() -> None:
    """A training graph has rows of its forward: nothing calls backward."""
    with torch.enable_grad():
        (plan,) = _explained(Block(), torch.randn(2, 3, 16, 16))
    assert plan.kind == "forward"
    assert _row(_profile(plan), "conv").flops > 0


def test_later_calls_run_what_they_ran_before() -> None:
    """A graph that is timed is replaced only meanwhile, and is put back."""
    found: list[Timeable] = []
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    graph = torch.fx.symbolic_trace(lambda x, w: (torch.relu(x @ w),))
    call = backend.compile_graph(graph, [x, w], Config(), on_graph=found.append)
    expected = call(x, w)
    turns = Turns()
    watches = [Watch(turns) for _ in found]
    states = [vars(getattr(each, "_graph", None) or each._call).copy() for each in found]  # type: ignore[attr-defined]
    for each, watch in zip(found, watches, strict=True):
        with each.watched(watch):
            torch.testing.assert_close(call(x, w), expected)
            watch.end_call()
    after = [vars(getattr(each, "_graph", None) or each._call) for each in found]  # type: ignore[attr-defined]
    assert sum(watch.plain_ns[0] > 0 for watch in watches) == 1
    for before, now in zip(states, after, strict=True):
        assert all(now[name] is before[name] for name in ("_state", "_eager", "_settled") if name in before)
    call(x, w)
    assert all(len(watch.plain_ns) == 1 for watch in watches)


class Cached(nn.Module):
    """A model whose second call finds what its first kept: Dynamo compiles it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(4)
        return self.layer(x) * self.mask


def test_a_model_that_is_compiled_again_in_its_second_call() -> None:
    """Times are those of the graph that later calls run."""
    first, second = _explained(Cached(), torch.randn(2, 4))
    assert first.profile is None or not first.profile.kernels
    assert second.profile is not None
    assert second.profile.kernels


def test_ceilings_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ceilings are found where kept; missing ones are measured and kept beside them. Of no engine that can, there are none."""
    session = backend.open_session(dataclasses.replace(Config(), cache_dir=tmp_path))
    asked: list[Sequence[str]] = []

    def rates(_run: object, _threads: int, names: Sequence[str]) -> dict[str, float]:
        asked.append(names)
        return dict.fromkeys(names, 50.0)

    monkeypatch.setattr(ceilings, "rates", rates)
    monkeypatch.setattr(profiling.OtherLoad, "is_felt", lambda self: False)
    for precisions in ({"float32"}, {"float32"}, {"float32", "bfloat16", ""}):
        found = profiling._ceilings(precisions, session)
        assert found is not None
        assert found.gbytes == pytest.approx(50.0)
        assert {name for name, _ in found.gflops} == precisions - {""}
    assert asked == [["memory", "float32"], ["bfloat16"]]
    assert profiling._ceilings({"float32"}, dataclasses.replace(session, engines=())) is None


def test_without_profile_nothing_is_timed() -> None:
    """No plan has times."""
    explanation = torch_hybrid_backend.explain(Block().eval(), torch.randn(2, 3, 16, 16))
    assert explanation.call_us is None
    assert [plan.profile for plan in explanation.plans] == [None]
