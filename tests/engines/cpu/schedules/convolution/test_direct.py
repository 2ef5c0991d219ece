"""Direct convolution against float64 eager, and its machine code."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.engines.cpu.schedule_runner import APART, HOST, NARROW, compile_kernel, row_major, run_kernel
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, check, check_sizes, make
from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.operands.vnni_packing import pack_conv_words
from torch_hybrid_backend.engines.cpu.schedules.convolution import rules
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Blocked


@pytest.mark.parametrize("target", [HOST, NARROW, APART], ids=["host", "narrow", "apart"])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 16, 8, 17), 32, (3, 3), padding=1),
        Case((2, 3, 15, 13), 20, (3, 3), 2, 1, blocked_x=False),
        Case((1, 37, 11, 19), 29, (5, 3), 2, (2, 0)),
        Case((1, 16, 9, 9), 16, (3, 3), padding=2, dilation=2, blocked_out=False),
        Case((1, 5, 3, 3), 7, (3, 3), padding=3),  # tiles that read nothing but padding
        Case((1, 1, 1, 1), 1, (1, 1)),
        Case((2, 24, 9, 7), 40, (1, 1)),
        Case((1, 8, 9, 7), 48, (1, 1), 2),
        Case((1, 8, 50), 12, (5,), 2, 2),
        Case((1, 8, 41), 8, (1,)),
    ],
)
def test_direct(case: Case, target: Target) -> None:
    """Strides, padding, dilation, ragged channels, one and two dimensions."""
    check(case, target)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 16, 20, 30), 40, (3, 3), padding=1),
        Case((2, 3, 40, 30), 20, (7, 7), 2, 3, blocked_x=False),  # tiles inside the image have code of their own
        Case((1, 37, 11, 19), 29, (5, 3), 2, (2, 0), blocked_out=False),
        Case((1, 16, 9, 9), 16, (3, 3), padding=4, dilation=4),
        Case((1, 8, 9, 40), 16, (1, 17), padding=(0, 8)),  # too wide to be unrolled
        Case((1, 32, 12, 12), 64, (3, 3), 1, 1, groups=4),
        Case((2, 24, 9, 7), 40, (1, 1)),
        Case((1, 8, 9, 7), 48, (1, 1), 2),
    ],
)
def test_sizes_known_at_run_time(case: Case) -> None:
    """A kernel serves images from a pixel on, with every remainder of tiles and strides."""
    least = [max(1, k - 2 * case.dilation * p) for k, p in zip(case.kernel, _paddings(case), strict=True)]
    sizes = [(1, 1), (1, 2), (5, 1), (2, 7), (9, 16), (13, 29), (20, 30), (31, 57)]
    check_sizes(case, [(max(h, least[0]), max(w, least[1])) for h, w in sizes])


def _paddings(case: Case) -> tuple[int, ...]:
    return (case.padding,) * len(case.kernel) if isinstance(case.padding, int) else case.padding


def test_sizes_known_at_run_time_with_weights_larger_than_the_cache() -> None:
    """No partial sums are added twice where tiles overlap; one dimension."""
    small = dataclasses.replace(HOST, cores=2, l2_bytes=64 << 10)
    for outputs in (16, 64):
        check_sizes(Case((1, 64, 8, 8), outputs, (3, 3), padding=1), [(8, 8), (1, 1), (3, 5), (17, 29)], small)
    check_sizes(Case((1, 8, 50), 12, (5,), 2, 2), [(50,), (1,), (2,), (33,)])


@pytest.mark.parametrize("blocked_x", [True, False])
@pytest.mark.parametrize("blocked_out", [True, False])
def test_pointwise_in_any_layout(blocked_x: bool, blocked_out: bool) -> None:
    """A 1x1 kernel sees one long row wherever the input's layout allows it."""
    check(Case((2, 24, 5, 7), 40, (1, 1), blocked_x=blocked_x, blocked_out=blocked_out))


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 10, 10), 64, (3, 3), 1, 1, groups=4),
        Case((1, 6, 9, 9), 12, (3, 3), 1, 1, groups=3),
        Case((1, 10, 6, 6), 14, (3, 3), 1, 1, groups=2),  # seven channels a group: blocks of one
        Case((1, 6, 9, 9), 24, (3, 3), 1, 1, groups=6),  # one input channel a group, several outputs
        Case((1, 48, 9), 48, (3,), 1, 1, groups=2),
    ],
)
def test_grouped(case: Case) -> None:
    """Groups: no block of output channels straddles two."""
    check(case)


def test_wide_kernels_test_columns_as_they_run() -> None:
    """A kernel too wide to unroll gives the same values, padding included."""
    check(Case((1, 8, 40), 8, (32,), padding=16, groups=2))
    check(Case((1, 8, 3, 40), 8, (2, 17), padding=(1, 8)))


@pytest.mark.parametrize("o", [96, 100])
def test_weights_larger_than_the_cache_go_in_chunks(o: int) -> None:
    """Input channels in chunks, partial sums in a buffer; also with a padded last block."""
    check(Case((1, 128, 7, 7), o, (3, 3), padding=1), NARROW)


@pytest.mark.parametrize("o", [32, 27])
def test_long_epilogues_run_from_a_spilled_tile(o: int) -> None:
    """An epilogue of many operations gives the same values."""
    check(Case((1, 16, 6, 10), o, (3, 3), padding=1, long_epilogue=True))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    """Accumulation is in float64 for float64, in float32 for bfloat16."""
    check(Case((1, 16, 6, 10), 20, (3, 3), padding=1, dtype=dtype))


@pytest.mark.parametrize("blocked_x", [True, False])
def test_the_next_block_of_channels_is_prefetched(blocked_x: bool) -> None:
    """Memory far from what is being read is prefetched, where the input is in blocks of channels."""
    kernel, _, _ = make(Case((1, 48, 25, 25), 32, (3, 3), stride=2, padding=1, blocked_x=blocked_x), HOST)
    assembly = compile_kernel(kernel, rules.emit).inspect_source("asm")
    assert ("prefetch" in assembly) == blocked_x


def test_accumulators_stay_in_registers() -> None:
    """Columns of a row share input elements between taps, which LLVM keeps in registers: tiles leave room for them."""
    if HOST.lanes < 16:
        pytest.skip("register names of AVX-512")
    kernel, _, _ = make(Case((1, 128, 56, 56), 32, (3, 3), 1, 1), HOST)
    assembly = compile_kernel(kernel, rules.emit).inspect_source("asm")
    spills = re.findall(r"vmovup[sd]\s+(?:%zmm\d+, -?\d*\(%rsp\)|-?\d*\(%rsp\), %zmm)", assembly)
    multiply_adds = re.findall(r"vfmadd\w+\s+.*%zmm", assembly)
    assert len(multiply_adds) >= 54
    assert len(spills) <= len(multiply_adds) // 20


@pytest.mark.skipif(HOST.lanes < 16 or "avx512_vnni" not in HOST.features, reason="this processor has no AVX-512 VNNI")
@pytest.mark.parametrize("channels", [16, 24])
def test_constants_of_a_polynomial_leave_accumulators_their_registers(channels: int) -> None:
    """A short sum of bytes before SiLU: results are right, and between dot products nothing is spilled."""
    torch.manual_seed(0)
    dot = DotProduct("vpdpbusd", 4, "uint8", "int8", "int32")
    floats, _, _ = make(Case((1, channels, 28, 112), 96, (1, 1)), HOST)
    x, out = Buffer((1, channels, 28, 112), "uint8", "x"), Buffer((1, 96, 28, 112), "int8", "out")
    image, weight = (torch.randint(low, 128, shape) for low, shape in ((0, x.shape), (-127, (96, channels, 1, 1))))
    ahead = pack_conv_words(weight, 1, 16, dot)
    packed, sums = Buffer(tuple(ahead.shape), "int8", "packed"), Buffer(out.shape, "int32", "sums")
    scale, shift = (Buffer((96,), "float32", name) for name in ("scale", "shift"))
    scales, shifts = torch.rand(96) * 1e-4, torch.randn(96)
    point = tuple(map(index_of, floats.domain))
    y = ops.add(ops.mul(ops.cast(sums.at(point), "float32"), scale.at(point[1:2])), shift.at(point[1:2]))
    steps = ops.mul(ops.mul(y, ops.call("sigmoid", y)), ops.const(20.0, "float32"))
    bounded = ops.call("min", ops.call("max", steps, ops.const(-128, "float32")), ops.const(127, "float32"))
    kernel = dataclasses.replace(
        floats,
        reads=(Argument(x, Blocked(16)), *map(row_major, (packed, scale, shift))),
        writes=(Argument(out, Blocked(16)),),
        x=x.at(tuple(map(index_of, floats.x_vars))),
        weight=dataclasses.replace(floats.weight, buffer=packed, dot=dot),
        accumulator=sums,
        stores=(Store(out, point, ops.cast(ops.call("round_even", bounded), "int8")),),
    )
    (got,) = run_kernel(kernel, rules.emit, {x: image.to(torch.uint8), packed: ahead, scale: scales, shift: shifts})
    products = torch.nn.functional.conv2d(image.double(), weight.double())
    want = torch.nn.functional.silu(products * scales[:, None, None] + shifts[:, None, None]) * 20
    assert (got - want.clamp(-128, 127)).abs().max() < 0.501
    lines = compile_kernel(kernel, rules.emit).inspect_source("asm").splitlines()
    dots = [number for number, line in enumerate(lines) if "vpdpbusd" in line]
    between = [line for number in dots for line in lines[number - 1 : number + 2] if "vpdpbusd" not in line]
    assert len(dots) >= 27
    assert not [line for line in between if "%rsp" in line and "%zmm" in line][len(dots) // 10 :]
