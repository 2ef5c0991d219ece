"""Registers, shared memory and spills of row and pointwise kernels, as NVIDIA's compiler made them. No GPU is needed."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.conftest import Golden
from tests.engines.triton.regions_for_tests import kernels_of
from tests.engines.triton.resource_usage import nvidia_tool, resource_usage
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.triton import artifact, compiler
from torch_hybrid_backend.engines.triton.target import Target

pytest.importorskip("triton")


@dataclass(frozen=True)
class _Case:
    """A function of one tensor. It is traced: the tensor's memory is never touched."""

    function: Callable[..., torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


_WIDE, _LONG, _TALL, _FEW = (4096, 1024), (1024, 131072), (65536, 768), (4, 131072)
_CASES = {
    "gelu": _Case(lambda x: torch.nn.functional.gelu(x) * 2, _WIDE),
    "dropout behind gelu": _Case(
        lambda x: torch.ops.aten.native_dropout.default(torch.nn.functional.gelu(x), 0.1, True)[0], _WIDE
    ),
    "dropout in front of layer_norm": _Case(
        lambda x: torch.nn.functional.layer_norm(
            x + torch.ops.aten.native_dropout.default(x, 0.1, True)[0], x.shape[-1:]
        ),
        _WIDE,
    ),
    "normal numbers": _Case(lambda x: x + torch.randn_like(x), _WIDE),
    "uniform numbers of float64": _Case(lambda x: x + torch.rand_like(x), _WIDE, torch.float64),
    "transposition": _Case(lambda x: x.t().contiguous(), _WIDE),
    "softmax": _Case(lambda x: x.softmax(-1), _WIDE),
    "softmax of columns": _Case(lambda x: x.softmax(1), (64, 200, 768)),
    "layer_norm": _Case(lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), _WIDE),
    "layer_norm of 8192": _Case(lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), (4096, 8192)),
    "log_softmax, long": _Case(lambda x: x.log_softmax(-1), _LONG),
    "layer_norm, long": _Case(lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), _LONG),
    "argmax, long": _Case(lambda x: x.argmax(-1), _LONG),
    "cumsum": _Case(lambda x: x.cumsum(-1), _WIDE, torch.float32),
    "cummax, long": _Case(lambda x: x.cummax(-1)[1], _LONG),
    "logcumsumexp of columns, long": _Case(lambda x: x.logcumsumexp(0), _TALL),
    "sum of columns, split": _Case(lambda x: x.sum(0), _TALL, torch.float32),
    "sum of all, split": _Case(lambda x: x.sum(), _TALL, torch.float32),
    "cumsum, split": _Case(lambda x: x.cumsum(-1), _FEW, torch.float32),
    "argmax, split": _Case(lambda x: x.argmax(-1), _FEW),
    "softmax, split": _Case(lambda x: x.softmax(-1), _FEW),
    "variance of channels, split": _Case(lambda x: x.var((0, 2, 3)), (64, 64, 56, 56), torch.float16),
    "variance, split, float64": _Case(lambda x: x.var(-1), _FEW, torch.float64),
}
_ARCHITECTURES = (80, 90)


@pytest.fixture(scope="module")
def workers() -> KernelCompiler:
    return KernelCompiler(compiler, 2)


@pytest.mark.full
def test_no_register_is_spilled(workers: KernelCompiler, tmp_path: Path, golden: Golden) -> None:
    """Kernels take what they took; the numbers are those of the Triton in constraints.txt."""
    jobs: dict[str, Job] = {}
    for (name, case), capability in itertools.product(_CASES.items(), _ARCHITECTURES):
        target = Target(capability, 132, random_blocks=132 * 8)
        for number, kernel in enumerate(
            kernels_of(case.function, torch.empty(case.shape, dtype=case.dtype), target=target)
        ):
            title, path = f"{name}, kernel {number}, sm_{capability}", tmp_path / f"{len(jobs)}.kernel"
            jobs[title] = Job(title, f"kernel_{len(jobs)}", kernel, target, str(path))
    lines = []
    for title, path in zip(jobs, workers.compile([*jobs.values()], 500.0), strict=True):
        assert isinstance(path, Path), path
        header, code = artifact.read(path)
        usage = resource_usage(code, header.shared_bytes)
        assert usage.spill_bytes == 0, title
        lines.append(
            f"{title}: {header.threads} threads, {usage.registers} registers, {usage.shared_bytes} bytes shared"
        )
    if compiler.version() == "3.7.1":
        golden.check("\n".join(lines))


def test_a_spill_is_seen(workers: KernelCompiler, tmp_path: Path) -> None:
    """The same kernel, with all the registers that it wants and with too few."""
    case = _CASES["layer_norm of 8192"]
    (kernel,) = kernels_of(case.function, torch.empty(case.shape))
    job = Job("spill", "kernel_0", kernel, Target(80, 132), str(tmp_path / "a.kernel"), assembly=True)
    (path,) = workers.compile([job], 300.0)
    assert isinstance(path, Path), path
    header, code = artifact.read(path)
    usage = resource_usage(code, header.shared_bytes)
    assert usage.spill_bytes == 0
    assert usage.registers > 16
    assert usage.shared_bytes == header.shared_bytes
    ptx, few = tmp_path / "few.ptx", tmp_path / "few.cubin"
    ptx.write_text(path.with_suffix(".ptx").read_text().replace(f".reqntid {header.threads}", ".maxnreg 16"))
    subprocess.run([nvidia_tool("ptxas"), "-arch=sm_80", str(ptx), "-o", str(few)], check=True)
    assert resource_usage(few.read_bytes()).spill_bytes > 0
