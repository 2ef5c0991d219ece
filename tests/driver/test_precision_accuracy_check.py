"""Graphs of reduced precision beside themselves as written, in their first call. All is run by eager: kernels are judged apart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend import backend
from torch_hybrid_backend.core.plan import Conversion, Plan
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.driver import precision_accuracy_check
from torch_hybrid_backend.driver.prepared import Reduced
from torch_hybrid_backend.driver.stages import Assignment
from torch_hybrid_backend.errors import OperatorRefusedError
from torch_hybrid_backend.partition.deviation import relative_error

_OPTIONS = {"precision": "bf16"}


@pytest.fixture(autouse=True)
def eager_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine that has the instructions, whichever it is."""
    monkeypatch.setenv("HYBRID_ENGINES", "eager")
    monkeypatch.setenv("HYBRID_PLACEMENT", "estimate")  # whole calls of the graph as written would win now and then
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(backend, "lacking_instructions", lambda precision: ())
    torch.compiler.reset()
    torch.manual_seed(0)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with each run of a graph as written that is compared with."""
    made: list[object] = []

    class Counted(precision_accuracy_check.WrittenRun):
        def __init__(self, *arguments: object) -> None:
            made.append(self)
            super().__init__(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(precision_accuracy_check, "WrittenRun", Counted)
    return made


class _Sensitive(nn.Module):
    """Its second layer takes small differences of large numbers: bfloat16 has none of them left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(32, 16), nn.Linear(16, 16)
        with torch.no_grad():
            self.second.weight[:, 16:] = -self.second.weight[:, :16]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = self.second(torch.cat((x + 1000, x * 0 + 1000), 1))
        return self.third(x.relu())


class _Robust(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def _explained(model: Callable[..., object], *inputs: torch.Tensor, **options: object) -> tuple[Plan, Conversion]:
    with torch.no_grad():
        (plan,) = torch_hybrid_backend.explain(model, *inputs, options={**_OPTIONS, **options}).plans
    assert plan.conversion is not None
    assert Plan.from_json(plan.to_json()) == plan
    return plan, plan.conversion


def test_a_graph_within_the_tolerance_stays(runs: list[object]) -> None:
    """Its errors are in the plan; it was run as written once, in the first call alone."""
    _, found = _explained(_Robust(), torch.randn(8, 16))
    assert (found.converted, found.operators, found.casts, found.weight_casts) == ((("bfloat16", 3),), 3, 2, 4)
    assert found.error is not None
    assert 1e-5 < found.error < found.tolerance == 0.02
    assert (found.left, found.unchecked) == ((), "")

    runs.clear()
    model = _Robust()
    compiled = torch.compile(model, backend="hybrid", options=_OPTIONS)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(8, 16)
            error = relative_error(model(x), compiled(x))
            assert error is not None
            assert 1e-5 < error < 0.02
    assert len(runs) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_layer_that_is_off_returns_to_float32(dynamic: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The layer that is off returns alone, by one warning that names it and its line; what feeds it is as written with it, and its code is in
    the plan."""
    model = _Sensitive()
    _, found = _explained(model, torch.randn(8, 16))
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "addmm_1" in warning
    assert "test_precision_accuracy_check.py" in warning
    assert "addmm_2" not in warning
    (left,) = found.left
    assert (left.name, left.code) == ("addmm_1", Reason.ACCURACY)
    assert "at most 0.02 may be" in left.why
    assert found.error is not None
    assert found.error < 0.02
    assert dict(found.converted)["bfloat16"] >= 2

    torch.compiler.reset()
    compiled = torch.compile(model, backend="hybrid", options=_OPTIONS, dynamic=dynamic)
    with torch.no_grad():
        for rows in (8, 8, 5, 3):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(compiled(x), model(x), rtol=0.02, atol=0.02)


def test_the_fewest_layers_return(caplog: pytest.LogCaptureFixture) -> None:
    """Under a tolerance that only float32 meets all do, and the graph is as it was written; one warning names them all."""
    model, x = _Robust(), torch.randn(8, 16)
    _, found = _explained(model, x, precision_tolerance=1e-5)
    assert (found.converted, found.casts) == ((), 0)
    assert {layer.code for layer in found.left} == {Reason.ACCURACY}
    assert len(found.left) == 2
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "addmm" in warning
    assert "addmm_1" in warning
    compiled = torch.compile(model, backend="hybrid", options={**_OPTIONS, "precision_tolerance": 1e-5})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-6)
    _, between = _explained(model, x, precision_tolerance=0.0035)
    assert [layer.name for layer in between.left] == ["addmm_1"]  # by itself each is off by 0.003


def test_a_warning_names_the_worst_layers(caplog: pytest.LogCaptureFixture) -> None:
    """A warning about many layers names some, and says how many more there are."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.Tanh()))).eval()
    _, found = _explained(model, torch.randn(8, 64), precision_tolerance=1e-6)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert len(found.left) == 10
    assert warning.count("addmm") == 8
    assert warning.endswith("and 2 more, which explain() lists")


def test_kernels_that_are_off_by_more_than_eager_cost_few_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next error that is aimed at is as much lower as the last one was too far off; not one layer more at a time."""
    compiled: list[int] = []
    errors = {0: 0.5, 1: 0.5, 2: 0.4, 3: 0.2, 4: 0.1, 5: 0.04, 6: 0.02, 7: 0.0}  # of eager, by layers that returned
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(7)))

    def deviation(assignment: Assignment, reduced: Reduced, _: object) -> precision_accuracy_check._Deviation:
        compiled.append(len(reduced.context.as_written))
        return precision_accuracy_check._Deviation(3 * errors[compiled[-1]], {}, (), frozenset())

    class Eager:
        def __init__(self, graph: torch.fx.GraphModule) -> None:
            self.left = sum(node.target is torch.ops.aten.addmm.default for node in graph.graph.nodes)
            self.left -= sum(node.meta.get("precision") == "bfloat16" for node in graph.graph.nodes)

        def __call__(self, _: object) -> int:
            return self.left

    monkeypatch.setattr(precision_accuracy_check, "_deviation", deviation)
    monkeypatch.setattr(precision_accuracy_check, "EagerGraph", Eager)
    monkeypatch.setattr(precision_accuracy_check, "_error", lambda _, left: errors[left])
    _, found = _explained(model, torch.randn(8, 16), precision_tolerance=0.12)
    assert compiled == [0, 4, 5]
    assert len(found.left) == 5
    assert found.error == pytest.approx(0.12)


def test_what_is_not_compared_says_so(runs: list[object]) -> None:
    """verify=off, calls that cannot be repeated, and a graph in which nothing was converted."""
    linear = nn.Linear(16, 16)
    _, off = _explained(linear, torch.randn(8, 16), verify="off")
    _, random = _explained(lambda x: linear(torch.rand_like(x) + linear(x)), torch.randn(8, 16))
    _, nothing = _explained(torch.sin, torch.randn(8, 16))
    assert runs == []
    assert [found.error for found in (off, random, nothing)] == [None] * 3
    assert off.unchecked == "verify=off"
    assert "random numbers" in random.unchecked
    assert off.converted
    assert random.converted
    assert (nothing.converted, nothing.unchecked) == ((), "")


def test_integers_are_not_compared() -> None:
    """An index of the largest may be another; the values beside it count."""
    linear = nn.Linear(16, 16)
    _, found = _explained(lambda x: linear(x).max(1), torch.randn(8, 16))
    assert found.error is not None
    assert found.error < 0.02


def test_without_memory_to_compare_the_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that memory does not suffice for is left out, and other errors are not hidden."""

    def fails(*_: object) -> None:
        raise error

    error: Exception = torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(precision_accuracy_check, "WrittenRun", fails)
    _, found = _explained(_Robust(), torch.randn(8, 16))
    assert (found.error, bool(found.converted)) == (None, True)
    assert "no memory" in found.unchecked
    error = OperatorRefusedError("aten.mm.default", RuntimeError("not on this device"))
    _, found = _explained(_Robust(), torch.randn(8, 16))
    assert "PyTorch cannot run it as written: aten.mm.default does not take" in found.unchecked
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        _explained(_Robust(), torch.randn(8, 16))


def test_without_memory_to_try_layers_all_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that are known to be off are not kept for want of memory."""

    class NoMemory:
        def __init__(self, *_: object) -> None:
            raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(precision_accuracy_check, "EagerGraph", NoMemory)
    _, found = _explained(_Sensitive(), torch.randn(8, 16))
    assert len(found.left) == 3
    assert found.error == 0.0


def test_branches_are_graphs_of_their_own() -> None:
    """A body of control flow is converted and judged in its own first call."""
    linear = nn.Linear(16, 16)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: linear(x).relu(), lambda x: x.sin(), (x,))

    with torch.no_grad():
        plans = torch_hybrid_backend.explain(model, torch.rand(8, 16), options=_OPTIONS).plans
    converted = [plan.conversion for plan in plans if plan.conversion is not None and plan.conversion.converted]
    assert len(converted) == 1
    assert converted[0].error is not None


def test_half_models_are_as_they_were() -> None:
    """A model that is written in bfloat16, by itself or by autocast, has nothing left to convert."""
    model, x = _Robust().bfloat16(), torch.randn(8, 16).bfloat16()
    _, found = _explained(model, x)
    assert found.converted == ()
    wide, y = _Robust(), torch.randn(8, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(
            torch.compile(wide, backend="hybrid", options=_OPTIONS)(y), wide(y), rtol=0.02, atol=0.01
        )
