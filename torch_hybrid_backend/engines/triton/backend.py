"""The Triton engine's `KernelBackend`: kernels of an NVIDIA GPU, printed as Triton programs. Nothing here imports Triton."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch

from torch_hybrid_backend.codegen.anchors import Anchor, neutral_kernel
from torch_hybrid_backend.codegen.backend import row_major
from torch_hybrid_backend.codegen.compiler import KernelCompilerModule
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.operands import Packed, Prepared
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import KernelText
from torch_hybrid_backend.core.program import NULL, DeviceLaunch, ScalarArgument, Step
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.triton import compiler
from torch_hybrid_backend.engines.triton.alternatives import alternatives
from torch_hybrid_backend.engines.triton.artifact import read as read_artifact
from torch_hybrid_backend.engines.triton.aten import aten_variants
from torch_hybrid_backend.engines.triton.host_driver import HostLaunch
from torch_hybrid_backend.engines.triton.installed import NO_GPU, described
from torch_hybrid_backend.engines.triton.kernels import attention_kernel
from torch_hybrid_backend.engines.triton.layouts import channels_last_layouts
from torch_hybrid_backend.engines.triton.policy import DETERMINISTIC, POLICY
from torch_hybrid_backend.engines.triton.schedules import schedule_of
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.split import split
from torch_hybrid_backend.engines.triton.standalone import standalone
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.fusion import Group
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.ir import AttentionGradientOp, AttentionOp, Buffer
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes
from torch_hybrid_backend.loops.layout import Layout
from torch_hybrid_backend.loops.policy import FusionPolicy
from torch_hybrid_backend.loops.random_numbers import BLOCK
from torch_hybrid_backend.loops.sdpa_matching import match_sdpa
from torch_hybrid_backend.machine import float32_precision
from torch_hybrid_backend.sizes.size import Dim, as_size, product

# What a launch hands to a kernel besides its own parameters is Triton's to change, and it has. With these kernels have been compiled.
_FIRST_VERSION, _END_VERSION = (3, 6), (3, 10)
_VERSIONS = "triton>=3.6,<3.10"
_LEAST_CAPABILITY = 80  # bfloat16, asynchronous copies and TF32 begin there


class TritonBackend:
    """Kernels for `device`, the first GPU unless said otherwise; for `target`, where that is given, whatever the GPU is."""

    name: str = "triton"
    compiler: KernelCompilerModule = compiler
    timed_variants: int = 3  # beside ATen's; how often a tiling beats the model's first was not measured

    def __init__(
        self, target: Target | None = None, device: Device | None = None, operators: bool | None = None
    ) -> None:
        """operators: ATen's take the place of kernels where they are faster; by default not of interpreted ones, which are there to be run."""
        self._target = target
        is_interpreted = target is not None and target.is_interpreted
        self.device: Device = device or (CPU if is_interpreted else Device("cuda", 0))
        self._operators = not is_interpreted if operators is None else operators

    def on(self, device: Device) -> TritonBackend:
        return TritonBackend(self._target or _target_of(device), device, self._operators)

    @property
    def target(self) -> Target:
        return self._target or _target_of(self.device)

    @property
    def policy(self) -> FusionPolicy:
        """The policy of the moment: Dynamo compiles anew where the setting has changed."""
        policy = DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else POLICY
        abilities = dataclasses.replace(policy.abilities, random_blocks=self.target.random_blocks)
        return dataclasses.replace(policy, abilities=abilities)

    def available(self) -> Verdict:
        if self._target is None:
            if not torch.cuda.is_available():
                return NO_GPU
            if torch.version.hip is not None:
                return Refused(
                    Reason.DEVICE,
                    "its kernels are for NVIDIA's GPUs, and this torch is built for AMD's (torch.version.hip): its operators run in eager",
                )
            chips = [f"cuda:{device.index} is sm_{target.capability}" for device, target in _gpus()]
            if all(target.capability < _LEAST_CAPABILITY for _, target in _gpus()):
                return _too_old(", ".join(chips))
        elif not self._target.is_interpreted and self._target.capability < _LEAST_CAPABILITY:
            return _too_old(f"{self.device} is sm_{self._target.capability}")
        return _installed(compiler.version())

    def compiles(self) -> Verdict:
        return Supported()

    def describe(self) -> Sequence[tuple[str, str]]:
        found = [(self.device, self._target)] if self._target is not None else _gpus()
        return described([f"{d}: sm_{t.capability}, {t.multiprocessors} multiprocessors" for d, t in found])

    def operands(self, graph: LoopGraph, layouts: Mapping[Buffer, Layout]) -> Prepared:
        return Prepared(match_sdpa(graph, gathers=self.policy.gathers_in_attention))

    def layouts(self, groups: Sequence[Group], fixed: Mapping[Buffer, Layout]) -> Mapping[Buffer, Layout]:
        return channels_last_layouts(groups, fixed, self.target) if self._operators else row_major(groups, fixed)

    def anchor(self, anchor: Anchor) -> Kernel:
        if isinstance(anchor.op, AttentionOp | AttentionGradientOp):
            return attention_kernel(anchor)
        return neutral_kernel(anchor)

    def join(self, kernels: Sequence[Kernel], outputs: Collection[Buffer]) -> Sequence[Kernel]:
        return [part for kernel in kernels for part in split(kernel, self.target)]

    def alternatives(self, kernel: Kernel, constants: Mapping[Buffer, Packed]) -> Sequence[Variant]:
        """ATen's first, which is then the preferred one, where it may stand for a kernel."""
        kernels = alternatives(kernel, self.target)
        operators = aten_variants(kernel, self.target) if self._operators else ()
        if operators:
            kernels = [dataclasses.replace(variant, is_preferred=False) for variant in kernels]
        return (*operators, *kernels)

    def step(
        self, kernel: Kernel, artifact: Artifact, arguments: tuple[int, ...], working: Callable[[Dim], int]
    ) -> Step:
        """A launch on the GPU, or by the interpreter's driver."""
        launch: Launch = schedule_of(kernel).launch(kernel, self.target)
        header, _ = read_artifact(Path(artifact.path))
        # Triton's own memory, which each program has its part of; nothing of ours asks for what its profiler wants.
        programs = product(launch.grid)
        scratch = working(header.scratch_bytes * programs) if header.scratch_bytes else NULL
        launched = HostLaunch if self.target.is_interpreted else DeviceLaunch
        return launched(
            artifact.path,
            header.symbol,
            arguments,
            len(kernel.writes),
            launch.grid,
            header.threads,
            tuple(ScalarArgument("int64" if s.is_wide else "int32", as_size(s)) for s in kernel_sizes(kernel)),
            header.shared_bytes,
            (scratch, NULL),
        )

    def text(self, kernel: Kernel, artifact: Artifact, step: Step) -> KernelText:
        """The program that was compiled, as a file that runs alone."""
        assert isinstance(step, DeviceLaunch)
        launch: Launch = schedule_of(kernel).launch(kernel, self.target)
        header, _ = read_artifact(Path(artifact.path))
        return KernelText(step.symbol, standalone(kernel, artifact.symbol, header, step, launch), ".py")


def _gpus() -> list[tuple[Device, Target]]:
    if not torch.cuda.is_available():
        return []
    devices = [Device("cuda", index) for index in range(torch.cuda.device_count())]
    return [(device, _target_of(device)) for device in devices]


def _target_of(device: Device) -> Target:
    """The target of a GPU, under torch's settings as they are now. Dynamo guards the precision of products, not that of convolutions: whoever
    changes that after a model was compiled has to call `torch.compiler.reset()`."""
    properties = torch.cuda.get_device_properties(device.index)
    products, convolutions = (precision == "tf32" for precision in float32_precision(device.type))
    capability = 10 * properties.major + properties.minor
    count = properties.multi_processor_count
    blocks = count * (properties.max_threads_per_multi_processor // BLOCK)
    return Target(capability, count, products, convolution_tf32=convolutions, random_blocks=blocks)


def _too_old(chips: str) -> Refused:
    return Refused(
        Reason.DEVICE,
        f"a GPU must be one of NVIDIA's of compute capability 8.0 (sm_80, Ampere) or later, and {chips}: its operators run in eager",
    )


def _installed(version: str) -> Verdict:
    """Supported if kernels can be compiled with this version of Triton; "" where there is none."""
    if not version:
        return Refused(Reason.MISSING_DEPENDENCY, f"triton is not installed: pip install '{_VERSIONS}'")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not _FIRST_VERSION <= (int(numbers[1]), int(numbers[2])) < _END_VERSION:
        return Refused(
            Reason.MISSING_DEPENDENCY,
            f"triton must be one of {_VERSIONS}, whose kernels it knows how to launch, and {version} is installed: use a torch that comes with"
            f" one of these, or pip install '{_VERSIONS}'",
        )
    return Supported()
