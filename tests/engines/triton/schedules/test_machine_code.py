"""Machine code of products and convolutions for sm_80 and sm_90, read from PTX and machine code. No GPU is needed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.conftest import Golden
from tests.engines.triton.regions_for_tests import kernels_of
from tests.engines.triton.resource_usage import resource_usage
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.triton import artifact, compiler
from torch_hybrid_backend.engines.triton.alternatives import alternatives, tiled
from torch_hybrid_backend.engines.triton.schedules import matmul, tilings
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.kernels import Kernel, MatMulKernel

pytest.importorskip("triton")

_AMPERE, _HOPPER = Target(80, 108), Target(90, 132)
_half, _bf16 = torch.float16, torch.bfloat16
_OPERANDS = {  # as PTX names them
    "bf16": "bf16",
    "fp16": "f16",
    "tf32": "tf32",
    "3x3": "bf16",
    "transposed": "bf16",
    "volumes": "bf16",
}
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Code:
    """A kernel's PTX; `shared_bytes` and `scratch_bytes` of a program; `spill_bytes` and `registers` of a thread."""

    ptx: str
    shared_bytes: int
    scratch_bytes: int
    spill_bytes: int
    registers: int

    def has(self, instruction: str) -> int:
        """The number of instructions of that kind."""
        return len(re.findall(rf"\b{instruction}", self.ptx))

    @property
    def narrow_loads(self) -> int:
        """Loads of global memory of less than 16 bytes a thread, asynchronous ones included."""
        return self.has(r"ld\.global\.(?:b|u)\d+\s") + self.has(r"cp\.async\.ca")

    @property
    def wide_loads(self) -> int:
        return self.has(r"ld\.global\.\S*v4\.b32") + self.has(r"cp\.async\.cg")


@pytest.fixture(scope="module")
def workers() -> KernelCompiler:
    return KernelCompiler(compiler, 2)


def _codes(kernels: Mapping[str, tuple[Kernel, Target]], workers: KernelCompiler, folder: Path) -> dict[str, _Code]:
    jobs = [
        Job(name, "kernel_1", kernel, target, str(folder / f"{number}.kernel"), assembly=True)
        for number, (name, (kernel, target)) in enumerate(kernels.items())
    ]
    codes = {}
    for job, path in zip(jobs, workers.compile(jobs, 500.0), strict=True):
        assert isinstance(path, Path), path
        header, image = artifact.read(path)
        usage = resource_usage(image, header.shared_bytes)
        ptx = path.with_suffix(".ptx").read_text()
        codes[job.key] = _Code(ptx, usage.shared_bytes, header.scratch_bytes, usage.spill_bytes, usage.registers)
    return codes


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, w, b).relu()


def _operands(m: int, n: int, k: int, dtype: torch.dtype) -> Tensors:
    return torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype), torch.empty(n, dtype=dtype)


def _image(*shape: int, dtype: torch.dtype = _bf16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype).to(memory_format=torch.channels_last)


def _convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x, w, b, padding=w.shape[-1] // 2, groups=x.shape[1] // w.shape[1]).relu()


def _transpose(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1).relu()


def _convolve_volumes(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # Processors without products of bfloat16 give contiguous results, GPUs channels last.
    return torch.nn.functional.conv3d(x, w, b, padding=1).relu().contiguous(memory_format=torch.channels_last_3d)


def _volume(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=_bf16).to(memory_format=torch.channels_last_3d)


def _kernel(function: Callable[..., torch.Tensor], inputs: Tensors, target: Target) -> Kernel:
    (kernel,) = kernels_of(function, *inputs, target=target)
    return kernel


@pytest.mark.parametrize("target", [_AMPERE, _HOPPER], ids=["sm_80", "sm_90"])
def test_large_products_use_tensor_cores(target: Target, workers: KernelCompiler, tmp_path: Path) -> None:
    """`wgmma` on Hopper, `mma.sync` before it; operands are copied to shared memory ahead of their use, 16 bytes a thread at once; results are
    written so. Nothing is spilled. In halves, and in TF32 where torch's setting allows it; without it float32 is multiplied as it is."""
    large = (4096, 4096, 4096)
    tf32 = Target(target.capability, target.multiprocessors, tf32=True)
    codes = _codes(
        {
            "bf16": (_kernel(_linear, _operands(*large, _bf16), target), target),
            "fp16": (_kernel(_linear, _operands(*large, _half), target), target),
            "tf32": (_kernel(_linear, _operands(*large, torch.float32), tf32), tf32),
            "fp32": (_kernel(_linear, _operands(*large, torch.float32), target), target),
            "3x3": (
                _kernel(
                    _convolve, (_image(8, 256, 56, 56), _image(256, 256, 3, 3), torch.empty(256, dtype=_bf16)), target
                ),
                target,
            ),
            "transposed": (
                _kernel(
                    _transpose, (_image(8, 256, 28, 28), _image(256, 256, 3, 3), torch.empty(256, dtype=_bf16)), target
                ),
                target,
            ),
            "volumes": (
                _kernel(
                    _convolve_volumes,
                    (_volume(4, 256, 8, 28, 28), _volume(256, 256, 3, 3, 3), torch.empty(256, dtype=_bf16)),
                    target,
                ),
                target,
            ),
        },
        workers,
        tmp_path,
    )
    own, other = (r"wgmma\.mma_async", r"mma\.sync") if target is _HOPPER else (r"mma\.sync", r"wgmma\.mma_async")
    for name, code in codes.items():
        assert code.spill_bytes == 0, name
        assert code.has(r"cp\.async\.cg"), name
        assert code.has(r"st\.global\.v4\.b32"), name
        assert code.has(r"bar\.sync"), name
        if name == "fp32":
            assert not code.has(own)
            assert code.has(r"fma\.rn\.f32")
            continue
        assert code.has(own), name
        assert not code.has(other), name
        assert code.has(rf"\S*mma\S*\.{_OPERANDS[name]}\."), name
    for name in ("bf16", "fp16", "tf32", "fp32"):
        assert codes[name].narrow_loads <= 16, name  # of the bias


@pytest.mark.parametrize("target", [_AMPERE, _HOPPER], ids=["sm_80", "sm_90"])
def test_memory_bound_ones_read_16_bytes_at_once(target: Target, workers: KernelCompiler, tmp_path: Path) -> None:
    """The matrix of a thin product, whichever axis is contiguous, and images whose channels are: no tensor cores, no spills."""
    matrix, row = torch.empty(4096, 4096, dtype=_bf16), torch.empty(1, 4096, dtype=_bf16)
    images = (_image(8, 192, 56, 56), torch.empty(192, 1, 3, 3, dtype=_bf16), torch.empty(192, dtype=_bf16))
    codes = _codes(
        {
            "along k": (_kernel(torch.nn.functional.linear, (row, matrix), target), target),
            "across k": (_kernel(torch.mm, (row, matrix), target), target),
            "vector": (_kernel(torch.mv, (matrix, row[0]), target), target),
            "float32": (_kernel(torch.nn.functional.linear, (row.float(), matrix.float()), target), target),
            "depthwise": (_kernel(_convolve, images, target), target),
        },
        workers,
        tmp_path,
    )
    for name, code in codes.items():
        assert code.wide_loads, name
        assert not code.has(r"\S*mma"), name
        assert code.has(r"fma\.rn\.f32"), name
        assert code.spill_bytes == 0, name
    for name in ("along k", "vector", "float32"):
        assert codes[name].narrow_loads <= 3, name  # of the vector, which one thread in two has a part of


def _square(n: int, *batch: int) -> torch.Tensor:
    return torch.empty(*batch, n, n, dtype=_half)


_PRODUCTS: Mapping[str, tuple[Callable[..., torch.Tensor], Tensors]] = {
    "linear": (_linear, _operands(4096, 4096, 4096, _bf16)),
    "turned": (lambda a, b: a.t() @ b, (_square(4096), _square(4096))),
    "batched": (torch.bmm, (_square(1024, 16), _square(1024, 16))),
    "tf32": (_linear, _operands(4096, 4096, 4096, torch.float32)),
}


def _product(name: str, target: Target) -> tuple[MatMulKernel, Target]:
    function, inputs = _PRODUCTS[name]
    own = dataclasses.replace(target, tf32=name == "tf32")
    kernel = _kernel(function, inputs, own)
    assert isinstance(kernel, MatMulKernel)
    return kernel, own


def _persistent(name: str) -> dict[str, tuple[Kernel, Target]]:
    """A product by each tiling of persistent programs that fits a Hopper."""
    kernel, target = _product(name, _HOPPER)
    found = tilings.persistent(matmul.work_of(kernel, target), target)
    return {f"{name} {tiling.name}": (tiled(kernel, tiling)[0], target) for tiling in found}


def _check_copied(codes: Mapping[str, _Code]) -> None:
    for name, code in codes.items():
        assert code.has(r"cp\.async\.bulk\.tensor"), name
        assert not code.has(r"cp\.async\.c[ag]"), name
        assert code.has(r"wgmma\.mma_async"), name
        assert not code.has(r"mma\.sync"), name
        assert code.has(r"st\.global\.v4\.b32"), name
        # A descriptor is made in memory that another kernel had before: what the accelerator knows of that memory is out of date.
        assert code.has(r"fence\.proxy\.tensormap::generic\.acquire\.gpu") == 2, name
        assert code.scratch_bytes == 256, name
        assert code.spill_bytes == 0, name
        assert code.shared_bytes <= 227 << 10, name


def test_operands_of_persistent_products_are_copied_by_tma(workers: KernelCompiler, tmp_path: Path) -> None:
    """Both, in every order of memory and of batches, with descriptors of 128 bytes each, for `wgmma`; nothing is spilled."""
    first = {name: kernel for of in _PRODUCTS for name, kernel in [next(iter(_persistent(of).items()))]}
    _check_copied(_codes(first, workers, tmp_path))


@pytest.mark.parametrize("target", [_AMPERE, _HOPPER], ids=["sm_80", "sm_90"])
def test_shared_products(target: Target, workers: KernelCompiler, tmp_path: Path) -> None:
    """Tensor cores, with operands copied ahead; sums are stored and read 16 bytes a thread. Nothing is spilled, nothing waits for another
    program, and nothing is added by an atomic operation."""
    kernel, target = _product("linear", target)
    tiling = Tiling(128, 256 if target.capability == 90 else 128, 64, 8, 3, shared=30, sharers=100)
    kernels = {name: (each, target) for name, each in zip(("shares", "sums"), tiled(kernel, tiling), strict=True)}
    codes = _codes(kernels, workers, tmp_path)
    for name, code in codes.items():
        assert code.has(r"cp\.async\.cg"), name
        assert code.has(r"st\.global\.v4\.b32"), name
        assert not code.has(r"(?:atom|red|ld\.acquire)\."), name
        assert code.spill_bytes == code.scratch_bytes == 0, name
    assert codes["shares"].has(r"wgmma\.mma_async" if target.capability == 90 else r"mma\.sync")


@pytest.mark.full
def test_what_shared_and_persistent_products_take(workers: KernelCompiler, tmp_path: Path, golden: Golden) -> None:
    """Shared and persistent products take what they took: of each shape of persistent tiles, and of some shared ones. Nothing is spilled."""
    copied = {name: kernel for of in _PRODUCTS for name, kernel in _persistent(of).items()}
    kernels = dict(copied)
    for target in (_AMPERE, _HOPPER):
        kernel, _ = _product("linear", target)
        for rows, columns, warps, stages in ((128, 128, 8, 3), (64, 128, 4, 4), (64, 64, 4, 4)):
            tiling = Tiling(rows, columns, 64, warps, stages, shared=30, sharers=100)
            for number, each in enumerate(tiled(kernel, tiling)):
                kernels[f"{tiling.name}, kernel {number}, sm_{target.capability}"] = each, target
    codes = _codes(kernels, workers, tmp_path)
    _check_copied({name: codes[name] for name in copied})
    lines = []
    for name, code in codes.items():
        assert code.spill_bytes == 0, name
        lines.append(f"{name}: {code.registers} registers, {code.shared_bytes} bytes shared")
    if compiler.version() == "3.7.1":  # that in constraints.txt
        golden.check("\n".join(lines))


@pytest.mark.full
@pytest.mark.parametrize("target", [_AMPERE, _HOPPER], ids=["sm_80", "sm_90"])
def test_no_tiling_spills(target: Target, workers: KernelCompiler, tmp_path: Path) -> None:
    """Each shape of tile that the model may propose, with an epilogue. All fit the chip's shared memory."""
    kernels: dict[str, tuple[Kernel, Target]] = {}
    for dtype, tf32 in ((_bf16, False), (torch.float32, True), (torch.float32, False), (torch.float64, False)):
        own = Target(target.capability, target.multiprocessors, tf32)
        kernel = _kernel(_linear, _operands(4096, 4096, 4096, dtype), own)
        assert isinstance(kernel, MatMulKernel)
        work = tilings.Work(1, 4096, 4096, 4096, str(dtype).removeprefix("torch."), 1, 4096, tf32)
        found = [tiling for tiling, _ in tilings.ranked(work, own) if tiling.splits == 1]
        for tiling in (*found, Tiling(16, 32, found[0].depth, splits=4)):
            (first, *_) = tiled(kernel, tiling)
            kernels[f"{dtype} {tf32} {tiling.name}"] = (first, own)
    for shape, image in (
        ("stem", (_image(8, 3, 224, 224), _image(64, 3, 7, 7), torch.empty(64, dtype=_bf16))),
        ("groups", (_image(8, 256, 28, 28), _image(256, 32, 3, 3), torch.empty(256, dtype=_bf16))),
        ("depthwise 7x7", (_image(8, 96, 28, 28), torch.empty(96, 1, 7, 7, dtype=_bf16), torch.empty(96, dtype=_bf16))),
        ("depthwise rows", (torch.empty(8, 96, 28, 28), torch.empty(96, 1, 7, 7), torch.empty(96))),
    ):
        kernel = _kernel(_convolve, image, target)
        kernels[shape] = (kernel, target)
        kernels.update((f"{shape} {v.name}", (v.kernels[0], target)) for v in alternatives(kernel, target))
    for name, code in _codes(kernels, workers, tmp_path).items():
        assert code.spill_bytes == 0, name
        assert code.shared_bytes <= (227 if target is _HOPPER else 163) << 10, name
