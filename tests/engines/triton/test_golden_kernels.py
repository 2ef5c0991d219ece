"""Golden files of what Triton makes of models of the zoo, at their published sizes in bfloat16: threads, registers, shared memory and spills of
each kernel, for two architectures. No GPU is needed.

Renewed by `pytest tests/engines/triton/test_golden_kernels.py -m full --update-golden`; a commit that changes them says why. The
numbers are those of the Triton in constraints.txt: with another one only spills are looked at.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import Golden
from tests.engines.models_for_tests import partitions
from tests.engines.triton.resource_usage import resource_usage
from tests.partition.engines_for_tests import LoopsEngine
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.kernel_key import canonical_text
from torch_hybrid_backend.codegen.kernel_name import symbol_of
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.triton import artifact, compiler
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.kernels import Kernel, MapKernel, RowKernel

pytest.importorskip("triton")

_TARGETS = {"sm_80": Target(80, 108), "sm_90": Target(90, 132)}  # A100, H100
_PINNED = "3.7.1"
_MODELS = ("gpt2", "resnet50", "vit_b16")


@pytest.fixture(scope="module")
def workers() -> KernelCompiler:
    return KernelCompiler(compiler, 2)


@pytest.mark.full
@pytest.mark.parametrize(("model", "chip"), list(itertools.product(_MODELS, _TARGETS)))
def test_what_kernels_take(model: str, chip: str, workers: KernelCompiler, tmp_path: Path, golden: Golden) -> None:
    """Kernels take what they took; pointwise kernels and rows spill no register."""
    found = partitions(model, LoopsEngine(), torch.bfloat16)
    target = _TARGETS[chip]
    kernels: dict[str, Kernel] = {}
    for segment in (segment for each in found for segment in each.graph.segments if segment.engine_hint):
        for kernel in assemble(segment.region, TritonBackend(target)).kernels:
            digest = hashlib.sha256(canonical_text(kernel).encode()).hexdigest()
            kernels[symbol_of(kernel, digest)] = kernel
    jobs = [
        Job(name, name, kernel, target, str(tmp_path / f"{number}.kernel"))
        for number, (name, kernel) in enumerate(kernels.items())
    ]
    lines = []
    for job, path in zip(jobs, workers.compile(jobs, 560.0), strict=True):
        assert isinstance(path, Path), path
        header, code = artifact.read(path)
        usage = resource_usage(code, header.shared_bytes)
        assert usage.spill_bytes == 0 or not isinstance(job.kernel, MapKernel | RowKernel), job.key
        lines.append(
            f"{job.key}: {header.threads} threads, {usage.registers} registers, {usage.shared_bytes} bytes shared, "
            f"{usage.spill_bytes} bytes spilled"
        )
    if compiler.version() == _PINNED:
        golden.check("\n".join(lines))


_FOR_AMD = """
import sys
from pathlib import Path
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.engines.triton.regions_for_tests import kernel_of
from tests.engines.cpu.kernels_for_tests import row_sum_kernel, scale_kernel
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.engines.triton.source import function_of
from torch_hybrid_backend.engines.triton.target import Target

triton.knobs.cache.dir = sys.argv[1]
attention = kernel_of(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), torch.randn(1, 2, 64, 32))
for number, kernel in enumerate((scale_kernel(1000), row_sum_kernel(8, 100), attention)):
    program = emit_kernel(kernel, f"kernel_{number}", Target(90, 132))
    function = function_of(program.text, program.name, Path(sys.argv[1]))
    signature = {**program.signature, **dict.fromkeys(program.launch.constants, "constexpr")}
    source = ASTSource(function, signature, dict(program.launch.constants), {})
    options = {"num_warps": program.launch.warps, "num_stages": program.launch.stages}
    assert "gfx942" in triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options).asm["amdgcn"]
"""


@pytest.mark.full
def test_programs_compile_for_an_amd_gpu_too(tmp_path: Path) -> None:
    """The text is the same. Nothing launches them there: the engine refuses AMD's GPUs."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", _FOR_AMD, str(tmp_path)]
    subprocess.run(command, env=environment, cwd=Path(__file__).resolve().parents[3], check=True, timeout=300)
