"""Golden kernels and plans: what the TVM engine makes of five models of the zoo at their published sizes, for two fixed processors.

Each file has two parts. The plan: who runs which operator, then for each region its program (buffers, constants, calls). The kernels: the
canonical text of each, the hash of the TIR that its schedule emits, and its variants likewise (of those that a schedule ranks, the TIR of the
best). A commit that only moves code leaves the files as they are; one that changes them says why.
"""

from __future__ import annotations

import functools
import hashlib
import itertools

import pytest

from tests.conftest import Golden, traced
from tests.engines.models_for_tests import partitions
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.kernel_key import canonical_text
from torch_hybrid_backend.codegen.operator_kernel import OperatorKernel
from torch_hybrid_backend.codegen.variants import variants
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.program import KernelCall, Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tvm.backend import TvmBackend
from torch_hybrid_backend.engines.tvm.cpu.alternatives import alternatives
from torch_hybrid_backend.engines.tvm.engine import TvmEngine
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tir.emit import emit_kernel
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.partition.regions import Partition

_TARGETS = {
    "avx512": Target("x86-64-v4", "golden", ("avx2", "avx512f", "fma"), 16, 2, 48 << 10, 1 << 20),
    "avx2": Target("x86-64-v3", "golden", ("avx2", "fma"), 8, 4, 32 << 10, 512 << 10),
}
# Convolutions, depthwise and squeeze-excitation; attention with a mask, causal attention, windows.
_MODELS = ("resnet50", "efficientnet_b0", "swin_tiny", "minilm", "gpt2")
_RANKED = frozenset(f"choice {n}" for n in range(2, 8))  # emitting them all would take a minute


@traced
@pytest.mark.parametrize(("model", "target"), list(itertools.product(_MODELS, _TARGETS)))
def test_golden_kernels(model: str, target: str, golden: Golden) -> None:
    """The model's plan and kernels are what they were."""
    golden.check("\n".join(line for found in _partitions(model) for line in _described(found, _TARGETS[target])))


@functools.lru_cache(maxsize=1)  # for the other target
def _partitions(model: str) -> list[Partition]:
    return partitions(model, TvmEngine(Config(compile_threads=1), services()))


def _described(found: Partition, target: Target) -> list[str]:
    """The plan, and the kernels in the order in which it first calls them."""
    plan = ["== plan"]
    plan += [f"{n.region or 'eager'} {n.engine} {n.operator} {n.name}" for n in found.nodes]
    kernels: dict[str, Kernel] = {}
    notes: dict[str, list[str]] = {}
    for segment in found.graph.segments:
        if segment.engine_hint != "tvm":
            continue
        assembled = assemble(segment.region, TvmBackend(target))
        names = []
        for kernel in assembled.kernels:
            text = canonical_text(kernel)
            name = f"{type(kernel).__name__}-{_hash(text)}"
            names.append(name)
            if name not in kernels:
                kernels[name] = kernel
                constants = {packed.buffer: packed for packed in assembled.packed}
                notes[name] = [
                    f"variant {v.name!r} preferred={v.is_preferred} exact={v.is_exact} cost={v.cost:.4f}: "
                    + " ".join(_shown(k, None if v.name in _RANKED else target) for k in v.kernels)
                    for v in variants(kernel, alternatives(kernel, constants, target))
                ]
        plan += _program(segment.region, assembled.program([Artifact(name, name, name) for name in names]))
    shown = ["== kernels"]
    for name, kernel in kernels.items():
        shown += [f"-- {name}", canonical_text(kernel), *notes[name]]
    return plan + shown


def _program(region: Region, program: Program) -> list[str]:
    """The region's program, one buffer or call a line."""
    lines = [f"-- {region.name} inputs={program.inputs} outputs={program.outputs}"]
    lines += [f"buffer {number} {_spec(spec)}" for number, spec in enumerate(program.buffers)]
    lines += [f"constant {c.buffer} of {c.sources}" for c in program.constants]
    for call in program.steps:
        assert isinstance(call, KernelCall)
        lines.append(f"{call.symbol} {call.arguments} writes={call.writes} sizes={call.sizes}")
    return lines


def _spec(spec: TensorSpec) -> str:
    return f"{spec.dtype} {spec.shape} {spec.strides}"


def _shown(kernel: Kernel, target: Target | None) -> str:
    """The hash of a kernel's text and, given a target, of its TIR, or that its schedule refuses it; an operator of PyTorch's has a name."""
    if isinstance(kernel, OperatorKernel):
        return kernel.name
    text = canonical_text(kernel)
    if target is None:
        return _hash(text)
    try:
        function = emit_kernel(kernel, "kernel", target)
    except ScheduleError:
        return f"{_hash(text)}:refused"
    return f"{_hash(text)}:{_hash(function.script())}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
