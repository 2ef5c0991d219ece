"""The TVM engine's `KernelBackend`: kernels of a processor, printed as TIR."""

from __future__ import annotations

import functools
import importlib.util
import platform
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from torch_hybrid_backend.codegen.anchors import Anchor
from torch_hybrid_backend.codegen.compiler import KernelCompilerModule
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.operands import Packed, Prepared
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import KernelText
from torch_hybrid_backend.core.program import KernelCall, Step
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.cpu.convolution_fusion import fuse_convolutions
from torch_hybrid_backend.engines.cpu.layouts import blocked_layouts
from torch_hybrid_backend.engines.cpu.operands.packed_operands import packed_kernel, packed_operands
from torch_hybrid_backend.engines.cpu.policy import POLICY
from torch_hybrid_backend.engines.cpu.target import NATIVE, Target
from torch_hybrid_backend.engines.cpu.tir import compiler
from torch_hybrid_backend.engines.cpu.tir.linker import INSTALL, NO_LINKER, find_linker, lacking_linker
from torch_hybrid_backend.engines.cpu.variants.alternatives import alternatives
from torch_hybrid_backend.errors import ConfigError
from torch_hybrid_backend.loops.fusion import Group
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes
from torch_hybrid_backend.loops.layout import Layout
from torch_hybrid_backend.loops.policy import FusionPolicy
from torch_hybrid_backend.loops.sdpa_matching import match_sdpa
from torch_hybrid_backend.machine import may_use_tiles
from torch_hybrid_backend.sizes.size import Dim, as_size

# Machines of this architecture make kernels for others too: of the others' instructions there are forms that run anywhere (`tir/arm.py`).
_CROSS_COMPILES = "x86_64"


class TvmBackend:
    """Kernels for `target`; without one, for the processor this process runs on, with no more of it than PyTorch uses and Linux permits.

    `TvmBackend.for_setting` makes one for a named target."""

    name: str = "tvm"
    device: Device = CPU
    compiler: KernelCompilerModule = compiler
    policy: FusionPolicy = POLICY
    timed_variants: int = 2  # a third is worth 0.8 % at most (docs/performance.md)

    def __init__(self, target: Target | None = None) -> None:
        self._target = target

    @staticmethod
    def for_setting(name: str, *, times: bool = True) -> TvmBackend:
        """The backend for the setting `target`. `times`: kernels will be timed. Raises ConfigError for a target that does not exist, and where
        this process cannot run its kernels, or time them."""
        if name == NATIVE:
            return TvmBackend()
        target, start = Target.named(name), f"target (HYBRID_TARGET, options['target'] or --target) is {name!r}, and "
        if target.is_foreign and platform.machine() != _CROSS_COMPILES:
            raise ConfigError(
                f"{start}a machine with {platform.machine()} makes no kernels of {target.architecture}: use one with {_CROSS_COMPILES}, or "
                "another target"
            )
        if target.is_foreign and times:
            raise ConfigError(
                f"{start}this machine ({platform.machine()}) cannot time its kernels: write a file for that processor (hybrid export, or "
                f"torch_hybrid_backend.export), or use another target, or {NATIVE!r}"
            )
        here = TvmBackend().target.features
        if lacking := sorted({*target.here.features} - {*here}):
            raise ConfigError(
                f"{start}this process cannot run its kernels: it lacks {', '.join(lacking)}; use another target, or {NATIVE!r}"
            )
        return TvmBackend(target)

    @functools.cached_property
    def target(self) -> Target:
        if self._target is not None:
            return self._target
        return Target.host().within(torch.backends.cpu.get_cpu_capability()).permitted(may_use_tiles)

    def on(self, device: Device) -> TvmBackend:
        return self

    def available(self) -> Verdict:
        if importlib.util.find_spec("tvm") is None:
            return Refused(
                Reason.MISSING_DEPENDENCY, "apache-tvm is not installed: pip install 'apache-tvm>=0.27,<0.28'"
            )
        return Supported()

    def compiles(self) -> Verdict:
        """A linker is needed; what is in the cache does without."""
        lacking = NO_LINKER if find_linker() is None else lacking_linker(self.target)
        return Refused(Reason.MISSING_DEPENDENCY, lacking) if lacking else Supported()

    def describe(self) -> Sequence[tuple[str, str]]:
        """TVM, what kernels are compiled for, and what links them."""
        caches = f"{self.target.l1_bytes >> 10} KiB and {self.target.l2_bytes >> 10} KiB of cache each"
        lanes = f"{self.target.lanes} lanes of float32{' and AMX' if self.target.isa.tiles else ''}"
        return (
            ("tvm", compiler.version() or "not installed"),
            ("target", f"{self.target.label}: {lanes}, {self.target.cores} cores with {caches}"),
            ("linker", find_linker() or f"none, so no kernel can be compiled: {INSTALL}"),
        )

    def operands(self, graph: LoopGraph, layouts: Mapping[Buffer, Layout]) -> Prepared:
        return packed_operands(match_sdpa(graph, gathers=self.policy.gathers_in_attention), layouts, self.target)

    def layouts(self, groups: Sequence[Group], fixed: Mapping[Buffer, Layout]) -> Mapping[Buffer, Layout]:
        return blocked_layouts(groups, fixed, self.target)

    def anchor(self, anchor: Anchor) -> Kernel:
        return packed_kernel(anchor)

    def join(self, kernels: Sequence[Kernel], outputs: Collection[Buffer]) -> Sequence[Kernel]:
        return fuse_convolutions(kernels, outputs, self.target)

    def alternatives(self, kernel: Kernel, constants: Mapping[Buffer, Packed]) -> Sequence[Variant]:
        return alternatives(kernel, constants, self.target)

    def step(
        self, kernel: Kernel, artifact: Artifact, arguments: tuple[int, ...], working: Callable[[Dim], int]
    ) -> KernelCall:
        sizes = tuple(map(as_size, kernel_sizes(kernel)))
        return KernelCall(artifact.path, artifact.symbol, arguments, len(kernel.writes), sizes)

    def text(self, kernel: Kernel, artifact: Artifact, step: Step) -> KernelText:
        """The kernel's TIR, printed anew: the artifact is machine code. This imports TVM."""
        from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel

        return KernelText(artifact.symbol, emit_kernel(kernel, artifact.symbol, self.target).script() + "\n", ".tir.py")
