"""MatMul by AMX: the kernel runs on emulated tiles and is compared with eager in float64, integers exactly; its machine code is looked at."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.tvm.amx_for_tests import SAPPHIRE_RAPIDS, emulated
from tests.engines.tvm.schedule_runner import HOST, compile_kernel, offsets, row_major, run_kernel, to_memory
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.tvm.cpu.amx_formats import FORMATS, LARGEST, SMALLEST
from torch_hybrid_backend.engines.tvm.cpu.kernels import TileMatMulKernel
from torch_hybrid_backend.engines.tvm.cpu.packing import pack_tiles
from torch_hybrid_backend.engines.tvm.schedules.matmul.amx import emit
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tir import compiler
from torch_hybrid_backend.engines.tvm.tir.emit import emit_kernel
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided, contiguous

__all__ = ["emulated"]  # the fixture

# This machine, with the vectors and the caches of a processor that has AMX.
_HOST = dataclasses.replace(HOST, lanes=16, cores=2, l1_bytes=48 << 10, l2_bytes=2 << 20)
# Small caches and many cores: more, smaller tasks.
_NARROW = dataclasses.replace(_HOST, cores=5, l2_bytes=256 << 10)

Shape = tuple[int, int, int, int]


def kernel_of(
    shape: Shape, name: str, *, batched: bool = False, a_layout: Layout | None = None, out_layout: Layout | None = None
) -> TileMatMulKernel:
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
    packed = Buffer(form.packed_shape(batch if batched else 1, k, n), form.dtype, "packed")
    accumulator = Buffer((batch, m, n), form.sums, "acc")
    domain, depth = (LoopVar("b", batch), LoopVar("m", m), LoopVar("n", n)), LoopVar("k", k)
    point = tuple(map(index_of, domain))
    value = ops.add(accumulator.at(point), residual.at(point))
    if result == "float32":
        value = ops.call("max", value, ops.const(0, result))
    return TileMatMulKernel(
        (Argument(a, a_layout or contiguous(a.shape)), row_major(packed), row_major(residual)),
        (Argument(out, out_layout or contiguous(out.shape)),),
        domain,
        depth,
        Load(compute_dtype(a_dtype), a, (*point[:2], index_of(depth))),
        packed,
        name,
        batched,
        accumulator,
        (Store(out, point, value),),
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


def compiled(kernel: TileMatMulKernel, target: Target = _HOST) -> Product:
    """The kernel as a function of a and b, without the residual: what is added is zero, and nothing is cut off."""
    (out,), point = kernel.writes, tuple(map(index_of, kernel.domain))
    plain = dataclasses.replace(kernel, stores=(Store(out.buffer, point, kernel.accumulator.at(point)),))
    read_a, _, residual = kernel.reads
    function = compile_kernel(plain, emit, target)["kernel"]

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(residual.span, dtype=getattr(torch, residual.buffer.dtype))
        got = torch.full((out.span,), 77, dtype=getattr(torch, out.buffer.dtype))
        function(to_memory(a, read_a.layout), pack_tiles(b, FORMATS[kernel.format]), zeros, got)
        return got[offsets(out.buffer.shape, out.layout)]

    return product


def run(kernel: TileMatMulKernel, a: torch.Tensor, b: torch.Tensor, target: Target = _HOST) -> torch.Tensor:
    """`compiled`, once."""
    return compiled(kernel, target)(a, b)


def errors(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each element's error over |A| |B|, which is what a rounding of each product costs."""
    return (got.double() - a.double() @ b.double()).abs() / (a.double().abs() @ b.double().abs())


def _bound(name: str) -> float:
    """Of `errors`."""
    return 2e-5 if FORMATS[name].parts == 2 else 3e-7


# What differs from one of the others in what is multiplied alone.
_LIKE_OTHERS = ("float32 high", "int8")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in _LIKE_OTHERS else name for name in FORMATS]
)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 32, 64, 32),  # one panel of each
        (1, 8, 3, 5),  # less than a tile of everything
        (2, 70, 100, 130),  # rows, k and columns left over, several batches
        (1, 45, 1100, 33),  # a short panel of rows, k in two parts
    ],
)
def test_matches_eager(emulated: ctypes.CDLL, shape: Shape, name: str) -> None:
    """(batch, m, k, n): float32 within a few roundings of one product, integers exactly; with every core's tiles released."""
    a, b = operands_of(shape, name)
    residual = torch.randint(-5, 5, (shape[0], shape[1], shape[3]))
    kernel = kernel_of(shape, name)
    read_a, packed, read_residual = (argument.buffer for argument in kernel.reads)
    before = emulated.products_so_far()
    inputs = {read_a: a, packed: pack_tiles(b, FORMATS[name])}
    if FORMATS[name].sums == "int32":
        (got,) = run_kernel(kernel, emit, {**inputs, read_residual: residual.int()}, _HOST)
        assert torch.equal(got.long(), a.long() @ b.long() + residual)
    else:
        (got,) = run_kernel(kernel, emit, {**inputs, read_residual: residual.float()}, _HOST)
        want = torch.relu(a.double() @ b.double() + residual)
        scale = a.double().abs() @ b.double().abs() + residual.abs()
        assert ((got.double() - want).abs() <= _bound(name) * scale).all()
    assert emulated.products_so_far() > before


def test_small_tasks(emulated: ctypes.CDLL) -> None:
    """More blocks of rows than caches hold at once, shared among more cores, a B for each batch, by several of the schedule's ways."""
    shape = (2, 200, 70, 150)
    a, b = operands_of(shape, "float32", batched=True)
    for rank in (0, 3):
        kernel = dataclasses.replace(kernel_of(shape, "float32", batched=True), schedule_rank=rank)

        assert errors(run(kernel, a, b, _NARROW), a, b).max() < 3e-7


def test_float32_is_no_less_exact_than_eager(emulated: ctypes.CDLL) -> None:
    """At k = 768 the root mean square error of three parts is below eager's, that of two what "high" allows."""
    shape = (1, 64, 768, 64)
    a, b = operands_of(shape, "float32")

    def rms(got: torch.Tensor) -> float:
        return float(errors(got, a, b).square().mean().sqrt())

    assert rms(run(kernel_of(shape, "float32"), a, b)) < min(1.4e-8, rms(a @ b))
    assert 1e-8 < rms(run(kernel_of(shape, "float32 high"), a, b)) < 5e-7


_ODD_NUMBERS = [float("inf"), -float("inf"), float("nan"), 3.4e38, 3e-39, 1e-45, 2 * LARGEST, SMALLEST / 2]


@pytest.mark.parametrize("name", ["float32", "float32 high"])
def test_numbers_that_cannot_be_split(emulated: ctypes.CDLL, name: str) -> None:
    """One in A or in B: the panels that have it are as eager's, in any part of k; the others are multiplied on tiles."""
    shape = (1, 40, 1100, 40)
    product = compiled(kernel_of(shape, name))
    a, b = operands_of(shape, name)
    start = emulated.products_so_far()
    product(a, b)
    all_on_tiles = emulated.products_so_far() - start
    numbers = _ODD_NUMBERS if name == "float32" else _ODD_NUMBERS[::5]
    for number, (row, k) in itertools.product(numbers, [(0, 0), (39, 1099), (0, -1)]):
        a, b = operands_of(shape, name)
        if k >= 0:
            a[0, row, k] = number
        else:
            b[0, 700, 35] = number
        start = emulated.products_so_far()
        got = product(a, b)
        assert 0 < emulated.products_so_far() - start < all_on_tiles
        want = a.double() @ b.double()
        # Beyond float32 the order of the sum, eager's as well, decides between an infinity and NaN.
        known = ~(want.isfinite() & (want.abs() > torch.finfo(torch.float32).max))
        assert torch.equal(got.isnan()[known], want.isnan()[known])
        assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
        scale = a.double().abs() @ b.double().abs()
        assert ((got.double() - want).abs() <= _bound(name) * scale)[known & want.isfinite()].all()


def test_small_and_large_operands_throughout(emulated: ctypes.CDLL) -> None:
    """Where no number can be split, the result is as exact as eager's, denormal numbers included; at the limits tiles are."""
    shape = (1, 33, 50, 20)
    product = compiled(kernel_of(shape, "float32"))
    for size in (1e-20, 1e-37, 1e-42, 1e18):
        a, b = operands_of(shape, "float32")
        a, b = a * size, b / max(size, 1e-30)
        start = emulated.products_so_far()
        got = product(a, b)
        assert emulated.products_so_far() == start
        assert errors(got, a, b).max() <= 2 * errors(a @ b, a, b).max()
    for size in (SMALLEST, LARGEST):
        a, b = (torch.sign(x) * size * (1 + 2**-20) ** (1 if size < 1 else -1) for x in operands_of(shape, "float32"))
        start = emulated.products_so_far()
        got = product(a, b)
        assert emulated.products_so_far() > start
        assert errors(got, a, b).max() < 3e-7


@pytest.mark.parametrize("name", ["float16 split", "float16"])
def test_every_float16(emulated: ctypes.CDLL, name: str) -> None:
    """All finite ones, denormal ones too, come through a product with 1 as they are; what has an infinity or NaN is as in eager."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    a = every[every.isfinite()].reshape(1, 1984, 32)
    product = compiled(kernel_of((1, 1984, 32, 32), name))
    before = emulated.products_so_far()
    assert torch.equal(product(a, torch.eye(32, dtype=torch.float16)[None]), a.float())
    assert emulated.products_so_far() > before
    product = compiled(kernel_of((1, 40, 100, 40), name))
    for number in (math.inf, -math.inf, math.nan):
        a, b = operands_of((1, 40, 100, 40), name)
        a[0, 3, 7], b[0, 70, 35] = number, number
        got, want = product(a, b), a.double() @ b.double()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
        finite = want.isfinite()
        assert ((got - want).abs() <= _bound(name) * (a.double().abs() @ b.double().abs()))[finite].all()


@pytest.mark.parametrize("name", ["uint8", "int8"])
def test_long_integer_products(emulated: ctypes.CDLL, name: str) -> None:
    """k of 70,000 with the most extreme values: sums are exact where they fit 32 bits, and modulo 2^32 where they do not."""
    shape = (1, 17, 70_000, 33)
    a, b = operands_of(shape, name)
    a[:, :3], b[:, :, :2] = (255 if name == "uint8" else -128), -128
    a[:, 1, ::2] = 0
    want = a.long() @ b.long()
    got = run(kernel_of(shape, name), a, b)
    assert torch.equal(got, want.to(torch.int32))
    assert (want == got).sum() > want.numel() - 40
    assert (want.abs().max() > 2**31) == (name == "uint8")


@pytest.mark.parametrize("layout", [Strided((13 * 40, 1, 13)), Blocked(16)])
def test_any_layout(emulated: ctypes.CDLL, layout: Layout) -> None:
    """The stores go where the layout says, and A is read where its layout says."""
    shape = (1, 13, 40, 40)
    a, b = operands_of(shape, "float32")
    kernel = kernel_of(shape, "float32", a_layout=layout, out_layout=layout)
    assert errors(run(kernel, a, b), a, b).max() < 3e-7


def test_operands_that_are_computed(emulated: ctypes.CDLL) -> None:
    """An expression for A, as fusion leaves it, is computed while A is copied: in bfloat16 it is rounded then."""
    shape = (1, 20, 48, 40)
    kernel = kernel_of(shape, "bfloat16")
    kernel = dataclasses.replace(kernel, a=ops.mul(kernel.a, ops.const(1.1, "float32")))
    a, b = operands_of(shape, "bfloat16")
    rounded = (a.float() * 1.1).bfloat16()
    assert errors(run(kernel, a, b), rounded, b).max() < 3e-7


def test_the_library_needs_nothing_else(tmp_path: Path) -> None:
    """What a compiler process makes of the kernel is linked to nothing but the C library: intrinsics have all become instructions."""
    library = tmp_path / "tiles.so"
    kernel = kernel_of((1, 64, 64, 64), "float32")
    compiler.compile_kernel(Job("key", "kernel_tiles", kernel, SAPPHIRE_RAPIDS, str(library), assembly=True))
    assert library.exists()
    assert "\ttdpbf16ps\t" in library.with_suffix(".s").read_text()


def _loops(assembly: str) -> list[str]:
    """The innermost loops of x86 assembly."""
    labels = re.split(r"^(\.L\w+):", assembly, flags=re.MULTILINE)
    found = []
    for label, body in zip(labels[1::2], labels[2::2], strict=True):
        end = re.search(rf"\tj\w+\s+{re.escape(label)}$", body, flags=re.MULTILINE)
        if end is not None:
            found.append(body[: end.start()])
    return found


@pytest.mark.parametrize(
    ("mcpu", "name"),
    [
        *[("sapphirerapids", name) for name in FORMATS if name != "float16"],
        ("graniterapids", "float16"),  # has AMX-FP16
        *[pytest.param("graniterapids", name, marks=pytest.mark.full) for name in FORMATS if name != "float16"],
    ],
)
def test_machine_code(mcpu: str, name: str) -> None:
    """Tiles are multiplied in a loop that touches no vector, and nothing of the stack but addresses; they are configured and released once,
    memory is taken before."""
    form = FORMATS[name]
    target = dataclasses.replace(SAPPHIRE_RAPIDS, mcpu=mcpu)
    assembly = compile_kernel(kernel_of((1, 512, 1536, 256), name), emit, target).inspect_source("asm")
    assert assembly.count("\tldtilecfg\t") == assembly.count("\ttilerelease") == 1
    configured, released = assembly.index("\tldtilecfg\t"), assembly.index("\ttilerelease")
    tiles = re.findall(r"\t(tileload\w*|tilestored|tilezero|tdp\w+)\t", assembly)
    assert {form.instruction, "tilestored"} <= set(tiles)
    assert all(configured < place.start() < released for place in re.finditer(r"\ttdp\w+\t", assembly))
    assert "BackendAllocWorkspace" not in assembly[configured:released]
    assert "\tret" not in assembly[configured:released]
    products = [loop for loop in _loops(assembly) if f"\t{form.instruction}\t" in loop]
    assert products
    for loop in products:
        assert "mm" not in re.sub(r"%tmm\d", "", loop), loop  # vectors
        assert all(line.startswith("\tmovq\t") for line in loop.splitlines() if "%rsp" in line), loop
        assert "prefetch" in loop or name == "float32"
    if form.splits:
        splits = [loop for loop in _loops(assembly) if "vpmovdw" in loop]
        assert splits
        for loop in splits:
            assert "vpminud" in loop
            assert "%rsp" not in loop, loop


def test_what_depends_on_the_column_is_computed_once_unless_behind_a_guard(emulated: ctypes.CDLL) -> None:
    """A bias and a scale are read for a panel of rows; what is read in some columns only is not read in the others, where nothing lies."""
    shape = (1, 40, 32, 70)
    a, b = operands_of(shape, "bfloat16")
    kernel = kernel_of(shape, "bfloat16")
    point, column = tuple(map(index_of, kernel.domain)), index_of(kernel.domain[2])
    bias, tail = Buffer((70,), "float32", "bias"), Buffer((6,), "float32", "tail")
    sums = kernel.accumulator.at(point)
    scaled = ops.mul(sums, ops.call("exp", bias.at((column,))))
    behind = ops.guard(ops.index_in(column, 64, 70), ops.add(scaled, tail.at((column - 64,))), scaled)
    (out,) = kernel.writes
    read_a, packed, _ = kernel.reads
    inputs = {
        read_a.buffer: a,
        packed.buffer: pack_tiles(b, FORMATS["bfloat16"]),
        bias: torch.randn(70),
        tail: torch.randn(6),
    }
    want = a.double() @ b.double() * inputs[bias].double().exp()

    def changed(value: Expr, *reads: Buffer) -> TileMatMulKernel:
        arguments = (read_a, packed, *map(row_major, reads))
        return dataclasses.replace(kernel, reads=arguments, stores=(Store(out.buffer, point, value),))

    (got,) = run_kernel(changed(scaled, bias), emit, {k: v for k, v in inputs.items() if k is not tail}, _HOST)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)
    guarded = changed(behind, bias, tail)
    (got,) = run_kernel(guarded, emit, inputs, _HOST)
    want[..., 64:] += inputs[tail].double()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)
    assert "of_columns" in emit_kernel(changed(scaled, bias), "k", _HOST).script()
    assert "of_columns" not in emit_kernel(guarded, "k", _HOST).script()
