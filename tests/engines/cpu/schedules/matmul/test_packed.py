"""MatMul schedule: every tile shape against float64 eager."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.engines.cpu.schedule_runner import APART, HOST, NARROW, compile_kernel, row_major, run_kernel
from torch_hybrid_backend.engines.cpu import tile_sizes
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands import packing
from torch_hybrid_backend.engines.cpu.schedules.matmul.packed import emit
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import Panels
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided, contiguous


def kernel_of(
    shape: tuple[int, int, int, int],
    target: Target = HOST,
    dtype: str = "float32",
    batched: bool = False,
    long_epilogue: bool = False,
    out_layout: Layout | None = None,
) -> CpuMatMulKernel[Panels]:
    """out = relu(a @ b + bias) * residual, and for long epilogues more of it; reads a, packed, bias, residual."""
    batch, m, k, n = shape
    tile = tile_sizes.tile_n(n, target)
    compute = compute_dtype(dtype)
    a, bias, residual, out = (
        Buffer(s, dtype, name)
        for s, name in [((batch, m, k), "a"), ((n,), "bias"), ((batch, m, n), "residual"), ((batch, m, n), "out")]
    )
    packed = Buffer(packing.packed_b_shape(batch if batched else 1, n, k, tile), dtype, "packed")
    accumulator = Buffer((batch, m, n), compute, "acc")
    domain = (LoopVar("b", batch), LoopVar("m", m), LoopVar("n", n))
    depth = LoopVar("k", k)
    point = tuple(map(index_of, domain))
    value: Expr = ops.call("max", ops.add(accumulator.at(point), bias.at(point[2:])), ops.const(0, compute))
    value = ops.mul(value, residual.at(point))
    for _ in range(4 * long_epilogue):
        value = ops.add(ops.mul(value, ops.const(2, compute)), residual.at(point))
    layout = out_layout or contiguous(out.shape)
    return CpuMatMulKernel(
        reads=(row_major(a), row_major(packed), row_major(bias), row_major(residual)),
        writes=(Argument(out, layout),),
        domain=domain,
        k=depth,
        a=Load(compute, a, (*point[:2], index_of(depth))),
        weight=Panels(buffer=packed, width=tile),
        accumulator=accumulator,
        stores=(Store(out, point, value),),
    )


def check(
    shape: tuple[int, int, int, int],
    *,
    target: Target = HOST,
    dtype: str = "float32",
    batched: bool = False,
    long_epilogue: bool = False,
    out_layout: Layout | None = None,
) -> None:
    """The kernel's result is within 1e-5 (1e-2 for bfloat16) of float64 eager."""
    batch, m, k, n = shape
    kernel = kernel_of(shape, target, dtype, batched, long_epilogue, out_layout)
    a, packed, bias, residual = (argument.buffer for argument in kernel.reads)
    tile = kernel.weight.width
    torch.manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        values = torch.randint(-8, 9, size) if not dtype.startswith(("float", "bfloat")) else torch.randn(size)
        return values.to(getattr(torch, dtype))

    at, bt, biast, rest = random(batch, m, k), random(batch if batched else 1, k, n), random(n), random(batch, m, n)
    inputs = {a: at, packed: packing.pack_b(bt, tile), bias: biast, residual: rest}
    (got,) = run_kernel(kernel, emit, inputs, target)
    want = torch.relu(at.double() @ bt.double() + biast.double()) * rest.double()
    for _ in range(4 * long_epilogue):
        want = want * 2 + rest.double()
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("target", [HOST, NARROW, APART], ids=["host", "narrow", "apart"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1),
        (1, 7, 5, 3),  # less than a vector of columns
        (1, 29, 67, 37),  # ragged rows, k and columns
        (1, 50, 64, 64),
        (1, 23, 1024, 40),  # rows of A compete for the first-level cache
        (1, 1, 130, 70),  # one row: several accumulators per column
        (3, 2, 31, 48),
        (2, 30, 200, 1),  # one column: a dot product
        (1, 1, 300, 1),
        (2, 5, 3, 1),
    ],
)
def test_matches_eager(shape: tuple[int, int, int, int], target: Target) -> None:
    """(batch, m, k, n) of every tile variant."""
    check(shape, target=target)


def test_blocks_of_rows() -> None:
    """More rows than the second-level cache holds: rows are visited in blocks."""
    check((1, 311, 96, 40), target=NARROW)


def test_each_batch_has_its_own_right_operand() -> None:
    """`batched_b`: panels are taken from the batch's own packed matrix."""
    check((3, 13, 17, 47), batched=True)


@pytest.mark.parametrize("n", [32, 45])
def test_long_epilogues_run_from_a_spilled_tile(n: int) -> None:
    """An epilogue of many operations gives the same values."""
    check((1, 19, 33, n), long_epilogue=True)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int32", "int64"])
def test_dtypes(dtype: str) -> None:
    """Accumulation is in the compute dtype: float32 for bfloat16, the dtype itself otherwise."""
    check((2, 9, 33, 70), dtype=dtype)


@pytest.mark.parametrize("layout", [Strided((13 * 40, 1, 13)), Blocked(4)])
def test_any_output_layout(layout: Layout) -> None:
    """The stores go where the layout says, vectorised or not."""
    check((1, 13, 20, 40), out_layout=layout)


# A panel for each core, the last of them ragged, and more than that.
@pytest.mark.parametrize(("n", "prefetches"), [(HOST.cores * tile_sizes.tile_n(400, HOST) - 8, False), (400, True)])
def test_the_next_panel_is_prefetched(n: int, prefetches: bool) -> None:
    """A core that goes through several panels asks for the next while it works on one. The stores read the sums alone."""
    kernel = kernel_of((1, 30, 64, n))
    (own,) = kernel.stores
    plain = dataclasses.replace(kernel, stores=(Store(own.buffer, own.index, kernel.accumulator.at(own.index)),))
    assert ("prefetch" in compile_kernel(plain, emit).inspect_source("asm")) == prefetches
    assert "prefetch" in compile_kernel(kernel, emit).inspect_source("asm")  # the residual


def product_loops(assembly: str) -> list[str]:
    """The loops over k of a kernel for x86."""
    labels = re.split(r"^(\.L\w+):", assembly, flags=re.MULTILINE)
    loops = []
    for label, body in zip(labels[1::2], labels[2::2], strict=True):
        end = re.search(rf"\tj\w+\s+{re.escape(label)}$", body, flags=re.MULTILINE)
        if end is not None and "vfmadd231ps" in body[: end.start()] and "vbroadcastss" in body[: end.start()]:
            loops.append(body[: end.start()])
    return loops


@pytest.mark.parametrize(("k", "l1_kib", "most"), [(1040, 48, 28), (1024, 48, 20), (1024, 32, 12), (512, 32, 24)])
def test_no_more_rows_than_the_first_level_cache_holds(k: int, l1_kib: int, most: int) -> None:
    """Rows 4 KiB apart share the places of one set, two of which the panel needs: tiles have so many rows, of two accumulators each."""
    target = Target("x86-64-v4", HOST.cpu, HOST.features, 16, 2, l1_kib << 10, 1 << 20)
    loops = product_loops(compile_kernel(kernel_of((1, 28 * 12, k, 32), target), emit, target).inspect_source("asm"))
    accumulators = [len(set(re.findall(r"vfmadd231ps.*(%zmm\d+)$", loop, flags=re.MULTILINE))) for loop in loops]
    assert max(accumulators) == most


@pytest.mark.parametrize("mcpu", ["x86-64-v4", "x86-64-v3"])
def test_accumulators_stay_in_registers_beside_a_long_epilogue(mcpu: str) -> None:
    """The loop over k of a product followed by GELU touches the stack for no accumulator, however many rows a tile has."""
    lanes = 16 if mcpu == "x86-64-v4" else 8
    target = Target(mcpu, HOST.cpu, HOST.features, lanes, 2, 32 << 10, 512 << 10)
    kernel = kernel_of((1, 28 * 13, 96, 128), target)
    (store,) = kernel.stores
    half, one = ops.const(0.5, "float32"), ops.const(1.0, "float32")
    value = ops.mul(ops.mul(store.value, half), ops.add(ops.call("erf", ops.mul(store.value, half)), one))
    kernel = dataclasses.replace(kernel, stores=(dataclasses.replace(store, value=value),))
    assembly = compile_kernel(kernel, emit, target).inspect_source("asm")
    loops = product_loops(assembly)
    assert loops
    for loop in loops:
        assert not re.findall(r"vmovups\s+(?:-?\d*\(%rsp\), %[yz]mm|%[yz]mm\d+, -?\d*\(%rsp\))", loop), loop
