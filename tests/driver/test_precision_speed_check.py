"""Graphs of reduced precision timed beside themselves as written, in their first call. Times are given; what follows from them is real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend import backend
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Conversion, Cost
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.driver import precision_speed_check
from torch_hybrid_backend.measuring.measure import Timing
from torch_hybrid_backend.partition import placement

_Times = Callable[..., list[int]]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Graphs that take longer than float32 can take, on a machine that has the instructions, by eager where a test does not say otherwise."""
    monkeypatch.setenv("HYBRID_ENGINES", "eager")
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HYBRID_PLACEMENT", "measure")
    monkeypatch.setattr(backend, "lacking_instructions", lambda precision: ())
    monkeypatch.setattr(precision_speed_check, "is_running", lambda: False)  # other tests bisect
    monkeypatch.setattr(precision_speed_check, "_rate", lambda: float("inf"))
    torch.compiler.reset()
    torch.manual_seed(0)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Has whole graphs take so many microseconds, in their order; grows by how many graphs were timed."""

    def take(*microseconds: float) -> list[int]:
        timed: list[int] = []

        def measure(calls: Sequence[Callable[[], object]], *_: object, **__: object) -> list[Timing]:
            for call in calls:
                call()
            timed.append(len(calls))
            return [Timing(us, 0.0, 3, us) for us, _ in zip(microseconds, calls, strict=True)]

        monkeypatch.setattr(precision_speed_check, "measure", measure)
        return timed

    return take


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def _explained(model: nn.Module, x: torch.Tensor, **options: object) -> Conversion:
    torch.compiler.reset()
    with torch.no_grad():
        (plan,) = torch_hybrid_backend.explain(model, x, options={"precision": "bf16", **options}).plans
    assert plan.conversion is not None
    return plan.conversion


def test_a_graph_that_is_faster_as_written_stays_so(whole: _Times) -> None:
    """Every layer says so, with both times; its results are those of the model. A later process times nothing, and does the same."""
    timed = whole(100.0, 60.0)
    model, x = _model(), torch.randn(8, 16)
    found = _explained(model, x)
    assert timed == [2]
    assert (found.converted, found.casts) == ((), 0)
    assert [layer.code for layer in found.left] == [Reason.SLOWER] * 2
    assert found.left[0].why == "the whole graph takes 100.0 us in bf16, 60.0 us as written"
    assert _explained(model, x) == found
    compiled = torch.compile(model, backend="hybrid", options={"precision": "bf16"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-6)
    assert timed == [2]
    _explained(model, x, cache=False)
    _explained(_model(), torch.randn(9, 16))
    assert timed == [2, 2, 2]


class _WithTable(nn.Module):
    """A layer, and numbers of the code's own, which become a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) + torch.tensor([0.5, 1.5] * 16)
        return result


def test_a_graph_with_constants_of_its_own_is_in_question(whole: _Times) -> None:
    """Its key holds their contents, which are read while AOTAutograd is tracing."""
    timed = whole(300.0, 100.0)
    assert not _explained(_WithTable(), torch.randn(4, 16)).converted
    assert timed == [2]


def test_a_graph_that_gains_stays_in_its_precision(whole: _Times) -> None:
    """So does one that loses no more than noise; that is remembered too."""
    timed = whole(100.0, 99.0)
    model, x = _model(), torch.randn(8, 16)
    found = _explained(model, x)
    assert (found.converted, found.left) == ((("bfloat16", 3),), ())
    assert found.error is not None
    assert _explained(model, x).converted == found.converted
    assert timed == [2]


class _Sensitive(nn.Module):
    """Its second layer takes small differences of large numbers: bfloat16 has none of them left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(32, 16)
        with torch.no_grad():
            self.second.weight[:, 16:] = -self.second.weight[:, :16]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        result: torch.Tensor = self.second(torch.cat([1000 + x, 1000 - x], 1))
        return result


def test_what_the_model_gate_leaves_is_timed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is off returns to float32; the other one gains nothing without it. A later process times neither graph."""
    timed: list[int] = []

    def measure(calls: Sequence[Callable[[], object]], *_: object, **__: object) -> list[Timing]:
        timed.append(len(calls))
        written = 99.0 if len(timed) == 1 else 60.0
        return [Timing(us, 0.0, 3, us) for us in (100.0, written)]

    monkeypatch.setattr(precision_speed_check, "measure", measure)
    model, x = _Sensitive(), torch.randn(8, 16)
    found = _explained(model, x)
    assert timed == [2, 2]
    assert (found.converted, found.casts) == ((), 0)
    assert [(layer.name, layer.code) for layer in found.left] == [
        ("addmm", Reason.SLOWER),
        ("addmm_1", Reason.ACCURACY),
    ]
    assert found.left[0].why == "the whole graph takes 100.0 us in bf16, 60.0 us as written"
    assert _explained(model, x) == found
    assert timed == [2, 2]


def test_times_beside_other_load(whole: _Times, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph as written has to be faster by a clear margin, and each of these is timed again."""
    waits = iter(range(0, 10**20, 10**18))
    monkeypatch.setattr("torch_hybrid_backend.measuring.other_load.thread_waits", lambda: {"1": next(waits)})
    timed = whole(100.0, 70.0)
    model, x = _model(), torch.randn(8, 16)
    assert _explained(model, x).converted == (("bfloat16", 3),)
    assert _explained(model, x).converted == (("bfloat16", 3),)
    assert timed == [2, 2]
    timed = whole(100.0, 60.0)
    assert _explained(model, x).converted == ()
    assert timed == [2]


def test_times_that_only_a_busy_machine_has_are_not_kept(whole: _Times) -> None:
    """Ten times as long: this process believes it, the next one times again."""
    timed = whole(1000.0, 60.0)
    model, x = _model(), torch.randn(8, 16)
    assert _explained(model, x).converted == ()
    assert _explained(model, x).converted == ()
    assert timed == [2, 2]


@pytest.mark.parametrize(
    "options",
    [{"placement": "estimate"}, {"verify": "always"}, {"precision": "int8-weights"}, {"precision": "as-written"}],
    ids=str,
)
def test_what_is_not_in_question(options: dict[str, object], whole: _Times) -> None:
    """Nothing is timed where there is no question, and where few bits are asked for to save memory."""
    timed = whole(100.0, 60.0)
    with torch.no_grad():
        torch_hybrid_backend.explain(_model(), torch.randn(8, 16), options={"precision": "bf16", **options})
        torch_hybrid_backend.explain(lambda x: torch.rand_like(x) @ x, torch.rand(8, 8), options={"precision": "bf16"})
        torch_hybrid_backend.explain(_model(), torch.randn(7, 16), options={"precision": "bf16"}, dynamic=True)
    assert timed == []


def test_without_memory_for_both_the_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the precision that was asked for; other errors are not hidden."""

    def fails(*_: object, **__: object) -> None:
        raise error

    error: Exception = torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(precision_speed_check, "measure", fails)
    assert _explained(_model(), torch.randn(8, 16)).converted == (("bfloat16", 3),)
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        _explained(_model(), torch.randn(8, 16))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels, which are timed one by one. Their regions are faster than eager: by real times, so small ones need not be."""
    pytest.importorskip("tvm")
    monkeypatch.setenv("HYBRID_ENGINES", "tvm")

    def priced(
        _key: str, contenders: Mapping[str, str], calls: Mapping[str, Callable[[], object]], *_: object
    ) -> tuple[Cost, ...]:
        for name in contenders:
            calls[name]()
        return tuple(Cost(name, 1000.0 if name == EAGER else 1.0, "measured") for name in contenders)

    monkeypatch.setattr(placement, "priced", priced)


@pytest.mark.usefixtures("kernels")
def test_layers_that_lose_are_as_written_alone(whole: _Times, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third graph has these as written; where it is the fastest it stays, with the times of each."""
    timed = whole(100.0, 90.0, 70.0)
    real: list[set[str]] = []
    given = iter([{"addmm": 40.0, "addmm_1": 30.0}, {"addmm": 20.0, "addmm_1": 60.0}])

    def layer_us(*arguments: object) -> dict[str, float]:
        real.append(set(original_layer_us(*arguments)))  # type: ignore[arg-type]
        return next(given)

    original_layer_us = precision_speed_check.layer_us
    monkeypatch.setattr(precision_speed_check, "layer_us", layer_us)
    model, x = _model(), torch.randn(8, 16)
    found = _explained(model, x)
    assert real == [{"addmm", "addmm_1"}] * 2
    assert timed == [3]
    assert [(layer.name, layer.code) for layer in found.left] == [("addmm", Reason.SLOWER)]
    assert found.left[0].why == "it takes 40.0 us in bf16, casts included, 20.0 us as written"
    assert dict(found.converted) == {"bfloat16": 1}
    assert found.error is not None
    assert _explained(model, x) == found
    assert timed == [3]


@pytest.mark.usefixtures("kernels")
def test_what_float32_cannot_reach_is_not_compared(whole: _Times, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled as written where its products alone would take longer."""
    timed = whole()
    monkeypatch.setattr(precision_speed_check, "_rate", lambda: 1e-6)
    monkeypatch.setattr(
        precision_speed_check._PrecisionTimings, "_compile", lambda *_: pytest.fail("it is compiled as written")
    )
    assert _explained(_model(), torch.randn(8, 16)).converted == (("bfloat16", 3),)
    assert timed == []


@pytest.mark.full
@pytest.mark.usefixtures("kernels")
def test_a_model_that_gains_nothing_by_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By real times: scales and quantizations of a large image cost more than what four channels of it multiply."""
    monkeypatch.undo()
    torch.set_num_threads(1)
    found = _explained(nn.Conv2d(4, 4, 1), torch.randn(4, 4, 256, 256), precision="int8")
    assert (found.converted, [layer.code for layer in found.left]) == ((), [Reason.SLOWER])
