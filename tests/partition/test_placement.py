"""Choosing engines: verification, pricing, fallback; with a clock that the test moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, FakeRegion, trace
from tests.test_errors import accelerator_error
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, PendingRegion
from torch_hybrid_backend.core.plan import Attempt, Plan
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.errors import AccuracyError, CompileError, CompilerCrashError, DeadlineError, RegionError
from torch_hybrid_backend.measuring.measure import HostTimer
from torch_hybrid_backend.measuring.timing_cache import TimingCache
from torch_hybrid_backend.partition.placement import Choice, Pricing, choose
from torch_hybrid_backend.partition.plan_builder import make_plan
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.partition.wrapped_region import checked
from torch_hybrid_backend.storage.store import Store

X = torch.randn(8, 8)
CONFIG = Config(measure_budget_s=0.001)


def _region(function: Callable[..., object] = lambda x: (x @ x).sin()) -> Region:
    (segment,) = partition_graph(trace(function, X), [FakeEngine()], Config()).graph.segments
    return segment.region


class Known(FakeRegion):
    """Knows its outputs, and does not run the graph for them."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.change([])


class Timed:
    """A clock that calls of eager and of regions move: the only time that passes is that of the candidates, in microseconds."""

    def __init__(self, region: Region, eager: float, **engines: float) -> None:
        self.now = 0
        module = region.graph_module
        module(X)  # its code is generated on the first call
        module.forward = self._taking(eager, module.forward)  # type: ignore[method-assign]
        self.candidates: dict[str, CompiledRegion | Refused | Exception] = {
            name: Known(region, self._taking(cost, lambda _: [(X @ X).sin()])) for name, cost in engines.items()
        }

    def _taking(self, microseconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            self.now += int(microseconds * 1000)
            return function(*inputs)

        return call

    def pricing(self, cache: TimingCache | None = None) -> Pricing:
        return Pricing(cache, dict.fromkeys(self.candidates, "1"), timer=HostTimer(lambda: self.now))


def _fine(region: Region) -> FakeRegion:
    return FakeRegion(region, lambda outputs: outputs)


def _choose(eager: float, config: Config = CONFIG, cache: TimingCache | None = None, **engines: float) -> Choice:
    region = _region()
    timed = Timed(region, eager, **engines)
    return choose(region, timed.candidates, [X], config, timed.pricing(cache))


def test_the_fastest_candidate_wins() -> None:
    """Measured costs of all contenders are in the decision; losers are NOT_PROFITABLE with both times."""
    choice = _choose(eager=30.0, first=20.0, second=10.0)
    assert choice.decision.engine == "second"
    assert [(cost.engine, cost.microseconds, cost.kind) for cost in choice.decision.costs] == [
        ("first", 20.0, "measured"),
        ("second", 10.0, "measured"),
        ("eager", 30.0, "measured"),
    ]
    (refusal,) = choice.decision.refusals
    assert (refusal.engine, refusal.code) == ("first", Reason.NOT_PROFITABLE)
    assert refusal.why == "it takes 20.0 us, second 10.0 us"
    assert choice.decision.max_error == 0.0
    assert torch.equal(choice.outputs[0], (X @ X).sin())


def test_eager_wins_where_it_is_faster() -> None:
    """A plan that leaves everything to eager is legal."""
    choice = _choose(eager=5.0, first=20.0)
    assert (choice.decision.engine, choice.compiled) == ("eager", None)
    assert choice.decision.refusals[0].code is Reason.NOT_PROFITABLE


def test_order_breaks_ties() -> None:
    """The first of equally fast engines wins, and eager comes last."""
    assert _choose(eager=10.0, first=10.0, second=10.0).decision.engine == "first"


def test_a_second_process_does_not_time_again(tmp_path: Path) -> None:
    """Costs are taken from the cache, and said to be."""
    cache = TimingCache(Store(tmp_path), lambda device: "machine")
    assert _choose(30.0, cache=cache, first=10.0).decision.costs[0].kind == "measured"
    again = _choose(1.0, cache=cache, first=99.0).decision
    assert again.engine == "first"
    assert [(cost.microseconds, cost.kind) for cost in again.costs] == [(10.0, "cached"), (30.0, "cached")]


def test_another_form_is_timed_by_itself(tmp_path: Path) -> None:
    """The cost of an engine's form of a region says nothing of another form."""
    cache = TimingCache(Store(tmp_path), lambda device: "machine")
    for form, cost in (("", 40.0), ("constants", 10.0)):
        timed = Timed(region := _region(), 30.0, first=cost)
        timed.candidates["first"].form = form  # type: ignore[union-attr]
        found = choose(region, timed.candidates, [X], CONFIG, timed.pricing(cache)).decision
        assert [each.kind for each in found.costs] == ["measured"] * 2
        assert found.engine == ("first" if form else "eager")


def test_costs_taken_beside_other_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs taken beside other load tell little: eager wins by a clear margin only, and later processes time again; after three the shortest of
    all are believed."""

    def cache() -> TimingCache:
        return TimingCache(Store(tmp_path), lambda device: "machine")

    waits = iter(range(0, 10**20, 10**18))
    monkeypatch.setattr("torch_hybrid_backend.measuring.other_load.thread_waits", lambda: {"1": next(waits)})
    found = _choose(30.0, cache=cache(), first=40.0).decision
    assert (found.engine, [cost.kind for cost in found.costs]) == ("first", ["disturbed"] * 2)
    assert _choose(20.0, first=40.0).decision.engine == "eager"
    for first in (50.0, 41.0):
        assert _choose(35.0, cache=cache(), first=first).decision.costs[0].microseconds == first
    kept = _choose(1.0, cache=cache(), first=1.0).decision
    assert kept.engine == "first"
    assert [(cost.microseconds, cost.kind) for cost in kept.costs] == [(40.0, "disturbed"), (30.0, "disturbed")]


def test_implausible_costs_are_not_kept(tmp_path: Path) -> None:
    """Kernels far slower than eager lose, but on a loaded machine that may be chance: the next process times them again."""
    cache = TimingCache(Store(tmp_path), lambda device: "machine")
    assert _choose(30.0, cache=cache, first=3000.0).decision.engine == "eager"
    again = _choose(30.0, cache=cache, first=10.0).decision
    assert (again.engine, again.costs[0].kind) == ("first", "measured")


def test_an_estimate_runs_nothing_twice() -> None:
    """placement=estimate: the verification's run is the only one; costs are said to be estimated."""
    region = _region()
    compiled = _fine(region)
    config = Config(placement="estimate")
    choice = choose(region, {"fake": compiled}, [X], config, Pricing())
    assert compiled.calls == 1
    assert {cost.kind for cost in choice.decision.costs} == {"estimated"}
    assert choice.decision.engine == "fake"


def test_without_an_estimate_the_order_decides() -> None:
    """placement=estimate on a device of which nothing is known: nothing is timed, and the first engine that is right runs the region."""
    region = dataclasses.replace(_region(), device=Device("cuda", 1))
    wrong = FakeRegion(region, lambda outputs: [output + 1 for output in outputs])
    candidates = {"wrong": wrong, "first": _fine(region), "second": _fine(region)}
    choice = choose(region, candidates, [X], Config(placement="estimate"), Pricing(device=region.device))
    assert (choice.decision.engine, choice.decision.costs) == ("first", ())
    assert [(r.engine, r.code) for r in choice.decision.refusals] == [
        ("wrong", Reason.ACCURACY),
        ("second", Reason.NOT_PROFITABLE),
    ]
    assert choice.decision.refusals[-1].why == "first comes before it, and there is no estimate of costs on cuda:1"
    alone = choose(region, {"wrong": wrong}, [X], Config(placement="estimate"), Pricing(device=region.device))
    assert alone.decision.engine == "eager"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CompileError("no schedule"), Reason.COMPILE_FAILED),
        (CompilerCrashError("signal 11"), Reason.COMPILER_CRASHED),
        (DeadlineError("late"), Reason.DEADLINE),
        (AccuracyError("its results are too far from eager's"), Reason.ACCURACY),
        (MemoryError("compiling"), Reason.OUT_OF_MEMORY),
        (KeyError("unexpected"), Reason.COMPILE_FAILED),
    ],
)
def test_a_failed_compilation_falls_back(error: Exception, code: Reason, caplog: pytest.LogCaptureFixture) -> None:
    """Eager runs the region; one warning names region, engine and code; strict raises."""
    region = _region()
    choice = choose(region, {"fake": error}, [X], CONFIG, Pricing())
    assert choice.decision.engine == "eager"
    assert [refusal.code for refusal in choice.decision.refusals] == [code]
    assert torch.equal(choice.outputs[0], (X @ X).sin())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert all(part in record.getMessage() for part in (region.name, "fake", code.value))
    with pytest.raises(RegionError, match=code.value) as raised:
        choose(region, {"fake": error}, [X], Config(strict=True), Pricing())
    assert raised.value.__cause__ is error


def test_the_warning_names_the_users_line(caplog: pytest.LogCaptureFixture) -> None:
    """So that the user finds the operator that is not accelerated."""
    module = trace(lambda x: x @ x, X)
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    node.meta["stack_trace"] = '  File "/home/me/model.py", line 12, in forward\n    return x @ x\n'
    (segment,) = partition_graph(module, [FakeEngine()], Config()).graph.segments
    choose(segment.region, {"fake": CompileError("no")}, [X], CONFIG, Pricing())
    assert "(model.py:12 in forward: return x @ x)" in caplog.text


def test_a_region_that_is_too_far_off_is_made_exact() -> None:
    """A region that its engine can compute more accurately is not lost to eager for rounding too much."""
    region = _region()

    class Rounding(FakeRegion):
        def exact(self, deadline: Deadline, error: float) -> CompiledRegion:
            return exact

    exact = _fine(region)
    rounding = Rounding(region, lambda outputs: [output + 1 for output in outputs])
    choice = choose(region, {"fake": rounding}, [X], Config(placement="estimate"), Pricing())
    assert choice.decision.engine == "fake"
    assert choice.compiled is exact
    assert not choice.decision.refusals
    rounding.change = lambda outputs: outputs
    assert choose(region, {"fake": rounding}, [X], Config(placement="estimate"), Pricing()).compiled is rounding


class MoreExactRegion(FakeRegion):
    """A region with `further` more exact forms, each off by half as much as the one before; `asked`: the errors that it was told of."""

    def __init__(self, region: Region, off: float, further: int, attempts: tuple[Attempt, ...] = ()) -> None:
        super().__init__(region, lambda outputs: [output * (1 + off) for output in outputs])
        self.attempts = attempts
        self.off, self.further = off, further
        self.asked: list[float] = []

    def exact(self, deadline: Deadline, error: float) -> CompiledRegion | None:
        self.asked.append(error)
        before = (*self.attempts[:-1], Attempt(f"off by {self.off}", f"a relative error of {error:.1g}"))
        after = Attempt(f"off by {self.off / 2}")
        return MoreExactRegion(self.region, self.off / 2, self.further - 1, (*before, after)) if self.further else None


def test_exact_forms_are_tried_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    """Each is told how far off it is, until one is near enough, or none is left; the plan, or the warning, says what was tried."""
    region, config = _region(), Config(placement="estimate")
    first = MoreExactRegion(region, 0.1, 20)
    decision = choose(region, {"fake": first}, [X], config, Pricing()).decision
    assert decision.engine == "fake"
    assert len(decision.attempts) > 5
    assert decision.attempts[0] == Attempt("off by 0.1", "a relative error of 0.1")
    assert decision.attempts[-1].why == ""
    assert first.asked == [pytest.approx(0.1, rel=1e-3)]
    assert not caplog.records
    choice = choose(region, {"fake": MoreExactRegion(region, 0.1, 1)}, [X], config, Pricing())
    (refusal,) = choice.decision.refusals
    assert refusal.code is Reason.ACCURACY
    assert refusal.why.endswith("with off by 0.05, after a relative error of 0.1 off by 0.1")
    assert choice.decision.attempts == ()
    assert len(caplog.records) == 1


def test_an_exact_form_that_is_built_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """Another engine runs the region until then, nobody is warned, and whoever waits for builds gets it."""
    region = _region()
    attempts = (Attempt("as written", "a relative error of 0.1"), Attempt("exactly"))

    class Building:
        done = False

        def __init__(self) -> None:
            self.attempts = attempts

        def when_done(self, call: Callable[[], None]) -> None: ...

        def result(self) -> CompiledRegion:
            raise AssertionError

        def cancel(self) -> None: ...

    class Rounding(FakeRegion):
        def exact(self, deadline: Deadline, error: float) -> PendingRegion:
            return building

    building = Building()
    assert isinstance(building, PendingRegion)
    rounding = Rounding(region, lambda outputs: [output * 1.1 for output in outputs])
    choice = choose(region, {"fake": rounding}, [X], Config(placement="estimate", strict=True), Pricing())
    assert choice.decision.engine == "eager"
    assert choice.pending == (building,)
    (refusal,) = choice.decision.refusals
    assert refusal.code is Reason.BUILDING
    assert refusal.why == (
        "it is being built with exactly, after a relative error of 0.1 as written; until then another engine runs the region"
    )
    assert torch.equal(choice.outputs[0], (X @ X).sin())
    assert not caplog.records


def test_a_wrong_answer_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    """The call returns eager's answer; the refusal states the error; another candidate still gets its chance."""
    region = _region()
    wrong = FakeRegion(region, lambda outputs: [output + 1 for output in outputs])
    right = _fine(region)
    choice = choose(region, {"wrong": wrong, "right": right}, [X], Config(placement="estimate"), Pricing())
    assert choice.decision.engine == "right"
    (refusal,) = choice.decision.refusals
    assert (refusal.engine, refusal.code) == ("wrong", Reason.ACCURACY)
    assert "by up to 1" in refusal.why
    assert torch.equal(choice.outputs[0], (X @ X).sin())
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeadlineError("late"), Reason.DEADLINE),
        (CompilerCrashError("signal 11"), Reason.COMPILER_CRASHED),
        (KeyError("unexpected"), Reason.RUNTIME_ERROR),
    ],
)
def test_what_the_first_call_cannot_compile(error: Exception, code: Reason) -> None:
    """A region that is too far off, and whose exact form is not ready by the deadline or is not compiled at all: eager runs it, and the plan
    says why."""
    region = _region()

    class Rounding(FakeRegion):
        def exact(self, deadline: Deadline, _error: float) -> CompiledRegion:
            raise error

    rounding = Rounding(region, lambda outputs: [output + 1 for output in outputs])
    choice = choose(region, {"fake": rounding}, [X], CONFIG, Pricing())
    assert choice.decision.engine == "eager"
    assert [refusal.code for refusal in choice.decision.refusals] == [code]
    assert torch.equal(choice.outputs[0], (X @ X).sin())


class Refinable(FakeRegion):
    """A region with a faster form, which a more accurate one backs."""

    def __init__(self, region: Region, faster: FakeRegion, accurate: FakeRegion) -> None:
        super().__init__(region, lambda outputs: outputs)
        self.faster, self.accurate = faster, accurate

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> CompiledRegion:
        self.faster.exact = lambda deadline, error: self.accurate  # type: ignore[attr-defined]
        return self.faster


def test_a_region_is_refined_and_its_accuracy_taken_care_of(caplog: pytest.LogCaptureFixture) -> None:
    """A faster form of the engine's is used, unless it is too far from eager: then what the engine has for that case."""
    region = _region()
    accurate = _fine(region)
    right, wrong = _fine(region), FakeRegion(region, lambda outputs: [output + 1 for output in outputs])
    for faster, expected in ((right, right), (wrong, accurate)):
        choice = choose(region, {"fake": Refinable(region, faster, accurate)}, [X], CONFIG, Pricing())
        assert choice.decision.costs[0].engine == "fake"  # whichever of the two is faster
        assert expected.calls > 1
        assert torch.equal(choice.outputs[0], (X @ X).sin())
    estimate = choose(region, {"fake": Refinable(region, wrong, wrong)}, [X], Config(placement="estimate"), Pricing())
    assert isinstance(estimate.compiled, Refinable)
    assert not caplog.records
    choose(region, {"fake": Refinable(region, wrong, wrong)}, [X], CONFIG, Pricing())
    assert "accuracy" in caplog.text


def test_verify_off_believes_the_engine() -> None:
    """HYBRID_VERIFY=off: nothing is compared, and the engine's own outputs continue the call."""
    region = _region()
    wrong = FakeRegion(region, lambda outputs: [output + 1 for output in outputs])
    config = Config(verify="off", placement="estimate")
    choice = choose(region, {"wrong": wrong}, [X], config, Pricing())
    assert choice.decision.engine == "wrong"
    assert choice.decision.max_error is None
    assert torch.equal(choice.outputs[0], (X @ X).sin() + 1)


@pytest.mark.parametrize("verify", ["first", "off"])
def test_an_engine_that_raises_while_running_falls_back(verify: str, caplog: pytest.LogCaptureFixture) -> None:
    """RUNTIME_ERROR, with the exception's own words on one line."""

    def fail(_: list[torch.Tensor]) -> list[torch.Tensor]:
        raise ValueError("bad\nstrides")

    region = _region()
    choice = choose(region, {"fake": FakeRegion(region, fail)}, [X], Config(verify=verify), Pricing())
    (refusal,) = choice.decision.refusals
    assert (refusal.code, refusal.why) == (Reason.RUNTIME_ERROR, "ValueError: bad strides")
    assert torch.equal(choice.outputs[0], (X @ X).sin())


def test_an_engine_that_raises_while_timed_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    """The others are timed without it."""
    region = _region()

    class Breaking(FakeRegion):
        def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if self.calls:  # not in the run that is verified
                raise OSError("library gone")
            return super().__call__(inputs)

    candidates = {"breaks": Breaking(region, lambda outputs: outputs), "fine": _fine(region)}
    choice = choose(region, candidates, [X], CONFIG, Pricing())
    assert choice.decision.engine in ("fine", "eager")
    assert ("breaks", Reason.RUNTIME_ERROR) in [(r.engine, r.code) for r in choice.decision.refusals]
    assert [cost.engine for cost in choice.decision.costs] == ["fine", "eager"]


def test_engines_hold_nothing_while_eager_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas of large intermediate values are freed before: eager's own come on top of what engines hold."""
    monkeypatch.setattr("torch_hybrid_backend.partition.placement._is_large", lambda compiled: True)
    region = _region()
    timed = Timed(region, 50.0, first=10.0)
    holds: list[bool] = []  # whenever eager is timed

    class Holding(Known):
        held = False

        def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            self.held = True
            return super().__call__(inputs)

        def release(self) -> None:
            self.held = False

    known = timed.candidates["first"]
    assert isinstance(known, Known)
    engine = Holding(region, known.change)
    forward = region.graph_module.forward

    def run(*inputs: Any) -> Any:
        holds.append(engine.held)
        return forward(*inputs)

    region.graph_module.forward = run  # type: ignore[method-assign]
    choice = choose(region, {"first": engine}, [X], CONFIG, timed.pricing())
    assert choice.decision.engine == "first"
    assert [each.microseconds for each in choice.decision.costs] == [10.0, 50.0]
    assert set(holds) == {False}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("when", ["compile", "run", "timed"])
def test_what_leaves_a_device_unusable_is_raised(when: str, strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An error that leaves a device unusable is raised as it is: eager cannot run there either, and who reports it may not be whose fault it
    is. Nobody falls back, nobody is warned of that."""
    region = _region()
    error = accelerator_error("CUDA error: an illegal memory access was encountered", 700)

    class Faulty(FakeRegion):
        def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if when == "run" or self.calls:
                raise error
            return super().__call__(inputs)

    candidate = error if when == "compile" else Faulty(region, lambda outputs: outputs)
    with pytest.raises(torch.AcceleratorError) as raised:
        choose(region, {"fake": candidate, "fine": _fine(region)}, [X], Config(strict=strict), Pricing())
    assert raised.value is error
    assert not caplog.records


def test_what_eager_raises_passes_through() -> None:
    """An error of the user's model is the user's to see, unchanged."""
    region = _region()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        choose(region, {"fake": _fine(region)}, [torch.randn(3, 4)], CONFIG, Pricing())


def test_a_region_that_an_engine_does_not_accept(caplog: pytest.LogCaptureFixture) -> None:
    """The refusal is in the plan; it is no failure: nobody is warned, strict raises nothing, and the others compete."""
    region = _region()
    refused = Refused(Reason.TOO_SMALL, "it has 2 operators")
    candidates = {"picky": refused, "fine": _fine(region)}
    choice = choose(region, candidates, [X], Config(strict=True, placement="estimate"), Pricing())
    assert choice.decision.engine == "fine"
    assert [(r.engine, r.code, r.why) for r in choice.decision.refusals] == [
        ("picky", Reason.TOO_SMALL, "it has 2 operators")
    ]
    alone = choose(region, {"picky": refused}, [X], Config(strict=True), Pricing())
    assert (alone.decision.engine, alone.compiled, len(alone.decision.refusals)) == ("eager", None, 1)
    assert torch.equal(alone.outputs[0], (X @ X).sin())
    assert not caplog.records


def test_the_plan_follows_the_choices() -> None:
    """Operators of a region that eager won are eager's; the plan survives JSON."""
    module = trace(lambda x: torch.sort(x @ x)[0] @ x, X)
    engine = FakeEngine(refuses=["sort"])
    found = partition_graph(module, [engine], Config())
    first, _, last = found.graph.segments
    decisions = [
        choose(first.region, {"fake": CompileError("no")}, [X], CONFIG, Pricing()).decision,
        choose(last.region, {"fake": _fine(last.region)}, [X, X], Config(placement="estimate"), Pricing()).decision,
    ]
    plan = make_plan("graph", "inference", found, decisions)
    assert [(node.operator, node.engine, node.region) for node in plan.nodes] == [
        ("aten.mm.default", "eager", "r0"),
        ("aten.sort.default", "eager", ""),
        ("getitem", "eager", ""),
        ("getitem", "eager", ""),
        ("aten.mm.default", "fake", "r2"),
    ]
    assert Plan.from_json(plan.to_json()) == plan


# Where eager cannot run the region


@torch.library.custom_op("hybrid_tests::no_kernel", mutates_args=())
def no_kernel(x: torch.Tensor) -> torch.Tensor:
    """An operator that eager has no kernel for."""
    raise NotImplementedError("no kernel for this dtype")


@no_kernel.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _doubled(region: Region) -> CompiledRegion:
    class Doubled(FakeRegion):
        def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            self.calls += 1
            return [inputs[0] * 2]

    return Doubled(region, lambda outputs: outputs)


@pytest.mark.parametrize("placement", ["measure", "estimate"])
@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_an_engine_runs_what_eager_cannot(placement: str, verify: str, caplog: pytest.LogCaptureFixture) -> None:
    """Eager refuses the form of the inputs: there is nothing to compare with, and the engine runs it, unchecked; the plan says why."""
    region = _region(no_kernel)
    config = Config(placement=placement, verify=verify, measure_budget_s=0.001)
    choice = choose(region, {"fake": _doubled(region)}, [X], config, Pricing())
    assert torch.equal(choice.outputs[0], X * 2)
    if verify == "off" and placement == "estimate":
        return  # nobody asked eager
    assert (choice.decision.engine, choice.decision.max_error) == ("fake", None)
    assert [cost.engine for cost in choice.decision.costs] == ["fake"]
    assert choice.compiled is not None
    if verify == "off":
        return
    assert [(r.engine, r.code) for r in choice.decision.refusals] == [("eager", Reason.RUNTIME_ERROR)]
    (warning,) = caplog.messages
    assert "unchecked" in warning
    assert "no kernel for this dtype" in warning
    always = checked(region, "fake", choice.compiled, strict=False)
    assert torch.equal(always([X])[0], X * 2)


def test_what_eager_cannot_run_and_no_engine_can() -> None:
    """The user sees eager's own error."""
    region = _region(no_kernel)

    def fail(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        raise ValueError("the engine cannot either")

    for candidates in ({}, {"fake": FakeRegion(region, fail)}):
        with pytest.raises(NotImplementedError, match=r"^no kernel for this dtype$"):
            choose(region, candidates, [X], CONFIG, Pricing())


def test_a_fault_of_the_values_is_not_hidden_by_an_engine() -> None:
    """An index out of range raises as in eager, though the engine would return something."""

    def pick(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(x[0].long(), x)

    region = _region(pick)
    with pytest.raises(IndexError, match="out of range"):
        choose(region, {"fake": _doubled(region)}, [torch.full((8, 8), 9.0)], CONFIG, Pricing())


@pytest.mark.parametrize("config", [CONFIG, Config(placement="estimate"), Config(verify="off", measure_budget_s=0.001)])
def test_candidates_draw_the_random_numbers_of_one_run(config: Config) -> None:
    """Those that eager and its rivals draw while they are compared are the same, and what is drawn while they are timed is drawn for nobody:
    the outputs are those of one run, and the generator is left as by one."""
    engine = FakeEngine()
    engine.draws = True
    function = lambda x: (x + torch.rand_like(x), torch.native_dropout(x, 0.5, True)[1])  # noqa: E731
    (segment,) = partition_graph(trace(function, X), [engine], Config()).graph.segments
    assert segment.engine_hint == "fake"
    (compiled,) = engine.compile([segment.region], Deadline(1.0))
    assert isinstance(compiled, FakeRegion)
    torch.manual_seed(5)
    expected, following = function(X), torch.rand(3)
    torch.manual_seed(5)
    choice = choose(segment.region, {"fake": compiled}, [X], config, Pricing())
    assert not [refusal for refusal in choice.decision.refusals if refusal.code is Reason.ACCURACY]
    assert all(torch.equal(ours, eager) for ours, eager in zip(choice.outputs, expected, strict=True))
    assert torch.equal(torch.rand(3), following)


def test_the_outputs_are_the_winners() -> None:
    """The winner's outputs are what later calls return, to the bit, and not eager's, which only judge them."""
    region = _region()
    near = FakeRegion(region, lambda outputs: [output * (1 + 1e-6) for output in outputs])
    choice = choose(region, {"near": near}, [X], Config(placement="estimate"), Pricing())
    assert choice.decision.engine == "near"
    assert torch.equal(choice.outputs[0], (X @ X).sin() * (1 + 1e-6))
