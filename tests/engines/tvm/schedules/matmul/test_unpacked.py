"""Plain matmul schedule: every tile and edge against float64 eager."""

from __future__ import annotations

import dataclasses
import platform
import re

import pytest
import torch

from tests.engines.tvm.schedule_runner import HOST, NARROW, compile_kernel, row_major, run_kernel
from torch_hybrid_backend.engines.tvm.cpu.kernels import UnpackedMatMulKernel
from torch_hybrid_backend.engines.tvm.cpu.tiles import copies_panels, reads_unpacked
from torch_hybrid_backend.engines.tvm.schedules.matmul import unpacked
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided, contiguous
from torch_hybrid_backend.sizes.size import known_int, symbol

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
) -> UnpackedMatMulKernel:
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
    return UnpackedMatMulKernel(
        (Argument(a, a_layout or contiguous(a.shape)), row_major(weight), row_major(bias), row_major(residual)),
        (Argument(result, out or contiguous(result.shape)),),
        domain,
        depth,
        Load(_FLOAT, a, (*point[:2], index_of(depth))),
        weight,
        offset,
        row_stride,
        k_stride,
        accumulator,
        (Store(result, point, value),),
    )


def check(kernel: UnpackedMatMulKernel, target: Target = HOST) -> None:
    """The kernel's result is within 1e-5 of float64 eager."""
    a, weight, bias, residual = (argument.buffer for argument in kernel.reads)
    _, _, k = a.shape
    k, n = known_int(k), known_int(bias.shape[0])
    torch.manual_seed(0)
    inputs = {buffer: torch.randn([int(size) for size in buffer.shape]) for buffer in (a, weight, bias, residual)}
    (got,) = run_kernel(kernel, unpacked.emit, inputs, target)
    w = inputs[weight].as_strided((n, k), (kernel.row_stride, kernel.k_stride), kernel.offset)
    want = torch.relu(inputs[a].double() @ w.double().t() + inputs[bias].double()) * inputs[residual].double()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 16, 16),  # one row: the other lanes are padding
        (16, 1, 16),  # one step of k
        (1, 331, 48),  # dot products; k is no whole number of vectors
        (2, 64, 200),
        (6, 80, 33),  # the last columns overlap
        (7, 300, 131),
        (7, 5, 17),  # less than a vector of rows and of k; the last columns overlap
        (29, 67, 37),  # ragged everything
        (48, 64, 64),
        (197, 96, 80),  # panels of three and of two vectors, the last ragged
        (311, 300, 131),  # several groups of panels (narrow), several parts of k
    ],
)
def test_matches_eager(m: int, k: int, n: int, target: Target) -> None:
    """Every tile, pad and overlap."""
    check(kernel_of(m, k, n), target)


@pytest.mark.parametrize("m", [8, 12, 15])
def test_dot_products_of_many_rows(m: int) -> None:
    """More rows, fewer of W's at once."""
    check(kernel_of(m, 131, 67))


def test_deep() -> None:
    """k in several parts, the last of which is shorter and no whole number of cache lines."""
    check(kernel_of(50, 1619, 48))


def test_weight_inside_a_larger_one() -> None:
    """Rows lie apart, and begin inside the array."""
    check(kernel_of(33, 40, 50, offset=3, row_stride=53))
    check(kernel_of(3, 40, 50, offset=3, row_stride=53))


@pytest.mark.parametrize("layout", [Strided((33 * 40, 1, 33)), Blocked(4)])
def test_any_layout_of_the_left_operand(layout: Layout) -> None:
    """What is not contiguous along k is packed, or copied, element by element."""
    check(kernel_of(1, 40, 32, a_layout=Strided((40, 1, 1))))
    check(kernel_of(33, 40, 32, a_layout=layout))


@pytest.mark.parametrize("layout", [Strided((13 * 40, 1, 13)), Blocked(4)])
def test_any_output_layout(layout: Layout) -> None:
    """The stores go where the layout says, vectorised or not."""
    check(kernel_of(13, 20, 40, out=layout))


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 16, 32),
        (13, 5, 64),  # less than a chunk of k
        (29, 67, 32),  # ragged rows, and steps of k beyond the last chunk
        (197, 96, 96),  # tasks have different numbers of panels
        (300, 2051, 96),  # several blocks of rows, several parts of k, the last of which is shorter
    ],
)
def test_columns_match_eager(m: int, k: int, n: int, target: Target) -> None:
    """A weight laid out (K, N), dense or inside a larger one, is copied by the kernel, panel by panel."""
    check(kernel_of(m, k, n, k_stride=n), target)
    check(kernel_of(m, k, n, k_stride=n + 5, offset=3), target)


def test_copying_leaves_accumulators_in_registers() -> None:
    """Multiply-adds read no sums from memory while rows of the next panel are copied between them."""
    if platform.machine().lower() not in ("x86_64", "amd64") or HOST.lanes < 8:
        pytest.skip("looks for x86's multiply-adds in vectors")
    assembly = compile_kernel(kernel_of(96, 256, 64, k_stride=64), unpacked.emit).inspect_source("asm")
    multiply_adds = re.findall(r"vfmadd\w*ps\s+(.*)", assembly)
    assert len(multiply_adds) >= 20
    assert not [line for line in multiply_adds if "%rsp" in line]
    assert "prefetch" in assembly


@pytest.mark.parametrize(
    ("m", "k", "n", "copies"),
    [
        (128, 768, 768, True),
        (197, 3072, 768, True),  # rows need not fill vectors
        (63, 768, 768, False),  # too few rows share a copy
        (128, 768, 776, False),  # the last panel is not whole
        (128, 768, 704, False),  # fewer than a dozen panels a core
    ],
)
def test_which_products_copy_panels(m: int, k: int, n: int, copies: bool) -> None:
    """Enough rows, whole panels, panels enough for every core."""
    target = Target(HOST.mcpu, HOST.cpu, HOST.features, 16, 2, 32 << 10, 1 << 20)
    assert copies_panels(m, k, n, target) == copies
    assert not copies_panels(symbol("s0", m), k, n, target)


def test_accumulators_stay_in_registers() -> None:
    """Multiply-adds read no sums from memory: each has registers only, or a broadcast element of W."""
    if platform.machine().lower() not in ("x86_64", "amd64") or HOST.lanes < 8:
        pytest.skip("looks for x86's multiply-adds in vectors")
    assembly = compile_kernel(kernel_of(96, 256, 64), unpacked.emit).inspect_source("asm")
    multiply_adds = re.findall(r"vfmadd\w*ps\s+(.*)", assembly)
    # Two tiles (one shape of panel), each with four steps of k in its innermost loop.
    assert len(multiply_adds) >= 4 * (HOST.lanes // 2) * 3
    assert not [line for line in multiply_adds if "%rsp" in line]
    assert "prefetch" in assembly


@pytest.mark.parametrize(
    ("m", "k", "n", "plain"),
    [
        (128, 768, 768, True),
        (1024, 768, 3072, True),
        (197, 768, 3072, False),  # padding to 208 rows costs more than a thirtieth
        (8, 768, 3072, False),
        (1, 2048, 1000, True),  # dot products, as fast as memory
        (1, 2048, 100, False),  # too few columns to matter
        (1, 32, 1000, False),
        (128, 32, 3072, False),
        (128, 768, 700, False),  # each core would pack A for too few columns
    ],
)
def test_where_the_plain_weight_is_read(m: int, k: int, n: int, plain: bool) -> None:
    """The rule, for two cores with AVX-512."""
    target = dataclasses.replace(HOST, lanes=16, cores=2)
    assert reads_unpacked(m, k, n, target) == plain


def test_sizes_known_at_run_time_are_packed() -> None:
    """The schedule is for sizes that are numbers."""
    assert not reads_unpacked(symbol("s0", 128), 768, 768, HOST)
