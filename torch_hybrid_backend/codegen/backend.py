"""Differences between two engines that print `loops`: the `KernelBackend` protocol, the one seam between `codegen` and an engine.

    region -> loops.graph.lower_region -> operands -> loops.fusion.fuse -> layouts -> a kernel for each group -> join -> alternatives
           -> the compiler module, in worker processes -> an artifact for each kernel -> step -> Program

`codegen` does what is between the arrows. A backend that wants nothing special takes the functions of `codegen` that its members name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from torch_hybrid_backend.codegen.anchors import Anchor
from torch_hybrid_backend.codegen.compiler import CodeTarget, KernelCompilerModule
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.operands import Packed, Prepared
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import KernelText
from torch_hybrid_backend.core.program import Step
from torch_hybrid_backend.core.verdict import Verdict
from torch_hybrid_backend.loops.fusion import Group
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.loops.layout import Layout, contiguous
from torch_hybrid_backend.loops.policy import FusionPolicy
from torch_hybrid_backend.sizes.size import Dim


class KernelBackend(Protocol):
    """The choices of one engine. Without state that a region changes: threads use it at once.

    `name`: the engine's. `device`: where its kernels run; the type of it is what the engine serves, and `on` gives the backend for another of
    that type. `timed_variants`: how many variants of a kernel are compiled and timed where it is not tuned, the one in use included; those that
    call operators come on top.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> Device: ...

    @property
    def target(self) -> CodeTarget: ...

    @property
    def compiler(self) -> KernelCompilerModule: ...

    @property
    def policy(self) -> FusionPolicy: ...

    @property
    def timed_variants(self) -> int: ...

    def on(self, device: Device) -> KernelBackend:
        """The backend for regions on `device`: its target is that of the device and of torch's settings, both as they are now."""
        ...

    def available(self) -> Verdict:
        """Supported if kernels can run in this installation, and on `device`; a refusal says what to do."""
        ...

    def compiles(self) -> Verdict:
        """Supported if those that are not in the cache can be compiled; a refusal says what to do."""
        ...

    def describe(self) -> Sequence[tuple[str, str]]:
        """Names and values that `hybrid doctor` prints of the engine."""
        ...

    def operands(self, graph: LoopGraph, layouts: Mapping[Buffer, Layout]) -> Prepared:
        """The graph with the operands of matmuls and convolutions as the kernels want them; `Prepared(graph)` where they are fine.

        `layouts`: how the region's inputs, outputs and literals lie. An operation may be replaced by one of a subclass, which `anchor` knows.
        """
        ...

    def layouts(self, groups: Sequence[Group], fixed: Mapping[Buffer, Layout]) -> Mapping[Buffer, Layout]:
        """The layout of every buffer that the groups read or write, `fixed` ones included; `row_major` is the simplest."""
        ...

    def anchor(self, anchor: Anchor) -> Kernel:
        """The kernel of a group around a matmul, a convolution or attention; `anchors.neutral_kernel` is the one without packing."""
        ...

    def join(self, kernels: Sequence[Kernel], outputs: Collection[Buffer]) -> Sequence[Kernel]:
        """The region's kernels in order, some of them made into one, or one into several. `outputs`: the region's."""
        ...

    def alternatives(self, kernel: Kernel, constants: Mapping[Buffer, Packed]) -> Sequence[Variant]:
        """Other ways of computing what a kernel computes, best estimate first. `constants`: what is packed ahead, by its buffer."""
        ...

    def step(
        self, kernel: Kernel, artifact: Artifact, arguments: tuple[int, ...], working: Callable[[Dim], int]
    ) -> Step:
        """The step of a program that runs the kernel. `arguments`: the numbers of its buffers, those it reads first, then those it
        writes. `working` gives the number of one more buffer, of so many bytes, for this step alone."""
        ...

    def text(self, kernel: Kernel, artifact: Artifact, step: Step) -> KernelText:
        """A kernel of a program, with its artifact and its step, as people can read it."""
        ...


def row_major(groups: Sequence[Group], fixed: Mapping[Buffer, Layout]) -> Mapping[Buffer, Layout]:
    """Layouts where every buffer that is not `fixed` lies row by row."""
    written = (out for group in groups for member in group.members for out in member.op.outs)
    return {**{buffer: contiguous(buffer.shape) for buffer in written}, **fixed}
