"""The backend's choices, and what it refuses without a GPU."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engines.cpu.kernels_for_tests import scale_kernel
from tests.fake_devices import FakeDevices
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.engine import KernelRegion
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import NULL, Callback, DeviceLaunch
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported
from torch_hybrid_backend.engines.triton import compiler
from torch_hybrid_backend.engines.triton.artifact import Header, read, write
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.engine import TritonEngine
from torch_hybrid_backend.engines.triton.host_driver import HostLaunch
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target
from torch_hybrid_backend.generators import Taken
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.runtime.plan_layout import NumbersTaken, Piece, lay_out
from torch_hybrid_backend.sizes.size import Dim


class Gpus:
    """Answers of torch.cuda of GPUs that are not there, by their compute capabilities."""

    def __init__(self) -> None:
        self.capabilities = [80, 90]

    def properties(self, index: int) -> SimpleNamespace:
        major, minor = divmod(self.capabilities[index], 10)
        return SimpleNamespace(
            major=major,
            minor=minor,
            multi_processor_count={75: 40, 80: 108, 90: 132}[10 * major + minor],
            max_threads_per_multi_processor=2048,
        )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    found = Gpus()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found.capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.properties)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_not_there() -> None:
    """A reason of its own: nothing is missing that could be installed."""
    verdict = TritonBackend().available()
    assert isinstance(verdict, Refused)
    assert verdict.code is Reason.NO_DEVICE
    assert dict(TritonBackend().describe())["GPU"] == "none"


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [
        ("", False),
        ("3.5.1", False),
        ("3.6.0", True),
        ("3.7.1+git5", True),
        ("3.9.0", True),
        ("3.10.0", False),
        ("main", False),
    ],
)
def test_only_versions_of_triton_that_it_knows(version: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton may change what a launch hands to a kernel: another version is refused, with what to install."""
    monkeypatch.setattr(compiler, "version", lambda: version)
    verdict = TritonBackend(Target(90, 132)).available()
    assert isinstance(verdict, Supported if is_taken else Refused)
    if isinstance(verdict, Refused):
        assert verdict.code is Reason.MISSING_DEPENDENCY
        assert "pip install 'triton>=3.6,<3.10'" in verdict.why
        assert f"{version} is installed" in verdict.why or not version


@pytest.mark.parametrize("others", [[], [80]])
def test_a_gpu_that_is_too_old(others: list[int], gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old GPU is named. Beside another the engine is there, and refuses what is on the old one."""
    gpus.capabilities[:] = [75, *others]
    monkeypatch.setattr(compiler, "version", lambda: "3.7.1")
    backend = TritonBackend()
    verdict = backend.on(Device("cuda", 0)).available()
    assert isinstance(verdict, Refused)
    assert verdict.code is Reason.DEVICE
    assert "8.0 (sm_80, Ampere) or later, and cuda:0 is sm_75" in verdict.why
    assert isinstance(backend.available(), Supported if others else Refused)
    assert all(backend.on(Device("cuda", 1 + i)).available() for i in range(len(others)))
    assert next(value for name, value in backend.describe() if name == "GPU") == "cuda:0: sm_75, 40 multiprocessors"


def test_a_torch_for_other_gpus(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's are called "cuda" too."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    verdict = TritonBackend().available()
    assert isinstance(verdict, Refused)
    assert (verdict.code, "built for AMD's" in verdict.why) == (Reason.DEVICE, True)


def test_a_target_is_that_of_the_moment(gpus: Gpus) -> None:
    """Products and convolutions each follow torch's setting for them, set in the old way or the new one."""
    backend = TritonBackend()
    assert (backend.on(Device("cuda", 1)).target.tf32, backend.target.convolution_tf32) == (False, True)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert backend.on(Device("cuda", 1)).target.tf32
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert not backend.on(Device("cuda", 1)).target.tf32
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_where_kernels_run() -> None:
    """On the first GPU unless another is asked for; interpreted ones on the CPU."""
    assert TritonBackend(Target(90, 132)).device == Device("cuda", 0)
    assert TritonBackend(Target(90, 132)).on(Device("cuda", 3)).device == Device("cuda", 3)
    assert TritonBackend(INTERPRETER).on(CPU).device == CPU
    pytest.importorskip("triton")
    assert isinstance(TritonBackend(INTERPRETER).available(), Supported)


@pytest.mark.parametrize("target", [Target(90, 132), Target(90, 132, is_interpreted=True)])
def test_a_kernel_is_a_launch(target: Target, tmp_path: Path) -> None:
    """A launch has as many programs as there are blocks, with what the compiler says that they need. Of Triton's two scratch addresses the
    second one is null; the first one is memory for all programs where they need some."""
    asked: list[Dim] = []

    def working(size: Dim) -> int:
        asked.append(size)
        return 9

    path = tmp_path / "a.kernel"
    write(path, Header("", "scale_0d1d", {"x": "*fp32", "y": "*fp32"}, {}, 256, 4096), b"code")
    step = TritonBackend(target).step(scale_kernel(5000), Artifact(str(path), "scale", "key"), (3, 7), working)
    assert type(step) is (HostLaunch if target.is_interpreted else DeviceLaunch)
    assert isinstance(step, DeviceLaunch)
    assert (step.module, step.symbol, step.arguments, step.writes) == (str(path), "scale_0d1d", (3, 7), 1)
    assert (step.grid, step.threads, step.shared_bytes, step.scratch) == ((5, 1, 1), 256, 4096, (NULL, NULL))
    assert not asked
    write(path, Header("", "scale_0d1d", {"x": "*fp32", "y": "*fp32"}, {}, 256, 4096, 384), b"code")
    step = TritonBackend(target).step(scale_kernel(5000), Artifact(str(path), "scale", "key"), (3, 7), working)
    assert isinstance(step, DeviceLaunch)
    assert (step.scratch, step.written, asked) == ((9, NULL), (7, 9), [5 * 384])


def test_each_gpu_has_code_of_its_own(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Regions of an Ampere and of a Hopper in one graph: each is compiled for its own, and timings of one are not those of the other."""
    pytest.importorskip("triton")

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sin(x) + 1, torch.sin(y) + 1

    config = dataclasses.replace(Config(), placement="estimate", compile_threads=1)
    engine = TritonEngine(config, services(tmp_path))
    devices = FakeDevices()
    inputs = [devices.tensor(64, device=f"cuda:{index}") for index in range(2)]
    captured = devices.captured(function, *inputs, keep_ops=list(engine.keep_ops))
    gpus: Gpus = request.getfixturevalue("gpus")  # not before: Dynamo would use them
    regions = [s.region for s in partition_graph(captured.graph_module, [engine], config).graph.segments]
    assert {str(region.device) for region in regions} == {"cuda:0", "cuda:1"}
    assert all(engine.accepts(region) for region in regions)
    for region, compiled in zip(regions, engine.compile(regions, Deadline(300.0)), strict=True):
        assert isinstance(compiled, KernelRegion), compiled
        assert compiled.program.device == region.device
        (launch,) = compiled.program.steps
        assert isinstance(launch, DeviceLaunch)
        _, code = read(Path(launch.module))
        # Of the ELF header: the lowest byte is the architecture, in CUDA 13's form the second one.
        (flags,) = struct.unpack_from("<I", code, 48)
        assert gpus.capabilities[region.device.index] in (flags & 0xFF, flags >> 8 & 0xFF)
    assert engine.version(Device("cuda", 0)) != engine.version(Device("cuda", 1))


def test_the_state_of_the_generator_is_passed_by_value(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Eager's kernels have as many blocks as the multiprocessors hold. A call's seed and counters are numbers that a callback hands over before
    the launches; each of these takes those that it needs."""
    pytest.importorskip("triton")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten.native_dropout.default(torch.sin(x), 0.5, True)[0].sum(1, keepdim=True)
        return torch.ops.aten.native_dropout.default(torch.sin(x * y), 0.5, True)[0]

    config = dataclasses.replace(Config(), placement="estimate", compile_threads=1)
    engine = TritonEngine(config, services(tmp_path))
    devices = FakeDevices()
    inputs = [devices.tensor(64, 600, device="cuda:1")]
    captured = devices.captured(function, *inputs, keep_ops=list(engine.keep_ops))
    request.getfixturevalue("gpus")
    (segment,) = partition_graph(captured.graph_module, [engine], config).graph.segments
    (compiled,) = engine.compile([segment.region], Deadline(300.0))
    assert isinstance(compiled, KernelRegion), compiled
    random = compiled.program.random
    assert random is not None
    assert random.taken == (1, 1)
    for buffer in (random.seed, *random.counters):
        spec = compiled.program.buffers[buffer]
        assert (spec.shape, spec.dtype, spec.device) == ((), "int64", CPU)
    launches = [step for step in compiled.program.steps if isinstance(step, DeviceLaunch)]
    taken = [[b for b in random.counters if b in launch.arguments] for launch in launches]
    assert sorted(counter for each in taken for counter in each) == sorted(random.counters)
    for launch, numbers in zip(launches, taken, strict=True):
        header, _ = read(Path(launch.module))
        assert [*header.signature.values()].count("i64") == len(numbers) + bool(numbers)
    names, outputs = tuple(segment.inputs), tuple(segment.outputs)
    specs = tuple(region_input.spec for region_input in segment.region.inputs)
    piece = Piece(names, specs, outputs, segment.region.outputs, compiled.program)
    layout = lay_out(frozenset(names), frozenset(), [piece], outputs)
    first, *others = (planned.step for planned in layout.steps)
    assert isinstance(first, Callback)
    (function,) = layout.functions
    assert isinstance(function, NumbersTaken)
    assert function.at({}) == Taken(Device("cuda", 1), (1, 1))
    assert all(isinstance(step, DeviceLaunch) for step in others)
    assert len(layout.from_programs) == len(launches)
    assert TritonBackend(device=Device("cuda", 1)).policy.abilities.random_blocks == 132 * 8
