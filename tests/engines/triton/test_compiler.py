"""Real machine code, from Triton's compiler, without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.engines.cpu.kernels_for_tests import row_sum_kernel, scale_kernel, scatter_kernel
from tests.engines.triton.machine_code_for_tests import machine_code
from tests.engines.triton.regions_for_tests import kernel_of, kernels_of
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.triton import artifact, compiler
from torch_hybrid_backend.engines.triton.alternatives import tiled
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.ir import Call
from torch_hybrid_backend.loops.kernels import Kernel, MatMulKernel
from torch_hybrid_backend.sizes.size import symbol

_KERNELS = {
    "map": scale_kernel(1000),
    "row": row_sum_kernel(8, 100),
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
    atomic = re.search(r"(atom|red)\.global\.gpu\.relaxed\.max\.s32", code_as_text)
    assert (atomic is not None) == (name == "scatter")


def _normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias)


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


# Functions of contiguous tensors whose kernels can read and write 16 bytes at once.
_WIDE: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "pointwise float32": (lambda x, y: torch.relu(x + y), (_ones(64, 1024), _ones(64, 1024))),
    "pointwise float16": (
        lambda x, y: torch.relu(x + y),
        (_ones(64, 768, dtype=torch.half), _ones(768, dtype=torch.half)),
    ),
    "pointwise int8": (lambda x: x + 1, (_ones(64, 1024, dtype=torch.int8),)),
    "pointwise float8": (
        lambda x: (x.float() * 2).to(torch.float8_e4m3fn),
        (_ones(64, 1024).to(torch.float8_e5m2),),
    ),
    "not a whole block": (lambda x: x * 2, (_ones(1000),)),
    "channels last": (
        lambda x, y: x + y,
        (
            _ones(2, 64, 9, 9, dtype=torch.half).to(memory_format=torch.channels_last),
            _ones(64, 1, 1, dtype=torch.half),
        ),
    ),
    "transposition float32": (lambda x: (x.t() + 1).contiguous(), (_ones(256, 256),)),
    "transposition float16": (lambda x: (x.t() + 1).contiguous(), (_ones(256, 256, dtype=torch.half),)),
    "softmax float32": (lambda x: torch.softmax(x, -1), (_ones(512, 1024),)),
    "softmax float16": (lambda x: torch.softmax(x, -1), (_ones(512, 1000, dtype=torch.half),)),
    "softmax in chunks": (lambda x: torch.softmax(x, -1), (_ones(8, 20000),)),
    "layer norm float32": (_normalised, (_ones(512, 768), _ones(768), _ones(768))),
    "layer norm float16": (
        _normalised,
        (_ones(512, 768, dtype=torch.half), _ones(768, dtype=torch.half), _ones(768, dtype=torch.half)),
    ),
    "narrow rows": (lambda x: torch.softmax(x, -1), (_ones(65536, 64),)),
}


@pytest.mark.parametrize("capability", [80, 90])
def test_threads_read_and_write_16_bytes_at_once(capability: int, workers: KernelCompiler, tmp_path: Path) -> None:
    """Every access to memory of pointwise, row and transposing kernels of contiguous tensors."""
    accesses = _accesses({name: kernel_of(f, *x) for name, (f, x) in _WIDE.items()}, capability, workers, tmp_path)
    narrow = {name: found for name, found in accesses.items() if found != {("ld", 16), ("st", 16)}}
    assert not narrow


def test_what_stands_in_the_way_of_16_bytes(workers: KernelCompiler, tmp_path: Path) -> None:
    """Rows or a whole tensor of an odd number of elements: these begin anywhere, or end within 16 bytes."""
    kernels = {
        "odd rows": kernel_of(lambda x: torch.softmax(x, -1), _ones(512, 197)),
        "odd end": kernel_of(lambda x: x * 2, _ones(27, 37)),
    }
    for found in _accesses(kernels, 90, workers, tmp_path).values():
        assert found == {("ld", 4), ("st", 4)}


def test_sizes_known_at_run_time_have_both_ways(workers: KernelCompiler, tmp_path: Path) -> None:
    """A program has both ways: rows that are whole multiples of 16 elements are read 16 bytes at once, others are not. A size that stands in
    front of the rows decides nothing."""
    n, m = symbol("s0", 512), symbol("s1", 1024)
    kernels = {"flat": scale_kernel(n), "rows": row_sum_kernel(n, m), "batch": row_sum_kernel(n, 1024)}
    found = _accesses(kernels, 90, workers, tmp_path)
    assert found["flat"] == {("ld", 4), ("ld", 16), ("st", 4), ("st", 16)}
    assert found["rows"] == {("ld", 4), ("ld", 16), ("st", 4)}  # one sum for each row
    assert found["batch"] == {("ld", 16), ("st", 4)}


def _accesses(
    kernels: Mapping[str, Kernel], capability: int, workers: KernelCompiler, folder: Path
) -> dict[str, set[tuple[str, int]]]:
    """The loads and stores of global memory in each kernel's machine code, and how many bytes of a thread each is."""
    pytest.importorskip("triton")
    target = Target(capability, 132)
    jobs = [
        Job(name, "kernel_1", kernel, target, str(folder / f"{name}.kernel"), assembly=True)
        for name, kernel in kernels.items()
    ]
    found: dict[str, set[tuple[str, int]]] = {}
    for job, path in zip(jobs, workers.compile(jobs, 300.0), strict=True):
        assert isinstance(path, Path), path
        accesses = re.findall(
            r"\b(ld|st)\.global(?:\.[a-zA-Z]\S*?)*?(?:\.v(\d))?\.[bfsu](\d+)\s", path.with_suffix(".ptx").read_text()
        )
        found[job.key] = {(what, int(lanes or 1) * int(bits) // 8) for what, lanes, bits in accesses}
    return found


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


def test_more_shared_memory_than_there_is_is_an_error(workers: KernelCompiler, tmp_path: Path) -> None:
    """Found when it is compiled, not when it is loaded."""
    pytest.importorskip("triton")
    half = torch.float16
    kernel = kernel_of(torch.mm, torch.empty(512, 512, dtype=half), torch.empty(512, 512, dtype=half))
    assert isinstance(kernel, MatMulKernel)
    (large,) = tiled(kernel, Tiling(128, 128, 64, 8, 8))
    (got,) = workers.compile([Job("large", "kernel_1", large, Target(80, 108), str(tmp_path / "a.kernel"))], 300.0)
    assert isinstance(got, CompileError)
    assert re.search(r"takes \d+ bytes of shared memory, and a program may have 166912", str(got))


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


@pytest.mark.parametrize("capability", [80, 90])
def test_neighbours_share_the_random_numbers_of_a_group(capability: int, tmp_path: Path) -> None:
    """Dropout of 8 neighbours takes two groups of four numbers of a thread, by 10 rounds of two products each; normal numbers are made by the
    approximate sines and cosines of cuRAND, and by its sum of a product."""
    pytest.importorskip("triton")
    target = Target(capability, 132, random_blocks=132 * 8)

    def dropout(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_dropout.default(torch.relu(x), 0.1, True)[0]

    (kernel,) = kernels_of(dropout, torch.empty(64, 1024, dtype=torch.bfloat16), target=target)
    code = machine_code(kernel, target, tmp_path)
    assert 30 <= len(re.findall(r"mul\.hi\.u32", code.ptx)) < 50
    (kernel,) = kernels_of(lambda x: x + torch.randn_like(x), torch.empty(64, 1024), target=target)
    code = machine_code(kernel, target, tmp_path)
    for instruction in ("sin.approx.ftz.f32", "cos.approx.ftz.f32", "sqrt.rn", "fma.rn.ftz.f32"):
        assert instruction in code.ptx or instruction.replace(".ftz", "") in code.ptx
