from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engines.cpu.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.loops.ir import Call
from torch_hybrid_backend.loops.kernels import MapKernel, Store

pytest.importorskip("tvm")


@pytest.fixture(scope="module")
def compiler() -> KernelCompiler:
    return KernelCompiler(tir_compiler, threads=1)


def test_a_kernel_runs(compiler: KernelCompiler, tmp_path: Path) -> None:
    """The library that comes back holds the kernel under its symbol, and it computes what the kernel says."""
    import tvm

    job = Job("key", "kernel_scale", scale_kernel(64, 2.0), Target.host(), str(tmp_path / "scale.so"), assembly=True)
    (library,) = compiler.compile([job], 60)
    assert library == tmp_path / "scale.so"
    x, out = np.linspace(-1, 1, 64, dtype="float32"), np.empty(64, "float32")
    tensors = tvm.runtime.tensor(x), tvm.runtime.tensor(out)
    tvm.runtime.load_module(str(library))["kernel_scale"](*tensors)
    np.testing.assert_allclose(tensors[1].numpy(), np.maximum(x, 0) * 2, rtol=1e-6)
    assert "__tvm_ffi_kernel_scale" in (tmp_path / "scale.s").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scale.s", "scale.so"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_process_is_lean(compiler: KernelCompiler, tmp_path: Path) -> None:
    """The worker never loads torch, and TVM starts no threads in it."""
    compiler.compile([Job("lean", "kernel_lean", scale_kernel(80), Target.host(), str(tmp_path / "lean.so"))], 60)
    (process,) = compiler.process_ids()
    assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()
    assert len(list(Path(f"/proc/{process}/task").iterdir())) == 1


def test_an_error_comes_back(compiler: KernelCompiler, tmp_path: Path) -> None:
    """A kernel that cannot be emitted is an exception with type, message and the worker's traceback; the worker lives on."""
    kernel = scale_kernel()
    wrong = Call("float32", "no such operation", (kernel.stores[0].value,))
    broken = MapKernel(
        kernel.reads, kernel.writes, kernel.domain, (Store(kernel.writes[0].buffer, kernel.stores[0].index, wrong),)
    )
    before = compiler.process_ids()
    (failed,) = compiler.compile(
        [Job("broken", "kernel_broken", broken, Target.host(), str(tmp_path / "broken.so"))], 60
    )
    assert isinstance(failed, CompileError)
    assert "kernel_broken" in str(failed)
    assert "no such operation" in str(failed)
    assert "emit" in "".join(failed.__notes__)
    assert not before or compiler.process_ids() == before


def test_without_a_linker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a linker is told what was looked for and what to install."""
    monkeypatch.setenv("PATH", "")
    compiler = KernelCompiler(tir_compiler, threads=1)
    (failed,) = compiler.compile([Job("key", "kernel_x", scale_kernel(), Target.host(), str(tmp_path / "x.so"))], 60)
    compiler.close()
    assert isinstance(failed, CompileError)
    assert "no linker" in str(failed)
    assert "cc, gcc, clang" in str(failed)
    assert "binutils" in str(failed) or sys.platform == "darwin"
