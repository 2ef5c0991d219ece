"""`KernelBackend`: the protocol between `codegen` and an engine that prints `loops`. It holds all that differs between such engines.

    region -> loops.graph.lower_region -> operands -> loops.fusion.fuse -> layouts -> a kernel for each group -> join -> alternatives
           -> the compiler module, in worker processes -> an artifact for each kernel -> step -> Program

`codegen` does the steps, and calls the backend's members by these names. Members name functions of `codegen` that do for a simple backend.
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
    """The choices of one engine. It has no state that a region changes: several threads use it at once.

    `name`: the engine's. `device`: where its kernels run. The engine serves all devices of that type; `on` gives the backend for another one.
    `timed_variants`: how many variants of a kernel are compiled and timed without tuning. It counts the one in use, but none that calls an
    operator.
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
        """Supported if kernels that are not in the cache can be compiled; a refusal says what to do."""
        ...

    def describe(self) -> Sequence[tuple[str, str]]:
        """Names and values that `hybrid doctor` prints of the engine."""
        ...

    def operands(self, graph: LoopGraph, layouts: Mapping[Buffer, Layout]) -> Prepared:
        """The graph with the operands of matmuls and convolutions as the kernels want them; `Prepared(graph)` changes nothing.

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
        """The region's kernels in order, some of them joined or split. `outputs`: the region's."""
        ...

    def alternatives(self, kernel: Kernel, constants: Mapping[Buffer, Packed]) -> Sequence[Variant]:
        """Other variants of a kernel, best estimate first. `constants`: those that are packed ahead, by their buffers."""
        ...

    def step(
        self, kernel: Kernel, artifact: Artifact, arguments: tuple[int, ...], working: Callable[[Dim], int]
    ) -> Step:
        """The step of a program that runs the kernel. `arguments`: the numbers of its buffers, first those it reads, then those it
        writes. `working(bytes)`: the number of a further buffer, for this step alone."""
        ...

    def text(self, kernel: Kernel, artifact: Artifact, step: Step) -> KernelText:
        """A kernel of a program, with its artifact and its step, as people can read it."""
        ...


def row_major(groups: Sequence[Group], fixed: Mapping[Buffer, Layout]) -> Mapping[Buffer, Layout]:
    """Layouts where every buffer that is not `fixed` lies row by row."""
    written = (out for group in groups for member in group.members for out in member.op.outs)
    return {**{buffer: contiguous(buffer.shape) for buffer in written}, **fixed}
