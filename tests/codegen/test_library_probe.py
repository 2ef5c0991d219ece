"""Probing libraries: which kernels give way to an operator, with times that the test says."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.codegen.search_for_tests import TWO_LAYERS, engine_in, without_tiles
from tests.engines.cpu.regions_for_tests import compiled_region
from tests.services_for_tests import services
from torch_hybrid_backend.codegen import library_probe
from torch_hybrid_backend.codegen.search import ALONE
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.program import OperatorCall, Program
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.measuring.measure import Timer
from torch_hybrid_backend.partition.placement import decide
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

pytest.importorskip("tvm")
pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN"),
    pytest.mark.usefixtures("without_tiles"),
]
__all__ = ["without_tiles"]  # the fixture


@pytest.mark.parametrize(
    ("alone_us", "in_place_us", "is_taken"),
    [(95.0, 60.0, True), (950.0, 60.0, False), (95.0, 1000.0, False), (None, 60.0, False)],
)
def test_a_slow_kernel_gives_way(
    alone_us: float | None, in_place_us: float, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of two equal ones is slow. Its operator is tried where it is faster alone (None: it cannot run), taken where it is so
    in the kernel's place; the other layer's is not even timed. The plan names what was taken, and the next process knows all of it."""
    us: dict[str, float] = {"mkldnn::_linear_pointwise": in_place_us}
    asked: list[str] = []

    class Timed(ProgramRunner):
        def __init__(self, program: Program) -> None:
            super().__init__(program)
            self._names = [k.name if isinstance(k, OperatorCall) else k.symbol for k in program.steps]

        def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
            assert len(super().kernel_us(inputs)) == len(self._names)
            return [us.get(name, 100.0) for name in self._names]

    def alone(variant: Variant, device: Device, timer: Timer) -> float:
        asked.append(variant.name)
        if alone_us is None:
            raise RuntimeError("there is no such operator")
        return alone_us

    monkeypatch.setattr(library_probe, "operator_us", alone)
    monkeypatch.setattr(TvmBackend, "timed_variants", 1)
    engine = TvmEngine(Config(compile_threads=2), services(tmp_path, Timed))
    _, compiled, inputs = compiled_region(engine, TWO_LAYERS)
    slow, _ = compiled.options
    us[slow.chosen.artifacts[0].symbol] = 1000.0
    refined = compiled.refine(inputs, 0.0, Deadline(120.0))
    assert asked == ["onednn"]
    assert refined.options[1].times == {"": 100.0, "onednn" + ALONE: math.inf}
    expected = {"": 1000.0, "onednn" + ALONE: math.inf if alone_us is None else alone_us}
    if alone_us == 95.0:  # what is behind it takes 100
        expected["onednn"] = in_place_us + 100.0
    assert refined.options[0].times == pytest.approx(expected)
    named = ("mkldnn::_linear_pointwise: linear layer of 64x200 by 200x200",) if is_taken else ()
    assert decide(compiled.kernels.region, "tvm", refined).operators == named
    (result,) = refined(inputs)
    torch.testing.assert_close(result, TWO_LAYERS[0](*inputs), rtol=1e-4, atol=1e-3)

    _, again, _ = compiled_region(engine, TWO_LAYERS)
    assert again.refine(inputs, 0.0, Deadline(120.0)) is again
    assert decide(again.kernels.region, "tvm", again).operators == named
    exact = again.exact(Deadline(120.0), 0.1)
    assert (exact is not None) == is_taken
    assert exact is None or not decide(again.kernels.region, "tvm", exact).operators


@pytest.mark.parametrize("spent", [True, False])
def test_an_operator_too_late(spent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call compiles nothing after the deadline, nor on while it passes: the kernels that are there are used, and nothing is kept
    against the operator. The next process, which has time, takes it."""
    slow: list[str] = []

    class Timed(ProgramRunner):
        def __init__(self, program: Program) -> None:
            super().__init__(program)
            self._names = [k.name if isinstance(k, OperatorCall) else k.symbol for k in program.steps]

        def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
            return [1000.0 if name in slow else 100.0 for name in self._names]

    monkeypatch.setattr(library_probe, "operator_us", lambda variant, device, timer: 90.0)
    monkeypatch.setattr(TvmBackend, "timed_variants", 1)
    engine = TvmEngine(Config(compile_threads=2), services(tmp_path, Timed))
    _, compiled, inputs = compiled_region(engine, TWO_LAYERS)
    slow.append(compiled.options[0].chosen.artifacts[0].symbol)
    deadline = Deadline(1e-9)
    if spent:
        with deadline.running():
            time.sleep(0.001)
    kernels = len(list((tmp_path / "kernels").rglob("*.so")))
    late = compiled.refine(inputs, 0.0, deadline)
    assert deadline.is_over()
    assert len(list((tmp_path / "kernels").rglob("*.so"))) == kernels
    assert late.program == compiled.program
    assert late.options[0].times == {"": 1000.0}
    wanted = TWO_LAYERS[0](*inputs)
    torch.testing.assert_close(late(inputs)[0], wanted, rtol=1e-4, atol=1e-3)

    _, again, _ = compiled_region(engine, TWO_LAYERS)
    in_time = again.refine(inputs, 0.0, Deadline(120.0))
    assert in_time.options[0].chosen.variant.name == "onednn"
    torch.testing.assert_close(in_time(inputs)[0], wanted, rtol=1e-4, atol=1e-3)


def test_an_estimate_takes_no_operator(tmp_path: Path) -> None:
    """HYBRID_PLACEMENT=estimate tries nothing."""
    _, compiled, inputs = compiled_region(engine_in(tmp_path, "estimate"), TWO_LAYERS)
    assert compiled.refine(inputs, 0.01, Deadline(120.0)) is compiled
    assert not any(option.untried or option.is_open for option in compiled.options)
