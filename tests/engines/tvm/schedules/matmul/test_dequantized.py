"""Products with a quantised weight, against float64 of the dequantised weight."""

from __future__ import annotations

import platform
import re

import pytest
import torch

from tests.engines.tvm.schedule_runner import HOST, NARROW, compile_kernel, row_major, run_kernel
from torch_hybrid_backend.engines.tvm.cpu.kernels import DequantizedMatMulKernel
from torch_hybrid_backend.engines.tvm.cpu.packing import pack_b, pack_nibbles
from torch_hybrid_backend.engines.tvm.schedules.matmul import dequantized
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load
from torch_hybrid_backend.loops.kernels import Store

_FLOAT = "float32"


def kernel_of(
    m: int, k: int, n: int, target: Target, bits: int, group: int = 0, *, dtype: str = "int8", zeros: bool = False
) -> DequantizedMatMulKernel:
    """out = relu(a @ dequantised + bias) * residual; reads a, weight, scales, bias, residual and zeros. `group` 0: one for all of k."""
    tile, group = 2 * target.lanes, group or k
    panels, groups = -(-n // tile), -(-k // group)
    a, bias, residual, result = (
        Buffer(s, _FLOAT, name)
        for s, name in [((1, m, k), "a"), ((n,), "bias"), ((1, m, n), "residual"), ((1, m, n), "out")]
    )
    packed = Buffer((1, panels, k // 8 if bits == 4 else k, tile), "int32" if bits == 4 else dtype, "weight")
    scales, moved = (Buffer((1, panels, groups, tile), _FLOAT, name) for name in ("scales", "zeros"))
    accumulator = Buffer((1, m, n), _FLOAT, "acc")
    domain, depth = (LoopVar("b", 1), LoopVar("m", m), LoopVar("n", n)), LoopVar("k", k)
    point = tuple(map(index_of, domain))
    value: Expr = ops.call("max", ops.add(accumulator.at(point), bias.at(point[2:])), ops.const(0, _FLOAT))
    value = ops.mul(value, residual.at(point))
    return DequantizedMatMulKernel(
        tuple(map(row_major, (a, packed, scales, bias, residual, *([moved] if zeros else [])))),
        (row_major(result),),
        domain,
        depth,
        Load(_FLOAT, a, (*point[:2], index_of(depth))),
        packed,
        bits,
        scales,
        moved if zeros else None,
        group,
        tile,
        accumulator,
        (Store(result, point, value),),
    )


def check(kernel: DequantizedMatMulKernel, target: Target) -> None:
    """The result is within 1e-6 of float64's, relative to the sum of the products' magnitudes."""
    a, weight, scales, bias, residual, *_ = (argument.buffer for argument in kernel.reads)
    (_, m, k), (n,), group, bits, tile = a.shape, bias.shape, kernel.group, kernel.bits, kernel.tile_n
    torch.manual_seed(0)
    low, high = (-8, 8) if bits == 4 else (0, 256) if weight.dtype == "uint8" else (-128, 128)
    q = torch.randint(low, high, (1, k, n))
    q[0, :, 0], q[0, :, -1] = low, high - 1
    scale = torch.randn(1, -(-k // group), n) / high
    zero = torch.randint(low, high, scale.shape) if kernel.zeros else torch.zeros_like(scale)
    inputs = {buffer: torch.randn([int(size) for size in buffer.shape]) for buffer in (a, bias, residual)}
    inputs[weight] = pack_nibbles(q, tile) if bits == 4 else pack_b(q.to(getattr(torch, weight.dtype)), tile)
    inputs[scales] = pack_b(scale, tile)
    if kernel.zeros is not None:
        inputs[kernel.zeros] = pack_b(zero.float(), tile)
    (got,) = run_kernel(kernel, dequantized.emit, inputs, target)
    each = (x.double().repeat_interleave(group, 1)[:, :k] for x in (zero, scale))
    moved, scaled = each
    w = (q.double() - moved) * scaled
    x = inputs[a].double()
    want = torch.relu(x @ w + inputs[bias].double()) * inputs[residual].double()
    size = (x.abs() @ w.abs() + inputs[bias].double().abs()) * inputs[residual].double().abs()
    # What is subtracted from an integer is exact, but the sums are of what is left: nothing cancels that does not in eager.
    assert float(((got.double() - want).abs() / size).max()) < 1e-6


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("m", [1, 2, 3, 8, 33, 129])
def test_bytes_match_float64(m: int, target: Target) -> None:
    """Weights of 8 bits: a scale per column or per group, with and without zero points, any number of columns and of k."""
    check(kernel_of(m, 67, 37, target, 8), target)
    check(kernel_of(m, 1100, 97, target, 8, dtype="uint8", zeros=True), target)
    check(kernel_of(m, 1056, 64, target, 8, 32), target)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("m", [1, 2, 3, 8, 33, 129])
def test_nibbles_match_float64(m: int, target: Target) -> None:
    """Weights of 4 bits in groups of 32 and 128, with and without zero points."""
    check(kernel_of(m, 96, 37, target, 4, 32), target)
    check(kernel_of(m, 1152, 97, target, 4, 128, zeros=True), target)
    check(kernel_of(m, 40, 64, target, 4), target)
