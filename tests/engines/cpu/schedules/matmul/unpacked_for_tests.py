"""Products with a weight that is read where it lies, against float64."""

from __future__ import annotations

import torch

from tests.engines.cpu.schedule_runner import HOST, row_major, run_kernel
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.schedules.matmul import unpacked
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import InPlace
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Layout, contiguous
from torch_hybrid_backend.sizes.size import known_int

_FLOAT = "float32"


def kernel_of(
    m: int,
    k: int,
    n: int,
    *,
    offset: int = 0,
    row_stride: int = 0,
    k_stride: int = 1,
    a_layout: Layout | None = None,
    out: Layout | None = None,
) -> CpuMatMulKernel[InPlace]:
    """out = relu(a @ w.t() + bias) * residual; reads a, weight, bias, residual."""
    row_stride = row_stride or (k if k_stride == 1 else 1)
    a, bias, residual, result = (
        Buffer(s, _FLOAT, name)
        for s, name in [((1, m, k), "a"), ((n,), "bias"), ((1, m, n), "residual"), ((1, m, n), "out")]
    )
    weight = Buffer((offset + max(n * row_stride, k * k_stride),), _FLOAT, "weight")
    accumulator = Buffer((1, m, n), _FLOAT, "acc")
    domain = (LoopVar("b", 1), LoopVar("m", m), LoopVar("n", n))
    depth = LoopVar("k", k)
    point = tuple(map(index_of, domain))
    value: Expr = ops.call("max", ops.add(accumulator.at(point), bias.at(point[2:])), ops.const(0, _FLOAT))
    value = ops.mul(value, residual.at(point))
    return CpuMatMulKernel(
        reads=(Argument(a, a_layout or contiguous(a.shape)), row_major(weight), row_major(bias), row_major(residual)),
        writes=(Argument(result, out or contiguous(result.shape)),),
        domain=domain,
        k=depth,
        a=Load(_FLOAT, a, (*point[:2], index_of(depth))),
        weight=InPlace(buffer=weight, offset=offset, row_stride=row_stride, k_stride=k_stride),
        accumulator=accumulator,
        stores=(Store(result, point, value),),
    )


def check(kernel: CpuMatMulKernel[InPlace], target: Target = HOST) -> None:
    """The kernel's result is within 1e-5 of float64 eager."""
    a, weight, bias, residual = (argument.buffer for argument in kernel.reads)
    _, _, k = a.shape
    k, n = known_int(k), known_int(bias.shape[0])
    torch.manual_seed(0)
    inputs = {buffer: torch.randn([int(size) for size in buffer.shape]) for buffer in (a, weight, bias, residual)}
    (got,) = run_kernel(kernel, unpacked.emit, inputs, target)
    lies = kernel.weight
    w = inputs[weight].as_strided((n, k), (lies.row_stride, lies.k_stride), lies.offset)
    want = torch.relu(inputs[a].double() @ w.double().t() + inputs[bias].double()) * inputs[residual].double()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * max(1.0, float(want.abs().max())))
