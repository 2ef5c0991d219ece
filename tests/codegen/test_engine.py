"""The engine of kernels: what it compiles of a region, what it finds out on the first call, and what it keeps."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from tests.codegen.search_for_tests import CASES, engine_in
from tests.engines.cpu.regions_for_tests import compiled_region
from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.codegen.engine import KernelRegion
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.errors import CompileError, DeadlineError
from torch_hybrid_backend.partition.regions import partition_graph

pytest.importorskip("tvm")


def test_the_fastest_variant_is_used_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second engine compiles the winner alone and has nothing to find out."""
    us: dict[str, float] = {}
    _, compiled, inputs = compiled_region(engine_in(tmp_path, us=us), CASES["convolutions"])
    first = compiled.options[0]
    assert first.is_open
    assert compiled.program.steps[0].symbol == first.compiled[0].artifacts[0].symbol
    us[first.compiled[1].artifacts[0].symbol] = 50.0
    refined = compiled.refine(inputs, 0.01, Deadline(120.0))
    assert refined.options[0].chosen is first.compiled[1]
    assert refined.program.steps[0].symbol == first.compiled[1].artifacts[0].symbol
    assert not any(option.is_open for option in refined.options)
    torch.testing.assert_close(refined(inputs)[0], compiled(inputs)[0], rtol=1e-4, atol=1e-3)
    _, again, _ = compiled_region(engine_in(tmp_path), CASES["convolutions"])
    assert [kernel.symbol for kernel in again.program.steps] == [kernel.symbol for kernel in refined.program.steps]
    assert again.refine(inputs, 0.01, Deadline(120.0)) is again
    assert len(again.options[0].compiled) == 1


def test_kernels_tell_whose_time_they_take(tmp_path: Path) -> None:
    """Each names the operators that it computes, what it keeps in registers of them too; another one is nobody's."""
    x, w, v = torch.randn(1, 8, 20, 20), torch.randn(16, 8, 3, 3), torch.randn(24, 16, 1, 1)

    def model(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = torch.conv2d(x, w).relu()
        return torch.conv2d(first + first.amax((2, 3), keepdim=True), v).sigmoid()

    _, compiled, inputs = compiled_region(engine_in(tmp_path), (model, lambda: (x, w, v)))
    parts = compiled.operator_us(inputs)
    assert len(parts) == len(compiled.options)
    assert all(us > 0 for _, us in parts)
    owner = {name: position for position, (names, _) in enumerate(parts) for name in names}
    assert {"convolution", "relu", "amax", "convolution_1"} <= owner.keys()
    assert owner["convolution"] == owner["relu"] != owner["convolution_1"]
    assert owner["sigmoid"] == owner["convolution_1"]


def test_an_estimate_compiles_no_alternatives(tmp_path: Path) -> None:
    """HYBRID_PLACEMENT=estimate takes the first variant of everything."""
    _, compiled, inputs = compiled_region(engine_in(tmp_path, "estimate"), CASES["convolutions"])
    assert all(len(option.compiled) == 1 for option in compiled.options)
    assert compiled.refine(inputs, 0.01, Deadline(120.0)) is compiled
    assert not (tmp_path / "variants").exists()


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
    """The direct sum is compiled where the accuracy check refuses Winograd's algorithm, and is right."""
    compiled, inputs, wanted = _winograd(engine_in(tmp_path, "estimate"), Deadline(120.0))
    assert len(list((tmp_path / "kernels").rglob("*.so"))) == 1
    exact = compiled.exact(Deadline(120.0), 0.1)
    assert exact is not None
    assert len(list((tmp_path / "kernels").rglob("*.so"))) == 2
    assert exact.exact(Deadline(120.0), 0.1) is None
    torch.testing.assert_close(exact(inputs)[0].double(), wanted, rtol=1e-4, atol=1e-4)


def test_the_variants_that_another_process_chose(tmp_path: Path) -> None:
    """Variants are taken by name, whatever is known of times here. Those that were not compiled are; a name that does not exist is an error."""
    compiled, inputs, wanted = _winograd(engine_in(tmp_path, "estimate"), Deadline(120.0))
    assert compiled.with_variants(compiled.variants, Deadline(120.0)) is compiled
    direct = compiled.with_variants([""], Deadline(120.0))
    assert direct.variants == ("",)
    assert direct.refine(inputs, 0.01, Deadline(120.0)) is direct
    torch.testing.assert_close(direct(inputs)[0].double(), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(CompileError, match="no variant 'fft' here, only"):
        compiled.with_variants(["fft"], Deadline(120.0))
    with pytest.raises(CompileError, match="has 1 kernels here, not 2"):
        compiled.with_variants(["", ""], Deadline(120.0))


def test_an_exact_kernel_too_late(tmp_path: Path) -> None:
    """The time that compiling the region took is gone, when the first call asks for more; the region itself still runs. What the cache has
    is there without any time."""
    later_s = 0.0
    deadline = Deadline(120.0, lambda: time.monotonic() + later_s)
    engine = engine_in(tmp_path, "estimate")
    compiled, inputs, wanted = _winograd(engine, deadline)
    with deadline.running():
        later_s = 120.0
    with pytest.raises(DeadlineError, match="left for it"):
        compiled.exact(deadline, 0.1)
    torch.testing.assert_close(compiled(inputs)[0].double(), wanted, rtol=1e-4, atol=1e-3)
    again, inputs, wanted = _winograd(engine, deadline)
    torch.testing.assert_close(again(inputs)[0].double(), wanted, rtol=1e-4, atol=1e-3)
