"""oneDNN in place of single kernels: right for every shape it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.codegen.search_for_tests import TWO_LAYERS
from tests.engines.cpu.regions_for_tests import compiled_region
from tests.services_for_tests import services
from torch_hybrid_backend.codegen import engine as engine_module
from torch_hybrid_backend.codegen.engine import KernelRegion
from torch_hybrid_backend.codegen.library_probe import operator_us
from torch_hybrid_backend.codegen.search import CompiledVariant, compiled_variant, program_of
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.program import OperatorCall, Program
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.measuring.measure import HostTimer
from torch_hybrid_backend.partition.accuracy import compare
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

pytest.importorskip("tvm")
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")

Arguments = tuple[torch.Tensor, ...]


def _conv(
    x: torch.Tensor, w: torch.Tensor, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1
) -> torch.Tensor:
    each = x.dim() - 2
    return torch.convolution(
        x, w, None, [stride] * each, [padding] * each, [dilation] * each, False, [0] * each, groups
    )


def _randn(*shapes: tuple[int, ...]) -> Callable[[], Arguments]:
    return lambda: tuple(map(torch.randn, shapes))


# The first argument changes from call to call, the others are constants, and so is what is named `b` (a bias of the last layer).
CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Arguments]]] = {
    "two layers": (
        lambda x, v, w: _conv(_conv(x, v, padding=1).relu(), w, groups=3).sigmoid(),
        _randn((2, 19, 13, 11), (21, 19, 3, 3), (33, 7, 1, 1)),
    ),
    "one channel": (lambda x, w: _conv(x, w, padding=2).relu(), _randn((1, 1, 31, 29), (5, 1, 5, 5))),
    "one pixel": (lambda x, w: _conv(x, w, padding=1), _randn((1, 17, 1, 1), (23, 17, 3, 3))),
    "strided, dilated": (
        lambda x, w: _conv(x, w, stride=3, padding=4, dilation=2),
        _randn((3, 8, 23, 37), (16, 8, 3, 3)),
    ),
    "depthwise": (lambda x, w: _conv(x, w, padding=1, groups=37), _randn((1, 37, 9, 10), (37, 1, 3, 3))),
    "one dimension": (lambda x, w: _conv(x, w, stride=2, padding=1).exp(), _randn((2, 13, 41), (7, 13, 3))),
    "residual": (
        lambda x, v, w: (_conv(_conv(x, v), w) + _conv(x, v)).relu(),
        _randn((1, 32, 7, 7), (48, 32, 1, 1), (48, 48, 1, 1)),
    ),
    "channels last": (
        lambda x, w: _conv(x, w, padding=1),
        lambda: (
            torch.randn(1, 16, 8, 9).contiguous(memory_format=torch.channels_last),
            torch.randn(8, 16, 3, 3).contiguous(memory_format=torch.channels_last),
        ),
    ),
    "linear": (
        lambda x, w, b: torch.nn.functional.gelu(torch.mm(x, w) + b),
        lambda: (torch.randn(31, 67), torch.randn(53, 67).t(), torch.randn(53)),
    ),
    "one row": (torch.mm, lambda: (torch.randn(1, 128), torch.randn(96, 128).t())),
    "plain (N, K)": (
        lambda x, w: torch.mm(x.relu(), w),
        lambda: (torch.randn(128, 256), torch.randn(1536, 256).t()),
    ),
    "plain (K, N)": (lambda x, w: torch.mm(x, w).relu(), _randn((128, 256), (256, 1536))),
    "two equal layers": TWO_LAYERS,
}


def _narrow(dtype: torch.dtype, *shapes: tuple[int, ...]) -> Callable[[], Arguments]:
    return lambda: tuple(torch.randn(shape).to(dtype) for shape in shapes)


# Layers that multiply narrow floats: as autocast leaves them, casts around them included.
LOW = torch.bfloat16
NARROW: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Arguments]]] = {
    "bfloat16 layers": (
        lambda x, v, w: _conv(_conv(x, v, padding=1).relu(), w, groups=3).sigmoid(),
        _narrow(LOW, (2, 19, 13, 11), (21, 19, 3, 3), (33, 7, 1, 1)),
    ),
    "bfloat16 of a float32 image": (
        lambda x, w: _conv(x.to(LOW), w, stride=2, padding=1).float().exp(),
        lambda: (torch.randn(1, 16, 9, 9), torch.randn(8, 16, 3, 3).div(8).to(LOW)),
    ),
    "bfloat16 channels last": (
        lambda x, w: _conv(x, w, padding=1),
        lambda: (
            torch.randn(1, 16, 8, 9).to(LOW, memory_format=torch.channels_last),
            torch.randn(8, 16, 3, 3).to(LOW, memory_format=torch.channels_last),
        ),
    ),
    "bfloat16 linear": (
        lambda x, b, w: torch.nn.functional.gelu(torch.addmm(b, x.to(LOW), w)),
        lambda: (torch.randn(31, 67), torch.randn(53).to(LOW), torch.randn(53, 67).to(LOW).t()),
    ),
    "float16 linear": (torch.mm, _narrow(torch.float16, (16, 64), (64, 48))),
}


def _counted(case: str) -> int:
    return {"two layers": 2, "residual": 3, "two equal layers": 2, "bfloat16 layers": 2}.get(case, 1)


def _engine(folder: Path, placement: str = "measure") -> TvmEngine:
    return TvmEngine(Config(placement=placement, compile_threads=2), services(folder))


def _with_operators(engine: TvmEngine, compiled: KernelRegion) -> tuple[Program, int]:
    """The region's program with oneDNN wherever it has an operator, and how many they are."""
    chosen: list[CompiledVariant] = []
    for option in compiled.options:
        for variant in option.untried:
            assert operator_us(variant, CPU, HostTimer()) > 0
            made = compiled_variant(
                variant, engine.built(variant.kernels, compiled.kernels.backend.target, Deadline(120.0))
            )
            assert isinstance(made, CompiledVariant), made
            chosen.append(made)
        if not option.untried:
            chosen.append(option.chosen)
    program = program_of(compiled.kernels, chosen)
    return program, sum(isinstance(kernel, OperatorCall) for kernel in program.steps)


@pytest.mark.parametrize("case", CASES)
def test_operators_compute_what_kernels_compute(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, strides, groups, all ways that weights and images lie; and a weight that changes is seen."""
    monkeypatch.setattr(engine_module, "limited", lambda options, further: list(options))
    monkeypatch.setattr(TvmBackend, "timed_variants", 1)
    engine = _engine(tmp_path)
    _, compiled, inputs = compiled_region(engine, CASES[case])
    program, operators = _with_operators(engine, compiled)
    assert operators == _counted(case)
    run = ProgramRunner(program)
    for _ in range(2):
        exact = CASES[case][0](*(value.double() for value in inputs))
        (result,) = run(inputs)
        torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-4)
        inputs[1].mul_(1.5)
    assert len(run.kernel_us(inputs)) == len(program.steps)


@pytest.mark.parametrize("case", NARROW)
def test_narrow_floats_are_multiplied_as_they_are(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gets narrow operands and gives results about as near to float64's as eager's are; eager's layer rounds as often."""
    monkeypatch.setattr(engine_module, "limited", lambda options, further: list(options))
    monkeypatch.setattr(TvmBackend, "timed_variants", 1)
    engine = _engine(tmp_path)
    region, compiled, inputs = compiled_region(engine, NARROW[case])
    variants = [variant for option in compiled.options for variant in option.untried]
    assert len(variants) == _counted(case)
    try:
        program, operators = _with_operators(engine, compiled)
    except RuntimeError as error:
        pytest.skip(f"oneDNN does not multiply such numbers on this processor: {error}")
    assert operators == _counted(case)
    run = ProgramRunner(program)
    for _ in range(2):
        comparison = compare(region, inputs, list(region.graph_module(*inputs)), run(inputs))
        assert not comparison.why
        for constant in inputs[1:]:
            constant.mul_(1.5)
