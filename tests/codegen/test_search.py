"""Variants of kernels: every one is right, the fastest is used, verdicts are kept; with a clock of the test's where times matter."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.engines.tvm.regions_for_tests import compiled_region
from tests.partition.engines_for_tests import trace
from tests.services_for_tests import services
from torch_hybrid_backend.codegen import engine as engine_module
from torch_hybrid_backend.codegen.engine import KernelRegion
from torch_hybrid_backend.codegen.kernel_cache import Artifact, compile_kernels
from torch_hybrid_backend.codegen.search import (
    Candidates,
    CompiledVariant,
    Options,
    fastest,
    limit,
    program_of,
)
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.program import OperatorCall, Program
from torch_hybrid_backend.engines.tvm.cpu import alternatives as variants_module
from torch_hybrid_backend.engines.tvm.engine import TvmEngine
from torch_hybrid_backend.errors import DeadlineError, HybridError
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

pytest.importorskip("tvm")

Arguments = tuple[torch.Tensor, ...]


def _convolution(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The second has two output channel blocks at the least, so that its schedule has choices."""
    return torch.convolution(
        torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).relu(),
        v,
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
    )


CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Arguments]]] = {
    "convolutions": (
        _convolution,
        lambda: (torch.randn(1, 19, 23, 29), torch.randn(67, 19, 3, 3), torch.randn(53, 67, 1, 1)),
    ),
    "matmuls": (lambda x, w: (x @ w).relu() @ w, lambda: (torch.randn(31, 211), torch.randn(211, 211))),
}


class Recorded:
    """A program as a function whose kernels take the times that the test says, by the kernel's name; else as they are."""

    def __init__(self, program: Program, us: Mapping[str, float]) -> None:
        self.program, self.us, self.run = program, us, ProgramRunner(program)
        self.release = self.run.release

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.run(inputs)

    def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
        if self.us.get("fail") == len(self.program.steps):
            raise HybridError("no")
        real = self.run.kernel_us(inputs)
        assert len(real) == len(self.program.steps)
        assert all(us > 0 for us in real)
        names = [k.name if isinstance(k, OperatorCall) else k.symbol for k in self.program.steps]
        return [self.us.get(name, 100.0) for name in names]


def _config(placement: str = "measure") -> Config:
    return Config(placement=placement, compile_threads=2)


def _engine(folder: Path, placement: str = "measure", us: Mapping[str, float] | None = None) -> TvmEngine:
    times = {} if us is None else us
    return TvmEngine(_config(placement), services(folder, lambda program: Recorded(program, times)))


@pytest.mark.parametrize("case", CASES)
def test_every_variant_is_right(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice of a schedule computes what the kernel computes, in float64's eyes."""
    monkeypatch.setattr(engine_module, "_VARIANTS", 8)
    monkeypatch.setattr(engine_module, "limit", lambda candidates: None)
    _, compiled, inputs = compiled_region(_engine(tmp_path), CASES[case])
    assert all(len(option.compiled) > 1 for option in compiled.options)
    exact = CASES[case][0](*(value.double() for value in inputs))
    for position, option in enumerate(compiled.options):
        for variant in option.compiled:
            chosen = [variant if p == position else o.chosen for p, o in enumerate(compiled.options)]
            (result,) = ProgramRunner(program_of(compiled.kernels, chosen))(inputs)
            torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-3)


def test_the_fastest_variant_is_used_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second engine compiles the winner alone and has nothing to find out."""
    us: dict[str, float] = {}
    _, compiled, inputs = compiled_region(_engine(tmp_path, us=us), CASES["convolutions"])
    first = compiled.options[0]
    assert first.is_open
    assert compiled.program.steps[0].symbol == first.compiled[0].artifacts[0].symbol
    us[first.compiled[1].artifacts[0].symbol] = 50.0
    refined = compiled.refine(inputs, 0.01, Deadline(120.0))
    assert refined.options[0].chosen is first.compiled[1]
    assert refined.program.steps[0].symbol == first.compiled[1].artifacts[0].symbol
    assert not any(option.is_open for option in refined.options)
    torch.testing.assert_close(refined(inputs)[0], compiled(inputs)[0], rtol=1e-4, atol=1e-3)
    _, again, _ = compiled_region(_engine(tmp_path), CASES["convolutions"])
    assert [kernel.symbol for kernel in again.program.steps] == [kernel.symbol for kernel in refined.program.steps]
    assert again.refine(inputs, 0.01, Deadline(120.0)) is again
    assert len(again.options[0].compiled) == 1


def test_an_estimate_compiles_no_alternatives(tmp_path: Path) -> None:
    """HYBRID_PLACEMENT=estimate takes the first variant of everything."""
    _, compiled, inputs = compiled_region(_engine(tmp_path, "estimate"), CASES["convolutions"])
    assert all(len(option.compiled) == 1 for option in compiled.options)
    assert compiled.refine(inputs, 0.01, Deadline(120.0)) is compiled
    assert not (tmp_path / "variants").exists()


@pytest.mark.parametrize(("budget_s", "one_by_one"), [(0.0, True), (10.0, False)])
def test_one_run_is_held_at_a_time_where_one_round_spends_the_budget(
    budget_s: float, one_by_one: bool, tmp_path: Path
) -> None:
    """Each set of variants then gives back its memory before the next is made; else all take turns, round after round."""
    alive: set[int] = set()
    held: list[int] = []

    class Counted(ProgramRunner):
        def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
            alive.add(id(self))
            held.append(len(alive))
            return super().kernel_us(inputs)

        def release(self) -> None:
            alive.discard(id(self))
            super().release()

    engine = TvmEngine(_config(), services(tmp_path, Counted))
    _, compiled, inputs = compiled_region(engine, CASES["convolutions"])
    sets = max(len(option.compiled) for option in compiled.options)
    assert sets > 1
    refined = compiled.refine(inputs, budget_s, Deadline(120.0))
    assert not alive
    assert all(option.times for option in refined.options if option.key)
    assert held[: 2 * sets] == ([1] * 2 * sets if one_by_one else [1 + i // 2 for i in range(2 * sets)])


def test_runs_that_fail_choose_nothing(tmp_path: Path) -> None:
    """Where no set of variants can be timed, the first variants stay, and nothing is remembered."""
    _, compiled, inputs = compiled_region(_engine(tmp_path, us={"fail": 2}), CASES["convolutions"])
    assert len(compiled.program.steps) == 2
    refined = compiled.refine(inputs, 0.01, Deadline(120.0))
    assert refined.program == compiled.program
    assert not (tmp_path / "variants").exists()


def _variants(*names: str, inexact: str = "none") -> tuple[Variant, ...]:
    return tuple(Variant(name, (), is_exact=name != inexact) for name in names)


def test_a_later_variant_has_to_be_faster_by_more_than_noise() -> None:
    """Two percent; a variant without a time never wins."""
    names = _variants("", "a", "b")
    assert fastest(names, {}).name == ""
    assert fastest(names, {"": 100, "a": 99, "b": 98.5}).name == ""
    assert fastest(names, {"": 100, "a": 97}).name == "a"
    assert fastest(names, {"": 100, "a": 97, "b": 50}).name == "b"


def test_candidates_follow_what_is_known() -> None:
    """Known times close a choice, unless it is to be completed; beside an inexact winner the exact kernel is known, but not compiled."""
    names = _variants("", "a", "b", inexact="b")
    fresh = Candidates.of("k", names, {})
    assert (fresh.is_open, fresh.best, [v.name for v in fresh.variants]) == (True, 0, ["", "a", "b"])
    known = Candidates.of("k", names, {"": 10.0, "a": 5.0})
    assert (known.is_open, known.best, [v.name for v in known.variants]) == (False, 0, ["a"])
    inexact = Candidates.of("k", names, {"": 10.0, "b": 5.0})
    assert (inexact.is_open, inexact.best, [v.name for v in inexact.variants]) == (False, 0, ["b"])
    assert inexact.exact is names[0]
    few = Candidates.of("k", names, {}, most=2)
    assert (few.is_open, [v.name for v in few.variants]) == (True, ["", "a"])
    tuned = Candidates.of("k", names, {"": 10.0, "b": 5.0}, tuned=True)
    assert (tuned.is_open, tuned.best, [v.name for v in tuned.variants]) == (False, 0, ["b"])
    assert [v.name for v in tuned.untried] == ["a"]


def test_what_is_far_behind_by_estimate_is_not_timed() -> None:
    """Neither another algorithm nor the kernel itself; what is near is, other ways before the kernel itself."""

    def timed(*costs: float) -> list[str]:
        others = [Variant(f"w{n}", (), (), False, n == 0, cost) for n, cost in enumerate(costs)]
        return [v.name for v in Candidates.of("k", (Variant("", ()), *others), {}, most=2).variants]

    assert timed(0.3, 0.4) == ["w0", "w1"]
    assert timed(0.3, 0.6) == ["w0"]
    assert timed(0.7, 1.2) == ["w0", ""]


def _winograd(engine: TvmEngine, deadline: Deadline) -> tuple[KernelRegion, list[torch.Tensor], torch.Tensor]:
    """A convolution for which Winograd's algorithm is in use, its inputs, and its result in float64."""

    def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    inputs = [torch.randn(1, 32, 23, 29), torch.randn(32, 32, 3, 3)]
    (segment,) = partition_graph(trace(convolution, *inputs), [engine], Config()).graph.segments
    constants = (segment.region.inputs[0], dataclasses.replace(segment.region.inputs[1], is_constant=True))
    (compiled,) = engine.compile([dataclasses.replace(segment.region, inputs=constants)], deadline)
    assert isinstance(compiled, KernelRegion)
    assert compiled.options[0].chosen.variant.name.startswith("winograd")
    return compiled, inputs, torch.conv2d(inputs[0].double(), inputs[1].double(), padding=1)


def test_the_exact_kernel_is_compiled_when_it_is_asked_for(tmp_path: Path) -> None:
    """Where Winograd's algorithm is in use and the accuracy check refuses it: then the direct sum is compiled, and right."""
    compiled, inputs, wanted = _winograd(_engine(tmp_path, "estimate"), Deadline(120.0))
    assert len(list((tmp_path / "kernels").rglob("*.so"))) == 1
    exact = compiled.exact(Deadline(120.0))
    assert exact is not None
    assert len(list((tmp_path / "kernels").rglob("*.so"))) == 2
    assert exact.exact(Deadline(120.0)) is None
    torch.testing.assert_close(exact(inputs)[0].double(), wanted, rtol=1e-4, atol=1e-4)


def test_an_exact_kernel_too_late(tmp_path: Path) -> None:
    """The time that compiling the region took is gone, when the first call asks for more; the region itself still runs. What the cache has
    is there without any time."""
    later_s = 0.0
    deadline = Deadline(120.0, lambda: time.monotonic() + later_s)
    engine = _engine(tmp_path, "estimate")
    compiled, inputs, wanted = _winograd(engine, deadline)
    with deadline.running():
        later_s = 120.0
    with pytest.raises(DeadlineError, match="left for it"):
        compiled.exact(deadline)
    torch.testing.assert_close(compiled(inputs)[0].double(), wanted, rtol=1e-4, atol=1e-3)
    again, inputs, wanted = _winograd(engine, deadline)
    torch.testing.assert_close(again(inputs)[0].double(), wanted, rtol=1e-4, atol=1e-3)


def test_an_inexact_choice_can_be_taken_back() -> None:
    """The fastest of the exact variants is what is left."""
    compiled = tuple(CompiledVariant(v, ()) for v in _variants("", "a", "b", inexact="b"))
    options = Options("k", compiled, 0, True, {}).decided({"": 10.0, "a": 8.0, "b": 5.0})
    assert options.chosen.variant.name == "b"
    assert options.with_exact(None).chosen.variant.name == "a"


def test_only_kernels_with_much_work_get_alternatives() -> None:
    """At most a quarter as many alternatives as kernels, most work first; equal kernels count once."""
    names = _variants("", "a")
    of = [
        Candidates.of(key, names, {}, work)
        for key, work in (("x", 1e8), ("x", 1e8), ("y", 1.9e8), ("z", 1e8), ("tiny", 1e5))
    ]
    limit(of, least=0)
    assert [each.is_open for each in of] == [True, True, False, False, False]
    assert [len(each.variants) for each in of] == [2, 2, 1, 1, 1]


def test_tuning_tries_everything_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C keeps what was found out; the next engine tries the rest, one more has nothing to do; the gain is told.

    Three other choices of the schedule, and oneDNN's operator."""
    us: dict[str, float] = {}
    monkeypatch.setattr(variants_module, "_RANKS", 4)
    engine = _engine(tmp_path, "tune", us)
    _, compiled, inputs = compiled_region(engine, CASES["matmuls"])
    assert all(len(option.compiled) == 1 and len(option.untried) == 4 for option in compiled.options)
    monkeypatch.setattr(engine_module, "compile_kernels", _Interrupting(us))
    stopped = compiled.refine(inputs, 0.01, Deadline(120.0))
    assert [len(option.untried) for option in stopped.options] == [3, 3]
    assert stopped.options[0].chosen.variant.name == "choice 1"
    torch.testing.assert_close(stopped(inputs)[0], compiled(inputs)[0], rtol=1e-4, atol=1e-3)
    monkeypatch.undo()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("stopped")
    assert said[1].startswith("tuned r0: 2 of 2 kernels faster, 0.20 ms to 0.10 ms (50.0% less)")
    monkeypatch.setattr(variants_module, "_RANKS", 4)
    _, resumed, _ = compiled_region(_engine(tmp_path, "tune", us), CASES["matmuls"])
    assert [len(option.untried) for option in resumed.options] == [3, 3]
    assert [option.chosen.variant.name for option in resumed.options] == ["choice 1", "choice 1"]
    done = resumed.refine(inputs, 0.01, Deadline(120.0))
    assert not any(option.untried for option in done.options)
    _, again, _ = compiled_region(_engine(tmp_path, "tune", us), CASES["matmuls"])
    assert again.refine(inputs, 0.01, Deadline(120.0)) is again
    _, measured, _ = compiled_region(_engine(tmp_path, "measure", us), CASES["matmuls"])
    assert [option.chosen.variant.name for option in measured.options] == ["choice 1", "choice 1"]


class _Interrupting:
    """Compiles once, says that the kernels are fast, and is interrupted as a user would the second time."""

    def __init__(self, us: dict[str, float]) -> None:
        self.us, self.calls = us, 0

    def __call__(self, kernels: Sequence[Kernel], *how: object) -> list[Artifact | Exception]:
        self.calls += 1
        if self.calls > 1:
            raise KeyboardInterrupt
        made = compile_kernels(kernels, *how)  # type: ignore[arg-type]
        self.us.update({kernel.symbol: 50.0 for kernel in made if isinstance(kernel, Artifact)})
        return made
