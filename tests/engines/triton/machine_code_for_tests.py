"""A function's kernels as machine code, from Triton's compiler in a worker process, without a GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.triton import artifact, compiler
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.partition.regions import partition_graph


@dataclass(frozen=True, slots=True)
class MachineCode:
    """`ptx`: the kernel's assembly text; `spilled_bytes`: what a thread keeps in memory for want of registers; `shared_bytes`: of a program."""

    ptx: str
    spilled_bytes: int
    shared_bytes: int


def kernels_for(function: Callable[..., object], *inputs: torch.Tensor, target: Target) -> tuple[Kernel, ...]:
    """The kernels of the function's one region."""
    (segment,) = partition_graph(trace(function, *inputs), [FakeEngine()], Config()).graph.segments
    return assemble(segment.region, TritonBackend(target)).kernels


@cache
def _workers() -> KernelCompiler:
    return KernelCompiler(compiler, 1)


def machine_code(kernel: Kernel, target: Target, folder: Path) -> MachineCode:
    """The kernel compiled for a GPU."""
    job = Job("kernel", "kernel_1", kernel, target, str(folder / "a.kernel"), assembly=True)
    (path,) = _workers().compile([job], 300.0)
    assert isinstance(path, Path), path
    header, code = artifact.read(path)
    cubin = folder / "a.cubin"
    cubin.write_bytes(code)
    spec = find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run(
        [tool, "--dump-resource-usage", cubin], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    (stack, local), *_ = re.findall(r"STACK:(\d+).*LOCAL:(\d+)", shown)
    return MachineCode(path.with_suffix(".ptx").read_text(), int(stack) + int(local), header.shared_bytes)
