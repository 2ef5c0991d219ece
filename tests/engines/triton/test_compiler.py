"""Real machine code, from Triton's compiler, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.tvm.kernels_for_tests import attention_kernel, row_sum_kernel, scale_kernel, scatter_kernel
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.triton import artifact, compiler
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.ir import Call
from torch_hybrid_backend.loops.kernels import Kernel

_KERNELS = {
    "map": scale_kernel(1000),
    "row": row_sum_kernel(8, 100),
    "attention": attention_kernel(),
    "scatter": scatter_kernel(1000, 50),
}


@pytest.fixture(scope="module")
def workers() -> KernelCompiler:
    return KernelCompiler(compiler, 1)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", _KERNELS)
def test_kernels_become_cubins(name: str, capability: int, workers: KernelCompiler, tmp_path: Path) -> None:
    """In a worker process: an image for the very architecture, and what launching it takes. None asks for scratch memory of Triton's."""
    pytest.importorskip("triton")
    job = Job(
        f"{name}{capability}",
        "kernel_1",
        _KERNELS[name],
        Target(capability, 132),
        str(tmp_path / "a.kernel"),
        assembly=True,
    )
    (path,) = workers.compile([job], 300.0)
    assert isinstance(path, Path), path
    header, code = artifact.read(path)
    assert code.startswith(b"\x7fELF")
    assert header.symbol == "kernel_1"
    assert header.threads % 32 == 0
    code_as_text = path.with_suffix(".ptx").read_text()
    assert f"sm_{capability}" in code_as_text
    assert ("atom.global.gpu.relaxed.max.s32" in code_as_text) == (name == "scatter")


def test_a_kernel_for_the_interpreter_is_its_text(workers: KernelCompiler, tmp_path: Path) -> None:
    job = Job("text", "kernel_2", scale_kernel(), INTERPRETER, str(tmp_path / "b.kernel"))
    (path,) = workers.compile([job], 60.0)
    assert isinstance(path, Path), path
    header, code = artifact.read(path)
    assert "def kernel_2(in0, out0, BLOCK: tl.constexpr)" in header.text
    assert code == b""


def test_what_cannot_be_printed_is_an_error(workers: KernelCompiler, tmp_path: Path) -> None:
    """The kernel is named, and the others are compiled."""
    kernel = scale_kernel()
    wrong: Kernel = type(kernel)(
        kernel.reads,
        kernel.writes,
        kernel.domain,
        (
            type(kernel.stores[0])(
                kernel.stores[0].buffer,
                kernel.stores[0].index,
                Call("float32", "shl", (ops.const(1.0, "float32"),) * 2),
            ),
        ),
    )
    jobs = [
        Job(name, f"kernel_{name}", k, INTERPRETER, str(tmp_path / name)) for name, k in (("a", wrong), ("b", kernel))
    ]
    failed, made = workers.compile(jobs, 60.0)
    assert isinstance(failed, CompileError)
    assert "kernel_a" in str(failed)
    assert "'shl' has no code" in str(failed)
    assert isinstance(made, Path)


def test_the_user_s_process_never_imports_triton() -> None:
    """Nor do the modules that workers import import torch."""
    code = (
        "import sys, torch_hybrid_backend.engines.triton.compiler, torch_hybrid_backend.engines.triton.emit\n"
        "assert 'torch' not in sys.modules\n"
        "import torch; before = set(sys.modules)\n"
        "import torch_hybrid_backend.engines.triton.engine\n"
        "assert not {m for m in set(sys.modules) - before if m.split('.')[0] == 'triton'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
