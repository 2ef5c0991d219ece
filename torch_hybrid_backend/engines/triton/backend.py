"""The Triton engine's `KernelBackend`: kernels of an NVIDIA GPU, printed as Triton programs. Nothing here imports Triton."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from torch_hybrid_backend.codegen.anchors import Anchor, neutral_kernel
from torch_hybrid_backend.codegen.backend import row_major
from torch_hybrid_backend.codegen.compiler import KernelCompilerModule
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.operands import Packed, Prepared
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.codegen.written_attention import find_attention
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import NULL, DeviceLaunch, ScalarArgument, Step
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.triton import compiler
from torch_hybrid_backend.engines.triton.artifact import read as read_artifact
from torch_hybrid_backend.engines.triton.interpreted import InterpretedLaunch
from torch_hybrid_backend.engines.triton.kernels import FlashKernel, attention_kernel, split_along_keys, with_scores
from torch_hybrid_backend.engines.triton.policy import POLICY
from torch_hybrid_backend.engines.triton.schedules import attention, schedule_of
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.fusion import Group
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.ir import AttentionGradientOp, Buffer, ScoredAttentionOp
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes
from torch_hybrid_backend.loops.layout import Layout
from torch_hybrid_backend.loops.policy import FusionPolicy
from torch_hybrid_backend.sizes.size import symbol

_VERSIONS = "triton>=3.6,<3.8"


class TritonBackend:
    """Kernels for `target`; without one, for the process's first GPU."""

    name: str = "triton"
    compiler: KernelCompilerModule = compiler
    policy: FusionPolicy = POLICY

    def __init__(self, target: Target | None = None) -> None:
        self._target = target
        self.device: Device = CPU if target is not None and target.is_interpreted else Device("cuda", 0)

    @functools.cached_property
    def target(self) -> Target:
        return self._target or _found_target()

    def available(self) -> Verdict:
        if self._target is None and not torch.cuda.is_available():
            return Refused(Reason.NO_DEVICE, "there is no GPU that this torch can use (torch.cuda.is_available())")
        if self._target is None and (torch.version.hip is not None or self.target.capability < 80):
            return Refused(Reason.NO_DEVICE, "the GPU must be one of NVIDIA's of compute capability 8.0 or later")
        if importlib.util.find_spec("triton") is None:
            return Refused(Reason.MISSING_DEPENDENCY, f"triton is not installed: pip install '{_VERSIONS}'")
        return Supported()

    def describe(self) -> Sequence[tuple[str, str]]:
        where = "none"
        if self._target is not None or torch.cuda.is_available():
            where = f"sm_{self.target.capability}, {self.target.multiprocessors} multiprocessors"
        return (("triton", compiler.version() or "not installed"), ("GPU", where))

    def operands(self, graph: LoopGraph, layouts: Mapping[Buffer, Layout]) -> Prepared:
        return Prepared(with_scores(find_attention(graph)))

    def layouts(self, groups: Sequence[Group], fixed: Mapping[Buffer, Layout]) -> Mapping[Buffer, Layout]:
        return row_major(groups, fixed)

    def anchor(self, anchor: Anchor) -> Kernel:
        if isinstance(anchor.op, ScoredAttentionOp | AttentionGradientOp):
            return attention_kernel(anchor)
        return neutral_kernel(anchor)

    def join(self, kernels: Sequence[Kernel], outputs: Collection[Buffer]) -> Sequence[Kernel]:
        return kernels

    def alternatives(self, kernel: Kernel, constants: Mapping[Buffer, Packed]) -> Sequence[Variant]:
        parts = attention.parts_of_keys(kernel, self.target) if isinstance(kernel, FlashKernel) else 1
        if not isinstance(kernel, FlashKernel) or parts == 1:
            return ()
        return (Variant(f"keys in {parts} parts", split_along_keys(kernel, parts), is_preferred=True, cost=1 / parts),)

    def step(self, kernel: Kernel, artifact: Artifact, arguments: tuple[int, ...]) -> Step:
        """A launch on the GPU, or by the interpreter."""
        launch: Launch = schedule_of(kernel).launch(kernel, self.target)
        header, _ = read_artifact(Path(artifact.path))
        launched = InterpretedLaunch if self.target.is_interpreted else DeviceLaunch
        return launched(
            artifact.path,
            header.symbol,
            arguments,
            len(kernel.writes),
            launch.grid,
            header.threads,
            tuple(ScalarArgument("int32", symbol(size.name, size.hint)) for size in kernel_sizes(kernel)),
            header.shared_bytes,
            (NULL, NULL),  # Triton's own scratch memory: no kernel of ours asks for it
        )


def _found_target() -> Target:
    properties = torch.cuda.get_device_properties(0)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return Target(10 * properties.major + properties.minor, properties.multi_processor_count, tf32)
