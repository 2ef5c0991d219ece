"""Variants of kernels: every one is right, the fastest is used, verdicts are kept; with a clock of the test's where times matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.codegen.search_for_tests import CASES, config, engine_in
from tests.engines.cpu.regions_for_tests import compiled_region
from tests.services_for_tests import services
from torch_hybrid_backend.codegen import engine as engine_module
from torch_hybrid_backend.codegen.search import (
    CompiledVariant,
    KernelOptions,
    fastest,
    limited,
    program_of,
)
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.errors import RefusedValuesError
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

pytest.importorskip("tvm")


@pytest.mark.parametrize("case", CASES)
def test_every_variant_is_right(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice of a schedule computes what the kernel computes, in float64's eyes."""
    monkeypatch.setattr(TvmBackend, "timed_variants", 8)
    monkeypatch.setattr(engine_module, "limited", lambda options, further: list(options))
    _, compiled, inputs = compiled_region(engine_in(tmp_path), CASES[case])
    assert all(len(option.compiled) > 1 for option in compiled.options)
    exact = CASES[case][0](*(value.double() for value in inputs))
    for position, option in enumerate(compiled.options):
        for variant in option.compiled:
            chosen = [variant if p == position else o.chosen for p, o in enumerate(compiled.options)]
            (result,) = ProgramRunner(program_of(compiled.kernels, chosen))(inputs)
            torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("budget_s", "most_bytes", "one_by_one"), [(0.0, 1 << 30, True), (10.0, 1 << 30, False), (1.0, 0, True)]
)
def test_one_run_is_held_at_a_time_where_one_round_spends_the_budget_or_arenas_are_large(
    budget_s: float, most_bytes: int, one_by_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set of variants then gives back its memory before the next is made; else all take turns, round after round."""
    monkeypatch.setattr("torch_hybrid_backend.codegen.search.MAX_HELD_BYTES", most_bytes)
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

    engine = TvmEngine(config(), services(tmp_path, Counted))
    _, compiled, inputs = compiled_region(engine, CASES["convolutions"])
    sets = max(len(option.compiled) for option in compiled.options)
    assert sets > 1
    refined = compiled.refine(inputs, budget_s, Deadline(120.0))
    assert not alive
    assert all(option.times for option in refined.options if option.key)
    assert held[: 2 * sets] == ([1] * 2 * sets if one_by_one else [1 + i // 2 for i in range(2 * sets)])
    assert budget_s == 0 or held.count(1 if one_by_one else sets) > 2 * sets


def test_runs_that_fail_choose_nothing(tmp_path: Path) -> None:
    """The first variants stay where no set of variants can be timed, and nothing is remembered."""
    _, compiled, inputs = compiled_region(engine_in(tmp_path, us={"fail": 2}), CASES["convolutions"])
    assert len(compiled.program.steps) == 2
    refined = compiled.refine(inputs, 0.01, Deadline(120.0))
    assert refined.program == compiled.program
    assert not (tmp_path / "variants").exists()


def test_values_that_eager_refuses_say_nothing_of_variants(tmp_path: Path) -> None:
    """The caller is told: no variant is to be blamed, and nothing is remembered."""

    class Refusing(ProgramRunner):
        def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
            raise RefusedValuesError("a flag is set")

    _, compiled, inputs = compiled_region(TvmEngine(config(), services(tmp_path, Refusing)), CASES["convolutions"])
    with pytest.raises(RefusedValuesError):
        compiled.refine(inputs, 0.01, Deadline(120.0))
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


def test_options_follow_what_is_known() -> None:
    """Known times close a choice, unless it is to be completed; beside an inexact winner the exact kernel is known, but not compiled."""
    names = _variants("", "a", "b", inexact="b")
    fresh = KernelOptions.of("k", names, {})
    assert (fresh.is_open, fresh.best, [v.name for v in fresh.to_compile]) == (True, 0, ["", "a", "b"])
    known = KernelOptions.of("k", names, {"": 10.0, "a": 5.0})
    assert (known.is_open, known.best, [v.name for v in known.to_compile]) == (False, 0, ["a"])
    inexact = KernelOptions.of("k", names, {"": 10.0, "b": 5.0})
    assert (inexact.is_open, inexact.best, [v.name for v in inexact.to_compile]) == (False, 0, ["b"])
    assert inexact.exact is names[0]
    few = KernelOptions.of("k", names, {}, most=2)
    assert (few.is_open, [v.name for v in few.to_compile]) == (True, ["", "a"])
    tuned = KernelOptions.of("k", names, {"": 10.0, "b": 5.0}, tuned=True)
    assert (tuned.is_open, tuned.best, [v.name for v in tuned.to_compile]) == (False, 0, ["b"])
    assert [v.name for v in tuned.untried] == ["a"]


def test_what_is_far_behind_by_estimate_is_not_timed() -> None:
    """Neither another algorithm nor the kernel itself; what is near is, other ways before the kernel itself."""

    def timed(*costs: float) -> list[str]:
        others = [Variant(f"w{n}", (), (), False, n == 0, cost) for n, cost in enumerate(costs)]
        return [v.name for v in KernelOptions.of("k", (Variant("", ()), *others), {}, most=2).to_compile]

    assert timed(0.3, 0.4) == ["w0", "w1"]
    assert timed(0.3, 0.6) == ["w0"]
    assert timed(0.7, 1.2) == ["w0", ""]


def test_an_inexact_choice_can_be_taken_back() -> None:
    """The fastest of the exact variants is what is left."""
    compiled = tuple(CompiledVariant(v, ()) for v in _variants("", "a", "b", inexact="b"))
    options = KernelOptions("k", compiled=compiled, is_open=True).decided({"": 10.0, "a": 8.0, "b": 5.0})
    assert options.chosen.variant.name == "b"
    assert options.with_exact(None).chosen.variant.name == "a"


def test_only_kernels_with_much_work_get_alternatives() -> None:
    """At most a quarter as many alternatives as kernels, most work first; equal kernels count once."""
    names = _variants("", "a")
    of = [
        KernelOptions.of(key, names, {}, work)
        for key, work in (("x", 1e8), ("x", 1e8), ("y", 1.9e8), ("z", 1e8), ("tiny", 1e5))
    ]
    of = limited(of, least=0)
    assert [each.is_open for each in of] == [True, True, False, False, False]
    assert [len(each.to_compile) for each in of] == [2, 2, 1, 1, 1]
