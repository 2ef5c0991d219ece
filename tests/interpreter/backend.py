"""A second `KernelBackend`: kernels of the loops language interpreted, one operator of PyTorch's for each.

It shows that the seam is real: everything but this folder is what the TVM engine runs through, and what is wrong in a result here is wrong in a
lowering, in fusion or in `codegen`, and not in a schedule. Kernels are neutral ones with row-major layouts and nothing packed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch

from tests.interpreter import compiler
from tests.interpreter.compiler import Interpreter
from tests.interpreter.evaluate import run
from tests.interpreter.wire import decode
from torch_hybrid_backend.codegen.anchors import Anchor, neutral_kernel
from torch_hybrid_backend.codegen.backend import row_major
from torch_hybrid_backend.codegen.compiler import KernelCompilerModule
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.kernel_key import canonical_text
from torch_hybrid_backend.codegen.operands import Packed, Prepared
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import KernelText
from torch_hybrid_backend.core.program import OperatorCall, Step, TensorArgument
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Supported, Verdict
from torch_hybrid_backend.loops.fusion import Group
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Kernel, RowKernel, Stage
from torch_hybrid_backend.loops.layout import Layout, Strided
from torch_hybrid_backend.loops.policy import FusionPolicy
from torch_hybrid_backend.sizes.size import Dim

_NAMESPACE = "hybrid_interpreter"
_library = torch.library.Library(_NAMESPACE, "DEF")
_paths: dict[str, str] = {}  # a kernel's symbol -> its artifact: plans know the symbol


class InterpreterBackend:
    name: str = "interpreter"
    device: Device = CPU
    target: Interpreter = Interpreter()
    compiler: KernelCompilerModule = compiler
    timed_variants: int = 1
    # Other limits than those of any processor, so that other groups come about.
    policy: FusionPolicy = FusionPolicy(
        max_members=5,
        max_reads=6,
        min_rows=1,
        small_elements=0,
        max_inline_calls=40,
        max_inline_loads=6,
        channel_block=1,
    )

    def on(self, device: Device) -> InterpreterBackend:
        return self

    def available(self) -> Verdict:
        return Supported()

    def compiles(self) -> Verdict:
        return Supported()

    def describe(self) -> Sequence[tuple[str, str]]:
        return ()

    def operands(self, graph: LoopGraph, layouts: Mapping[Buffer, Layout]) -> Prepared:
        return Prepared(graph)

    def layouts(self, groups: Sequence[Group], fixed: Mapping[Buffer, Layout]) -> Mapping[Buffer, Layout]:
        return row_major(groups, fixed)

    def anchor(self, anchor: Anchor) -> Kernel:
        return neutral_kernel(anchor)

    def join(self, kernels: Sequence[Kernel], outputs: Collection[Buffer]) -> Sequence[Kernel]:
        """Join a kernel for each result: an operator has one."""
        return [one for kernel in kernels for one in _split(kernel)]

    def alternatives(self, kernel: Kernel, constants: Mapping[Buffer, Packed]) -> Sequence[Variant]:
        return ()

    def step(
        self, kernel: Kernel, artifact: Artifact, arguments: tuple[int, ...], working: Callable[[Dim], int]
    ) -> OperatorCall:
        _paths[artifact.symbol] = artifact.path
        *reads, result = arguments
        tensors = [_tensor(number, read) for number, read in zip(reads, kernel.reads, strict=True)]
        title = f"a {type(kernel).__name__}, interpreted"
        return OperatorCall(_operator(len(tensors)), (artifact.symbol, *tensors), (result,), title)

    def text(self, kernel: Kernel, artifact: Artifact, step: Step) -> KernelText:
        return KernelText(artifact.symbol, canonical_text(kernel), ".txt")


def _split(kernel: Kernel) -> list[Kernel]:
    if len(kernel.writes) == 1:
        return [kernel]
    if isinstance(kernel, RowKernel):
        return [
            dataclasses.replace(kernel, writes=(w,), stages=tuple(s for s in kernel.stages if _is_for(s, w)))
            for w in kernel.writes
        ]
    stores = getattr(kernel, "stores")  # noqa: B009  of every other kind
    return [
        dataclasses.replace(kernel, writes=(w,), stores=tuple(s for s in stores if s.buffer is w.buffer))  # type: ignore[call-arg]
        for w in kernel.writes
    ]


def _is_for(stage: Stage, result: Argument) -> bool:
    return stage.store is None or stage.store.buffer is result.buffer


def _tensor(number: int, read: Argument) -> TensorArgument:
    """A constant as it is; anything else as its layout says."""
    if read.buffer.constant:
        return TensorArgument(number, None)
    assert isinstance(read.layout, Strided)
    return TensorArgument(number, TensorSpec(read.buffer.shape, read.buffer.dtype, read.layout.strides, CPU))


@functools.cache
def _operator(tensors: int) -> str:
    """The operator that runs a kernel of so many inputs."""
    parameters = "".join(f", Tensor x{n}" for n in range(tensors))
    _library.define(f"run_{tensors}(str symbol{parameters}) -> Tensor")
    _library.impl(f"run_{tensors}", _run, "CompositeExplicitAutograd")
    return f"{_NAMESPACE}::run_{tensors}"


def _run(symbol: str, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return run(_kernel(_paths[symbol]), inputs)


@functools.cache
def _kernel(path: str) -> Kernel:
    return decode(Path(path).read_text())
