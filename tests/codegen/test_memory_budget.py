"""Kernels that get weights which take more memory, under a budget."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.codegen.regions_for_tests import region_of
from tests.codegen.search_for_tests import Recorded
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.assemble import RegionKernels, assemble
from torch_hybrid_backend.codegen.engine import KernelRegion
from torch_hybrid_backend.codegen.memory_budget import Choice, within_budget
from torch_hybrid_backend.codegen.variants import variants
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.engines.cpu.target import Target

_SMALL, _LARGE = (
    64 * 64 * 9 * 4,
    64 * 128 * 9 * 4,
)  # bytes of the two weights; Winograd F(4x4) takes 4.1 times as much, F(2x2) 1.9


def _two(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    return convolution(convolution(x, w).relu(), v)


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 64, 20, 20), torch.randn(64, 64, 3, 3), torch.randn(128, 64, 3, 3)]


def _region() -> Region:
    return region_of(_two, *_inputs())


def _choices(times: list[dict[str, float]]) -> tuple[list[Choice], RegionKernels]:
    """The kernels of the two convolutions with times of their variants."""
    target = Target.named("x86-64-v4")
    kernels = assemble(_region(), TvmBackend(target))
    constants = {packed.buffer: packed for packed in kernels.packed}
    choices = []
    for kernel, known in zip(kernels.kernels, times, strict=True):
        found = variants(kernel, TvmBackend(target).alternatives(kernel, constants))
        timed = [variant for variant in found if variant.name in known]
        others = [variant for variant in timed if variant is not found[0]]
        choices.append(Choice((found[0], *others), min(timed, key=lambda v: known[v.name]), known, 1e6))
    return choices, kernels


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (math.inf, ["winograd 4", "winograd 4"]),
        (None, ["winograd 4", "winograd 4"]),  # the default does not limit small models
        (3.2, ["winograd 4", "winograd 4"]),
        # The first kernel gains less, but more per byte; what it leaves is enough for the smaller form of the second.
        (2.0, ["winograd 4", "winograd 2"]),
        (1.1, ["winograd 4", ""]),
        (0.5, ["winograd 2", ""]),
        (0.0, ["", ""]),
    ],
)
def test_kernels_that_gain_most_per_byte_come_first(budget: float | None, expected: list[str]) -> None:
    """The budget is a share of the weights' bytes; a kernel whose fastest form does not fit has the fastest that does."""
    first = {"": 100.0, "winograd 4": 60.0, "winograd 2": 80.0}
    second = {"": 200.0, "winograd 4": 150.0, "winograd 2": 170.0}
    choices, kernels = _choices([first, second])
    assert [variant.name for variant in within_budget(choices, kernels.packed, budget)] == expected


def test_no_budget_is_needed_for_what_is_not_larger() -> None:
    """Another schedule of the same weight is used under every budget."""
    choices, kernels = _choices([{"choice 1": 50.0}, {"choice 1": 70.0, "winograd 4": 90.0}])
    assert [variant.name for variant in within_budget(choices, kernels.packed, 0.0)] == ["choice 1", "choice 1"]


def _engine(folder: Path, budget: float, placement: str, us: dict[str, float] | None = None) -> TvmEngine:
    config = Config(placement=placement, compile_threads=2, memory_budget=budget)
    return TvmEngine(config, services(folder, lambda program: Recorded(program, us or {})))


def _compiled(engine: TvmEngine) -> KernelRegion:
    (made,) = engine.compile([_region()], Deadline(120.0))
    assert isinstance(made, KernelRegion)
    return made


def _packed_bytes(region: KernelRegion) -> int:
    program = region.program
    return sum(program.buffers[constant.buffer].size_bytes for constant in program.constants)


def test_estimates_keep_the_budget(tmp_path: Path) -> None:
    """Without times what estimates prefer has to fit, too, and results are right."""
    pytest.importorskip("tvm")
    free = _compiled(_engine(tmp_path, math.inf, "estimate"))
    assert any(name.startswith("winograd") for name in free.variants)
    tight = _compiled(_engine(tmp_path, 0.0, "estimate"))
    assert tight.variants == ("", "")
    assert _packed_bytes(tight) == _SMALL + _LARGE < _packed_bytes(free)
    inputs = _inputs()
    torch.testing.assert_close(tight(inputs)[0], _two(*inputs), rtol=1e-4, atol=1e-3)


def test_what_was_timed_keeps_the_budget(tmp_path: Path) -> None:
    """Kernels are chosen by their times and by what the budget allows, in the process that takes the times and in the next."""
    pytest.importorskip("tvm")
    us: dict[str, float] = {}
    inputs, compiled = _inputs(), _compiled(_engine(tmp_path, 0.0, "measure", us))
    for option in compiled.options:
        for each in option.compiled:
            us[each.artifacts[0].symbol] = 10.0 if each.variant.name.startswith("winograd") else 50.0
    refined = compiled.refine(inputs, 0.01, Deadline(120.0))
    assert not any(name.startswith("winograd") for name in refined.variants)
    assert _packed_bytes(refined) == _SMALL + _LARGE
    torch.testing.assert_close(refined(inputs)[0], _two(*inputs), rtol=1e-4, atol=1e-3)
    again = _compiled(_engine(tmp_path, 0.0, "measure"))
    assert again.refine(inputs, 0.01, Deadline(120.0)) is again
    assert _packed_bytes(again) == _SMALL + _LARGE
    free = _compiled(_engine(tmp_path, math.inf, "measure"))
    assert all(name.startswith("winograd") for name in free.variants)
