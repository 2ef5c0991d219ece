"""The zoo's smallest models, exported for other processors and run on processors that QEMU emulates: the answers are those of the kernels that
were checked against eager here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_hybrid_backend
from benchmarks.catalogue import MODELS
from tests.artifact.exported_for_tests import FAST, manifest_of
from tests.runner.machines import ARM, RISCV, X86, Machine, needed
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.partition.deviation import relative_error
from torch_hybrid_backend.report.explanation import Explanation

# By the number of their parameters, at their small size.
SMALLEST = (
    *("lstm", "darknet53", "t5_small_encoder", "distilbert", "bert_base", "llama_small", "efficientnet_b0"),
    "regnet_y",
)
AS_WRITTEN = "as-written"
# How far from eager outputs may be, as a share of them (root mean square): all layers are converted, those too that would return to float32.
ERRORS = {AS_WRITTEN: 1e-5, "bf16": 0.1, "int8": 0.15}


@dataclass(frozen=True)
class Processor:
    """A target, and a processor of QEMU that has its features and few others."""

    target: str
    machine: Machine
    cpu: str


V1 = Processor("neoverse-v1", ARM, "max")
N1 = Processor("neoverse-n1", ARM, "neoverse-n1")
A72 = Processor("armv8-a", ARM, "cortex-a72")
V3 = Processor("x86-64-v3", X86, "Haswell")
V2 = Processor("x86-64-v2", X86, "Nehalem")
RVV = Processor("rv64gcv", RISCV, "rv64,v=true")
# QEMU 7.2 ends at instructions that cut float32 to integers (vfcvt.rtz), which other models of the zoo have.
WITHOUT_CUTS = ("lstm", "darknet53", "distilbert")

CASES = [
    *[(V1, name, precision) for name in SMALLEST for precision in ERRORS],
    *[(N1, name, "int8") for name in SMALLEST],
    *[(A72, name, AS_WRITTEN) for name in SMALLEST],
    *[(V3, name, precision) for name in SMALLEST for precision in (AS_WRITTEN, "int8")],
    *[(V2, name, AS_WRITTEN) for name in SMALLEST],
    *[(RVV, name, AS_WRITTEN) for name in WITHOUT_CUTS],
]
_QUICK = {(V1, "distilbert", AS_WRITTEN), (V1, "distilbert", "int8")}  # seconds each; the others take the same paths


def _marked(case: tuple[Processor, str, str]) -> Any:
    processor, name, precision = case
    marks = () if case in _QUICK else pytest.mark.full
    return pytest.param(*case, id=f"{processor.target}-{name}-{precision}", marks=marks)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def hybrid_run(request: pytest.FixtureRequest) -> Callable[[Processor], Path]:
    """The program for a processor: this machine's own for x86-64, as the emulator needs no other."""

    def program(processor: Processor) -> Path:
        if processor.machine is not X86:
            return needed(processor.machine).folder / "bin/hybrid-run"
        if shutil.which(X86.emulator[0]) is None:
            pytest.skip(f"needs {X86.emulator[0]}: apt-get install qemu-user")
        if not set(Target.named(processor.target).features) <= set(Target.host().features):
            pytest.skip(f"this processor is below {processor.target}")
        return request.getfixturevalue("installed") / "bin/hybrid-run"

    return program


def _answers(
    program: Path, processor: Processor, path: Path, inputs: Sequence[torch.Tensor], count: int
) -> list[np.ndarray]:
    """The outputs of a call of a file on the emulated processor, by two threads; first it makes the file's sample call."""
    files: list[object] = []
    for number, tensor in enumerate(inputs):
        np.save(path.with_name(f"x{number}.npy"), tensor.numpy())
        files += ["--input", path.with_name(f"x{number}.npy")]
    outputs = [path.with_name(f"y{number}.npy") for number in range(count)]
    for output in outputs:
        files += ["--output", output]
    done = processor.machine.runs(program, path, *files, "--threads", 2, emulator=("-cpu", processor.cpu))
    assert done.returncode == 0, done.stderr
    return [np.load(output) for output in outputs]


@pytest.mark.parametrize(("processor", "name", "precision"), [_marked(case) for case in CASES])
def test_the_zoo(
    processor: Processor, name: str, precision: str, hybrid_run: Callable[[Processor], Path], tmp_path: Path
) -> None:
    """On other inputs than the sample's. Nothing is left to eager or to PyTorch."""
    program, entry, path = hybrid_run(processor), MODELS[name], tmp_path / "model.hybrid"
    model, inputs = entry.build("small"), entry.inputs("small", 2, 1)
    options = {**FAST, "target": processor.target, "precision": precision, "precision_tolerance": 1.0}
    report = torch_hybrid_backend.export(model, entry.inputs("small", 2, 0), path, options=options)
    assert not report.python_parts
    assert not report.needs_torch
    with torch.no_grad():
        eager = _tensors(model(*inputs))
        here = _tensors(torch.compile(model, backend="hybrid", options={**options, "prefer_kernels": True})(*inputs))
    there = [torch.from_numpy(each) for each in _answers(program, processor, path, _tensors(inputs), len(eager))]
    (sample,) = manifest_of(path).samples
    for one, other, expected in zip(there, here, eager, strict=True):
        assert (one - other).abs().max() <= sample.tolerance * other.abs().max()
        error = relative_error(expected, one)
        assert error is not None
        assert error <= ERRORS[precision]


def _tensors(values: object) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


class _Functions(nn.Module):
    """Functions of which some call libm, and conversions: what differs between architectures."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        functions = (
            *(
                torch.exp,
                torch.log,
                torch.tanh,
                torch.sigmoid,
                torch.erf,
                torch.sin,
                torch.atan,
                torch.asin,
                torch.sinh,
            ),
            *(
                torch.floor,
                torch.ceil,
                torch.round,
                torch.sqrt,
                torch.rsqrt,
                torch.expm1,
                torch.log1p,
                torch.exp2,
                torch.sign,
            ),
            *(
                nn.functional.gelu,
                nn.functional.silu,
                nn.functional.softplus,
                nn.functional.relu,
                nn.functional.hardswish,
            ),
        )
        pairs = (torch.add, torch.mul, torch.div, torch.minimum, torch.maximum, torch.pow, torch.atan2, torch.fmax)
        halves = (x.half(), x.bfloat16().float(), x.half().exp().float(), x.half() * 3)
        reductions = (x.softmax(-1), x.amax(-1), x.argmax(-1), x.sum(-1), x.double().exp(), x.isnan())
        return (*(f(x) for f in functions), *(f(x, y) for f in pairs), *halves, *reductions)


def _specials(seed: int) -> torch.Tensor:
    """(4, 67) float32, of which the first row has the numbers at which formats and functions end."""
    torch.manual_seed(seed)
    x = torch.randn(4, 67) * torch.tensor([1.0, 10.0, 0.1, 100.0])[:, None]
    inf, nan = float("inf"), float("nan")
    ends = [0.0, inf, nan, 1e-45, 1e-40, 1.17549435e-38, 3.4e38, 0.5, 1.5, 2.5, 88.7, 89, 104, 6e-8, 65504, 65520, 1e9]
    special = torch.tensor([*ends, *(-each for each in ends)])
    x[0, seed : seed + len(special)] = special
    return x


@pytest.mark.full
@pytest.mark.parametrize("processor", [V1, A72, RVV, V3, V2], ids=lambda processor: processor.target)
def test_functions_at_the_ends_of_formats(
    processor: Processor, hybrid_run: Callable[[Processor], Path], tmp_path: Path
) -> None:
    """NaN, infinities, signs of zeros, denormal numbers and float16's ends are as here; functions of libm may round otherwise."""
    program, path, model = hybrid_run(processor), tmp_path / "model.hybrid", _Functions().eval()
    options = {**FAST, "target": processor.target, "prefer_kernels": True}
    torch.manual_seed(0)
    ordinary = (torch.randn(4, 67), torch.randn(4, 67))
    report = torch_hybrid_backend.export(model, ordinary, path, options=options)
    assert not report.needs_torch
    compiled = torch.compile(model, backend="hybrid", options=options)
    inputs = (_specials(0), _specials(5))
    with torch.no_grad():
        compiled(*ordinary)
        here = compiled(*inputs)
    there = [torch.from_numpy(each) for each in _answers(program, processor, path, inputs, len(here))]
    for number, (one, other) in enumerate(zip(there, here, strict=True)):
        told = f"output {number}"
        torch.testing.assert_close(
            one, other, rtol=1e-6, atol=0, equal_nan=True, msg=lambda text, told=told: f"{told}: {text}"
        )
        signs = [each[~other.isnan()].sign() for each in (one.signbit(), other.signbit())]
        assert torch.equal(*signs), told


def test_a_file_for_a_level_has_the_kernels_of_live_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file for x86-64-v3 loses nothing beside HYBRID_TARGET=x86-64-v3 on this machine: the plan calls the same kernels, and none is compiled
    anew."""
    if not set(Target.named(V3.target).features) <= set(Target.host().features):
        pytest.skip(f"this processor is below {V3.target}")
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    entry = MODELS["darknet53"]
    model, inputs = entry.build("small"), entry.inputs("small", 2, 0)
    options = {**FAST, "target": V3.target}
    report = torch_hybrid_backend.export(model, inputs, tmp_path / "model.hybrid", options=options)
    made = _libraries(tmp_path / "cache")
    with torch.no_grad():
        live = torch_hybrid_backend.explain(model, *inputs, options={**options, "prefer_kernels": True})
    assert _kernels(live) == _kernels(report.explanation)
    assert made
    assert _libraries(tmp_path / "cache") == made


def _libraries(cache: Path) -> list[str]:
    return sorted(path.stem for path in cache.rglob("*.so"))


def _kernels(explanation: Explanation) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.engine, each.kernels) for plan in explanation.plans for each in plan.regions]
