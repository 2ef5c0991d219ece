"""Golden kernels: what the TVM engine makes of models of the zoo at their published sizes, for fixed processors.

A golden file has a line for each region: how many operators it has, and a hash of its program (buffers, constants, calls). Below stands a line
for each of its kernels: its name, a hash of the TIR that its schedule emits, and, where it has variants, the estimated cost and the hash of
each. The hash of TIR is that of its structure, in which names do not count. So a commit that moves or renames code leaves the hashes as they
are; one that changes them says why.

`pytest tests/engines/cpu/test_golden_kernels.py --golden-texts FOLDER` writes programs and TIR there in full, to be compared by diff.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tvm_ffi

from tests.conftest import Golden, traced
from tests.engines.models_for_tests import partitions
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.kernel_key import canonical_text
from torch_hybrid_backend.codegen.kernel_name import kernel_name
from torch_hybrid_backend.codegen.operator_kernel import OperatorKernel
from torch_hybrid_backend.codegen.variants import Variant, variants
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.program import KernelCall, Program
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.driver import prepared
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel
from torch_hybrid_backend.engines.cpu.variants.alternatives import alternatives
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.partition.regions import Partition

_VNNI = ("avx2", "avx512_bf16", "avx512_vnni", "avx512bw", "avx512f", "avx512vl", "fma")
_TARGETS = {
    "avx2": Target("x86-64-v3", "golden", ("avx2", "fma"), 8, 4, 32 << 10, 512 << 10),
    "avx512": Target("x86-64-v4", "golden", ("avx2", "avx512f", "fma"), 16, 2, 48 << 10, 1 << 20),
    "vnni": Target("znver4", "golden", _VNNI, 16, 2, 32 << 10, 1 << 20),
    "amx": Target("sapphirerapids", "golden", ("amx_bf16", "amx_int8", "amx_tile", *_VNNI), 16, 2, 48 << 10, 2 << 20),
}
# Convolutions, depthwise and squeeze-excitation; attention with a mask, causal attention, windows.
_AS_WRITTEN = ("resnet50", "efficientnet_b0", "swin_tiny", "minilm", "gpt2")
_REDUCED = ("resnet50", "mobilenet_v2", "minilm")
_CASES = (
    *itertools.product(_AS_WRITTEN, ("as-written",), ("avx2", "avx512")),
    *itertools.product(_REDUCED, ("bf16", "int8", "int4-weights"), ("vnni", "amx")),
)
# These take long, and hardly have a kernel of another kind, but for windows and causal attention, whose results tests/models/test_outputs.py
# compares: `make test-full` runs them, and whoever changes kernels does.
_LONG = frozenset(
    (
        *itertools.product(("resnet50", "efficientnet_b0", "swin_tiny", "gpt2"), ("as-written",), ("avx2",)),
        *itertools.product(("efficientnet_b0", "swin_tiny", "gpt2"), ("as-written",), ("avx512",)),
        *itertools.product(("resnet50",), ("bf16", "int8", "int4-weights"), ("vnni", "amx")),
        *itertools.product(("mobilenet_v2",), ("bf16", "int4-weights"), ("vnni", "amx")),
        ("mobilenet_v2", "int8", "vnni"),
        ("minilm", "int4-weights", "vnni"),
    )
)
_RANKED = frozenset(f"choice {n}" for n in range(2, 8))  # emitting them all would take a minute


@traced
@pytest.mark.parametrize(
    ("model", "precision", "target"),
    [pytest.param(*case, marks=pytest.mark.full if case in _LONG else ()) for case in _CASES],
)
def test_golden_kernels(
    model: str, precision: str, target: str, golden: Golden, golden_texts: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's programs and kernels are what they were."""
    monkeypatch.setattr(prepared, "default_weight_bits", lambda: 8)
    described = _Described(_TARGETS[target])
    for partition in _partitions(model, precision, target):
        described.add(partition)
    if golden_texts is not None:
        folder = golden_texts / f"{model}-{precision}-{target}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in described.texts.items():
            (folder / f"{name}.txt").write_text(text)
    golden.check("\n".join(described.lines))


@functools.lru_cache(maxsize=1)
def _partitions(model: str, precision: str, target: str) -> list[Partition]:
    backend = TvmBackend(_TARGETS[target])
    return partitions(model, KernelEngine(backend, Config(compile_threads=1), services()), precision=precision)


@dataclass
class _Described:
    """Kernels for a target in the order in which programs first call them: `lines` of the golden file, and `texts` by name."""

    target: Target
    lines: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, partition: Partition) -> None:
        """Every region of TVM's."""
        eager = sum(node.region is None for node in partition.nodes)
        self.lines.append(f"== {len(partition.nodes)} operators, {eager} in eager")
        for segment in partition.graph.segments:
            if segment.engine_hint != "tvm":
                continue
            assembled = assemble(segment.region, TvmBackend(self.target))
            names, below = [], dict[str, str]()
            for kernel in assembled.kernels:
                digest = self._emitted(kernel)
                name = f"{kernel_name(kernel)}-{digest}"
                names.append(name)
                if name not in below:
                    constants = {packed.buffer: packed for packed in assembled.packed}
                    found = variants(kernel, alternatives(kernel, constants, self.target))
                    below[name] = " ".join([f"  {name}", *self._variants(found if len(found) > 1 else ())])
            program = "\n".join(_program(assembled.program([Artifact(name, name, name) for name in names])))
            self.texts[segment.region.name] = program
            self.lines.append(f"{segment.region.name} {len(segment.region.node_names)} operators {_hash(program)}")
            self.lines += below.values()

    def _variants(self, found: Sequence[Variant]) -> Iterator[str]:
        for variant in found:
            kernels = () if variant.name in _RANKED else variant.kernels
            marks = f"{'+' if variant.is_preferred else ''}{'' if variant.is_exact else '~'}"
            shown = ",".join(k.name if isinstance(k, OperatorKernel) else self._emitted(k) for k in kernels)
            yield f"[{variant.name or 'itself'}{marks} {variant.cost:.4g}{' ' if shown else ''}{shown}]"

    def _emitted(self, kernel: Kernel) -> str:
        """The hash of the kernel's TIR; "refused" where its schedule has no such rank."""
        try:
            function = emit_kernel(kernel, "kernel", self.target)
        except ScheduleError:
            return "refused"
        digest = f"{tvm_ffi.structural_hash(function) & (1 << 64) - 1:016x}"
        self.texts[f"{kernel_name(kernel)}-{digest}"] = f"{canonical_text(kernel)}\n\n{function.script()}\n"
        return digest


def _program(program: Program) -> Iterator[str]:
    """The program, one buffer or call a line."""
    yield f"inputs={program.inputs} outputs={program.outputs}"
    for number, spec in enumerate(program.buffers):
        yield f"buffer {number} {_spec(spec)}"
    for constant in program.constants:
        yield f"constant {constant.buffer} of {constant.sources}"
    for call in program.steps:
        assert isinstance(call, KernelCall)
        yield f"{call.symbol} {call.arguments} writes={call.writes} sizes={call.sizes}"


def _spec(spec: TensorSpec) -> str:
    return f"{spec.dtype} {spec.shape} {spec.strides}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
