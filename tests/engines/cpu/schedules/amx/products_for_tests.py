"""Products of matrices on AMX's tiles, as kernels to compile and to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from tests.engines.cpu.schedule_runner import HOST, compile_kernel, offsets, row_major, to_memory
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.operands.packing import pack_tiles
from torch_hybrid_backend.engines.cpu.schedules.matmul.amx import emit
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import AmxTiles
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Load, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Layout, contiguous
from torch_hybrid_backend.sizes.size import Dim, known_int

# This machine, with the vectors and the caches of a processor that has AMX.
TILES_HOST = dataclasses.replace(HOST, lanes=16, cores=2, l1_bytes=48 << 10, l2_bytes=2 << 20)
# Small caches and many cores: more, smaller tasks.
TILES_NARROW = dataclasses.replace(TILES_HOST, cores=5, l2_bytes=256 << 10)

Shape = tuple[int, int, int, int]


def kernel_of(
    shape: tuple[Dim, Dim, int, int],
    name: str,
    *,
    batched: bool = False,
    a_layout: Layout | None = None,
    out_layout: Layout | None = None,
) -> CpuMatMulKernel[AmxTiles]:
    """out = relu(a @ b + residual) for (batch, m, k, n); int32 for integers, without ReLU; reads a, packed, residual."""
    batch, m, k, n = shape
    form = FORMATS[name]
    a_dtype, result = form.operand, form.sums
    a, residual, out = (
        Buffer(size, dtype, stem)
        for size, dtype, stem in [
            ((batch, m, k), a_dtype, "a"),
            ((batch, m, n), result, "residual"),
            ((batch, m, n), result, "out"),
        ]
    )
    packed = Buffer(form.packed_shape(known_int(batch) if batched else 1, k, n), form.dtype, "packed")
    accumulator = Buffer((batch, m, n), form.sums, "acc")
    domain, depth = (LoopVar("b", batch), LoopVar("m", m), LoopVar("n", n)), LoopVar("k", k)
    point = tuple(map(index_of, domain))
    value = ops.add(accumulator.at(point), residual.at(point))
    if result == "float32":
        value = ops.call("max", value, ops.const(0, result))
    return CpuMatMulKernel(
        reads=(Argument(a, a_layout or contiguous(a.shape)), row_major(packed), row_major(residual)),
        writes=(Argument(out, out_layout or contiguous(out.shape)),),
        domain=domain,
        k=depth,
        a=Load(compute_dtype(a_dtype), a, (*point[:2], index_of(depth))),
        weight=AmxTiles(buffer=packed, tile_format=name, is_batched=batched),
        accumulator=accumulator,
        stores=(Store(out, point, value),),
    )


def operands_of(shape: Shape, name: str, batched: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """a (batch, m, k) and b (batch or 1, k, n), integers of all values."""
    batch, m, k, n = shape
    form = FORMATS[name]
    sizes = (batch, m, k), (batch if batched else 1, k, n)
    torch.manual_seed(0)
    if form.sums == "int32":
        low = {"int8": -128, "uint8": 0}
        a, b = (
            torch.randint(low[dtype], low[dtype] + 256, size).to(getattr(torch, dtype))
            for size, dtype in zip(sizes, (form.operand, form.dtype), strict=True)
        )
        return a, b
    dtype = getattr(torch, form.operand)
    return torch.randn(sizes[0]).to(dtype), torch.randn(sizes[1]).to(dtype)


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def compiled(kernel: CpuMatMulKernel[AmxTiles], target: Target = TILES_HOST) -> Product:
    """The kernel as a function of a and b, without the residual: what is added is zero, and nothing is cut off."""
    (out,), point = kernel.writes, tuple(map(index_of, kernel.domain))
    plain = dataclasses.replace(kernel, stores=(Store(out.buffer, point, kernel.accumulator.at(point)),))
    read_a, _, residual = kernel.reads
    function = compile_kernel(plain, emit, target)["kernel"]

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(residual.span, dtype=getattr(torch, residual.buffer.dtype))
        got = torch.full((out.span,), 77, dtype=getattr(torch, out.buffer.dtype))
        function(to_memory(a, read_a.layout), pack_tiles(b, FORMATS[kernel.weight.tile_format]), zeros, got)
        return got[offsets(out.buffer.shape, out.layout)]

    return product


def run(
    kernel: CpuMatMulKernel[AmxTiles], a: torch.Tensor, b: torch.Tensor, target: Target = TILES_HOST
) -> torch.Tensor:
    """`compiled`, once."""
    return compiled(kernel, target)(a, b)


def errors(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each element's error over |A| |B|, which is what a rounding of each product costs."""
    return (got.double() - a.double() @ b.double()).abs() / (a.double().abs() @ b.double().abs())
