"""Products with a quantized weight, against float64 of the dequantized weight."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, compile_kernel, row_major, run_kernel
from torch_hybrid_backend.engines.cpu.dot_products import ROW_PARTS, row_group
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.packing import pack_b, pack_bytes, pack_nibbles
from torch_hybrid_backend.engines.cpu.schedules.matmul import weight_only
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import Quantized
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load
from torch_hybrid_backend.loops.kernels import Store

_FLOAT = "float32"
TARGETS = {"host": HOST, "narrow": NARROW}


def kernel_of(
    m: int,
    k: int,
    n: int,
    target: Target,
    bits: int,
    group: int = 0,
    *,
    dtype: str = "int8",
    zeros: bool = False,
    looked_up: bool = False,
    in_words: bool = False,
    scaled_by: str = _FLOAT,
    row_parts: int = 3,
) -> CpuMatMulKernel[Quantized]:
    """out = relu(a @ dequantized + bias) * residual; reads a, weight, scales, bias, residual, zeros, a table. `group` 0: one for all of k.

    in_words: weights of 8 bits lie as those of 4 do, in words along k. scaled_by: the scales' dtype. row_parts: see the kernel."""
    tile, group = 2 * target.lanes, group or k
    panels, groups = -(-n // tile), -(-k // group)
    a, bias, residual, result = (
        Buffer(s, _FLOAT, name)
        for s, name in [((1, m, k), "a"), ((n,), "bias"), ((1, m, n), "residual"), ((1, m, n), "out")]
    )
    in_words = in_words or bits == 4
    packed = Buffer((1, panels, k * bits // 32 if in_words else k, tile), "int32" if in_words else dtype, "weight")
    scales, moved = (
        Buffer((1, panels, groups, tile), kind, name) for name, kind in (("scales", scaled_by), ("zeros", _FLOAT))
    )
    table = Buffer((16,), _FLOAT, "table") if looked_up else None
    accumulator = Buffer((1, m, n), _FLOAT, "acc")
    domain, depth = (LoopVar("b", 1), LoopVar("m", m), LoopVar("n", n)), LoopVar("k", k)
    point = tuple(map(index_of, domain))
    value: Expr = ops.call("max", ops.add(accumulator.at(point), bias.at(point[2:])), ops.const(0, _FLOAT))
    value = ops.mul(value, residual.at(point))
    read = (a, packed, scales, bias, residual, *([moved] if zeros else []), *([table] if table else []))
    weight = Quantized(
        buffer=packed,
        bits=bits,
        scales=scales,
        zeros=moved if zeros else None,
        group=group,
        width=tile,
        table=table,
        row_parts=row_parts,
    )
    return CpuMatMulKernel(
        reads=tuple(map(row_major, read)),
        writes=(row_major(result),),
        domain=domain,
        k=depth,
        a=Load(_FLOAT, a, (*point[:2], index_of(depth))),
        weight=weight,
        accumulator=accumulator,
        stores=(Store(result, point, value),),
    )


def packed_weight(q: torch.Tensor, weight: Quantized) -> torch.Tensor:
    """The integers (1, k, n) as the weight's."""
    if weight.bits == 4:
        return pack_nibbles(q, weight.width)
    if weight.buffer.dtype == "int32":
        return pack_bytes(q.to(torch.int8), weight.width)
    return pack_b(q.to(getattr(torch, weight.buffer.dtype)), weight.width)


def check(kernel: CpuMatMulKernel[Quantized], target: Target, emit: Callable[..., Any] = weight_only.emit) -> None:
    """The result is within 1e-6 of float64's, relative to the sum of the products' magnitudes, or what rows that may be rounded lose."""
    a, weight, scales, bias, residual, *_ = (argument.buffer for argument in kernel.reads)
    (_, _, k), (n,), quantized = a.shape, bias.shape, kernel.weight
    group, bits, tile = quantized.group, quantized.bits, quantized.width
    torch.manual_seed(0)
    low, high = (-8, 8) if bits == 4 else (0, 256) if weight.dtype == "uint8" else (-128, 128)
    q = torch.randint(low, high, (1, k, n))
    q[0, :, 0], q[0, :, -1] = low, high - 1
    scale = (torch.randn(1, -(-k // group), n) / high).to(getattr(torch, scales.dtype))
    zero = torch.randint(low, high, scale.shape) if quantized.zeros else torch.zeros_like(scale)
    inputs = {buffer: torch.randn([int(size) for size in buffer.shape]) for buffer in (a, bias, residual)}
    half = {"bfloat16": torch.bfloat16, "float16 split": torch.float16}.get(quantized.tile_format)
    may_round = half is not None and quantized.row_parts == 1  # floats, and weights, that tiles round to bfloat16
    if half is not None and not may_round:  # as what is read by `a` would be
        inputs[a] = inputs[a].to(half).float()
    inputs[weight] = packed_weight(q, quantized)
    inputs[scales] = pack_b(scale, tile)
    scale = scale.float()
    if quantized.zeros is not None:
        inputs[quantized.zeros] = pack_b(zero.float(), tile)
    if quantized.table is not None:
        inputs[scales], inputs[quantized.table] = torch.ones_like(inputs[scales]), torch.randn(16)
        scale = torch.ones_like(scale)
    (got,) = run_kernel(kernel, emit, inputs, target)
    values = q if quantized.table is None else inputs[quantized.table][q % 16]
    moved, scaled = (x.double().repeat_interleave(group, 1)[:, :k] for x in (zero, scale))
    w = (values.double() - moved) * scaled
    if half == torch.bfloat16 and not may_round:
        w = (
            ((values - zero.float().repeat_interleave(group, 1)[:, :k]) * scale.repeat_interleave(group, 1)[:, :k])
            .to(half)
            .double()
        )
    x = inputs[a].double()
    want = torch.relu(x @ w + inputs[bias].double()) * inputs[residual].double()
    size = (x.abs() @ w.abs() + inputs[bias].double().abs()) * inputs[residual].double().abs()
    allowed = 1e-6 * size
    if may_round:
        allowed += (2**-8 + 2**-18) * size
    elif quantized.row_parts < ROW_PARTS:
        # Half a step of 7 or 15 bits of the largest of its group is what an element of a row may be off by.
        own = row_group(min(group, k), quantized.row_parts, target) or 1
        largest = x.abs().view(1, -1, k // own, own).amax(3).repeat_interleave(own, 2)
        allowed += (largest / (2 * (127 << 8 * (quantized.row_parts - 1)))) @ w.abs() * inputs[residual].double().abs()
    assert ((got.double() - want).abs() <= allowed).all()


_FEW_OF_EACH = [("host", 1), ("host", 3), ("host", 33), ("narrow", 2), ("narrow", 8), ("narrow", 129)]
_ROWS = [
    pytest.param(TARGETS[name], m, id=f"{name}-{m}", marks=[] if (name, m) in _FEW_OF_EACH else pytest.mark.full)
    for name in TARGETS
    for m in (1, 2, 3, 8, 33, 129)
]


@pytest.mark.parametrize(("target", "m"), _ROWS)
def test_bytes_match_float64(target: Target, m: int) -> None:
    """Weights of 8 bits: a scale per column or per group, with and without zero points, any number of columns and of k."""
    check(kernel_of(m, 67, 37, target, 8), target)
    check(kernel_of(m, 1100, 97, target, 8, dtype="uint8", zeros=True), target)
    check(kernel_of(m, 1056, 64, target, 8, 32), target)
    check(kernel_of(m, 1056, 64, target, 8, 32, in_words=True), target)
    check(kernel_of(m, 1536, 37, target, 8, in_words=True), target)
    check(kernel_of(m, 100, 64, target, 8, zeros=True, in_words=True), target)  # no whole vectors of k


@pytest.mark.parametrize(("target", "m"), _ROWS)
def test_nibbles_match_float64(target: Target, m: int) -> None:
    """Weights of 4 bits in groups of 32 and 128, with and without zero points."""
    check(kernel_of(m, 96, 37, target, 4, 32), target)
    check(kernel_of(m, 1152, 97, target, 4, 128, zeros=True), target)
    check(kernel_of(m, 40, 64, target, 4), target)
    check(kernel_of(m, 96, 37, target, 4, 32, scaled_by="bfloat16"), target)
    check(kernel_of(m, 96, 64, target, 4, 32, zeros=True, scaled_by="float16"), target)


@pytest.mark.parametrize(("target", "m"), _ROWS)
def test_tables_match_float64(target: Target, m: int) -> None:
    """Weights of 4 bits that say which of 16 values they are."""
    check(kernel_of(m, 96, 37, target, 4, looked_up=True), target)
    check(kernel_of(m, 1152, 64, target, 4, looked_up=True), target)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("copies", [1, 2])
def test_special_activations(copies: int, bits: int) -> None:
    """Infinities, NaN, small and large numbers give what they give with the dequantized weight, in few rows and in many."""
    specials = (0.0, torch.inf, -torch.inf, torch.nan, 1e36, 1e-38) * copies
    m, k, n, tile = len(specials), 64, 48, 2 * HOST.lanes
    kernel = kernel_of(m, k, n, HOST, bits, 32)
    a, weight, scales, bias, residual = (argument.buffer for argument in kernel.reads)
    torch.manual_seed(0)
    q = torch.randint(1, 8, (1, k, n)) * torch.tensor([1, -1]).repeat(n // 2)
    x = torch.randn(1, m, k)
    x[0, torch.arange(m), 33] = torch.tensor(specials)
    x[0, -1, :33] = x[0, -1, 34:] = 0
    inputs = {a: x, weight: pack_nibbles(q, tile) if bits == 4 else pack_b(q.to(torch.int8), tile)}
    inputs |= {scales: pack_b(torch.full((1, 2, n), 0.125), tile), bias: torch.zeros(n)}
    inputs[residual] = torch.ones(1, m, n)
    (got,) = run_kernel(kernel, weight_only.emit, inputs)
    torch.testing.assert_close(got, torch.relu(x @ (q * 0.125)), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="looks for x86's instructions")
@pytest.mark.parametrize("mcpu", ["x86-64-v4", "x86-64-v3"])
@pytest.mark.parametrize(("m", "bits", "looked_up"), [(1, 4, False), (1, 8, False), (40, 4, False), (1, 4, True)])
def test_machine_code(m: int, bits: int, looked_up: bool, mcpu: str) -> None:
    """Integers are widened, masked and converted, or looked up, in whole vectors; sums stay in registers, nothing is gathered; lines are asked
    for ahead."""
    lanes, register = (16, "zmm") if mcpu == "x86-64-v4" else (8, "ymm")
    features = ("avx2", "avx512f", "fma") if lanes == 16 else ("avx2", "fma")
    target = Target(mcpu, HOST.cpu, features, lanes, 2, 32 << 10, 512 << 10)
    kernel = kernel_of(m, 512, 128, target, bits, 0 if looked_up else 32, looked_up=looked_up)
    assembly = compile_kernel(kernel, weight_only.emit, target).inspect_source("asm")
    multiply_adds = re.findall(r"vfmadd\w*ps\s+(.*)", assembly)
    assert len([line for line in multiply_adds if register in line]) >= 16
    assert not [line for line in multiply_adds if "%rsp" in line]
    assert not re.search(r"vp?gather|cvtsi2ss", assembly)
    if lanes == 16:  # of 16 registers LLVM keeps a few sums of groups on the stack while it runs through the next group
        assert not re.search(r"vmov[au]p[sd]\s+(?:-?\d*\(%rsp\), %zmm|%zmm\d+, -?\d*\(%rsp\))", assembly)
    if looked_up:
        # LLVM takes the instruction for integers where the places were shifted, which is the same but for its name.
        places = re.findall(rf"vperm(?:ps|d)\s+.*%{register}\d+$", assembly, flags=re.MULTILINE)
        assert len(places) >= 32
        return
    conversions = re.findall(rf"vcvtdq2ps\s+.*%{register}\d+$", assembly, flags=re.MULTILINE)
    assert len(conversions) >= (16 if bits == 4 else 2)
    if bits == 8:
        assert re.search(rf"vpmovsxbd\s+.*%{register}\d+$", assembly, flags=re.MULTILINE)
    assert "prefetch" in assembly
