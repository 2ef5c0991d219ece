"""Convolution schedules: every rule and tile kind against float64 eager."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import pytest
import torch

from tests.engines.tvm.schedule_runner import HOST, NARROW, compile_kernel, row_major, run_kernel
from torch_hybrid_backend.engines.tvm.cpu import packing, tiles
from torch_hybrid_backend.engines.tvm.cpu.kernels import PackedConvKernel
from torch_hybrid_backend.engines.tvm.schedules.convolution import rules
from torch_hybrid_backend.engines.tvm.schedules.convolution.geometry import Axis, column_tiles
from torch_hybrid_backend.engines.tvm.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.tvm.schedules.convolution.small_output_channels import small_output_channels
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tir.builder import Stmt
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Blocked, Layout, contiguous


@dataclass(frozen=True)
class Case:
    """A convolution: input (N, C, *spatial), output channels, kernel, and its geometry, one number for all dimensions or one each."""

    x: tuple[int, ...]
    o: int
    kernel: tuple[int, ...]
    stride: int = 1
    padding: tuple[int, ...] | int = 0
    dilation: int = 1
    groups: int = 1
    blocked_x: bool = True
    blocked_out: bool = True
    long_epilogue: bool = False
    dtype: str = "float32"
    winograd: int = 0


def layout_of(buffer: Buffer, block: int, blocked: bool) -> Layout:
    return Blocked(block) if blocked else contiguous(buffer.shape)


Made = tuple[PackedConvKernel, dict[Buffer, torch.Tensor], torch.Tensor]


def make(case: Case, target: Target, x_values: torch.Tensor | None = None) -> Made:
    """(kernel, inputs, result in float64) of out = relu(conv(x, w) + bias + residual), and more of it in long epilogues.

    The residual lies in the other layout than the output. x_values: the input, random where it is not given.
    """
    dims = len(case.kernel)
    stride, dilation = (case.stride,) * dims, (case.dilation,) * dims
    padding = (case.padding,) * dims if isinstance(case.padding, int) else case.padding
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    xt = torch.randn(case.x).to(dtype) if x_values is None else x_values
    wt = torch.randn(case.o, case.x[1] // case.groups, *case.kernel).to(dtype)
    bt = torch.randn(case.o).to(dtype)
    convolve = torch.nn.functional.conv1d if dims == 1 else torch.nn.functional.conv2d
    want = convolve(xt.double(), wt.double(), bt.double(), stride, padding, dilation, case.groups)
    rt = torch.randn(want.shape).to(dtype)
    want = torch.relu(want + rt.double())
    for _ in range(4 * case.long_epilogue):
        want = want * 0.5 + rt.double()

    block = tiles.output_block(case.o, case.groups, target)
    compute = compute_dtype(case.dtype)
    x, out = Buffer(case.x, case.dtype, "x"), Buffer(tuple(want.shape), case.dtype, "out")
    residual, bias = Buffer(out.shape, case.dtype, "residual"), Buffer((case.o,), case.dtype, "bias")
    ahead = packing.pack_conv_weight(wt, case.groups, block)
    if case.winograd:
        ahead = packing.pack_winograd_weight(wt, case.winograd, block, case.groups)
    packed = Buffer(tuple(ahead.shape), str(ahead.dtype).removeprefix("torch."), "packed")
    accumulator = Buffer(out.shape, compute, "acc")
    domain = tuple(LoopVar(f"d{i}", n) for i, n in enumerate(out.shape))
    x_vars = tuple(LoopVar(f"x{i}", n) for i, n in enumerate(x.shape))
    point = tuple(map(index_of, domain))
    value = ops.add(ops.add(accumulator.at(point), bias.at(point[1:2])), residual.at(point))
    value = ops.call("max", value, ops.const(0, compute))
    for _ in range(4 * case.long_epilogue):
        value = ops.add(ops.mul(value, ops.const(0.5, compute)), residual.at(point))
    kernel = PackedConvKernel(
        (
            Argument(x, layout_of(x, tiles.output_block(case.x[1], 1, target), case.blocked_x)),
            row_major(packed),
            row_major(bias),
            Argument(residual, layout_of(residual, block, not case.blocked_out)),
        ),
        (Argument(out, layout_of(out, block, case.blocked_out)),),
        domain,
        x_vars,
        x.at(tuple(map(index_of, x_vars))),
        packed,
        stride,
        padding,
        dilation,
        case.groups,
        case.kernel,
        block,
        accumulator,
        (Store(out, point, value),),
        case.winograd,
    )
    return kernel, {x: xt, packed: ahead, bias: bt, residual: rt}, want


def check(case: Case, target: Target = HOST) -> None:
    """The kernel's result against float64."""
    kernel, inputs, want = make(case, target)
    (got,) = run_kernel(kernel, rules.emit, inputs, target)
    tolerance = 1e-2 if case.dtype == "bfloat16" else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
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


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 9, 20), 32, (3, 3), 1, 1, groups=32),
        Case((2, 29, 9, 9), 29, (3, 3), 2, 1, groups=29),
        Case((1, 20, 11, 5), 20, (7, 7), 1, 3, groups=20),
        Case((1, 16, 60), 16, (31,), 1, 15, groups=16),
    ],
)
def test_depthwise(case: Case, target: Target) -> None:
    """One channel to one channel: ragged last block, strides, small, large and wide windows."""
    check(case, target)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 13, 11), 48, (3, 3), padding=1),  # odd numbers of tiles and of outputs
        Case((3, 16, 7, 5), 20, (3, 3)),  # several images, ragged channels, no padding
        Case((1, 16, 8, 8), 16, (3, 3), padding=(3, 0), blocked_out=False),  # tiles that read nothing but padding
        Case((1, 64, 1, 1), 37, (3, 3), padding=1, long_epilogue=True),
        Case((2, 16, 9, 4), 33, (3, 3), padding=(1, 2), blocked_x=False),
        Case((1, 128, 17, 18), 96, (3, 3), padding=1),  # several runs of tiles
        Case((2, 96, 9, 7), 144, (3, 3), padding=1, groups=3),  # a group's last part is half empty
        Case((1, 80, 1, 5), 80, (3, 3), padding=1, groups=5, blocked_x=False, blocked_out=False),
        Case((1, 32, 9, 10), 32, (3, 3), padding=1, dtype="bfloat16"),  # its transformed weight is float32
    ],
)
def test_winograd(case: Case, m: int, target: Target) -> None:
    """F(2x2) and F(4x4): borders, tiles that reach beyond the output, ragged channels, every layout."""
    check(dataclasses.replace(case, winograd=m), target)


def test_depthwise_reads_and_writes_row_major() -> None:
    """Depthwise works in any layout."""
    check(Case((1, 20, 6, 6), 20, (3, 3), 1, 1, groups=20, blocked_x=False, blocked_out=False))


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
    check(Case((1, o, 6, 10), o, (3, 3), padding=1, groups=o, long_epilogue=True))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    """Accumulation is in float64 for float64, in float32 for bfloat16."""
    check(Case((1, 16, 6, 10), 20, (3, 3), padding=1, dtype=dtype))
    check(Case((1, 20, 6, 10), 20, (3, 3), padding=1, groups=20, dtype=dtype))


@pytest.mark.parametrize("blocked_x", [True, False])
def test_the_next_block_of_channels_is_prefetched(blocked_x: bool) -> None:
    """What lies far from what is being read is asked for ahead, where the input is in blocks of channels."""
    kernel, _, _ = make(Case((1, 48, 25, 25), 32, (3, 3), stride=2, padding=1, blocked_x=blocked_x), HOST)
    assembly = compile_kernel(kernel, rules.emit).inspect_source("asm")
    assert ("prefetch" in assembly) == blocked_x


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 53, 3, 5), 171, (1, 1)),
        Case((3, 96, 3, 3), 80, (1, 1), blocked_x=False),
        Case((2, 37, 5, 3), 101, (3, 3), padding=1),
        Case((1, 96, 5, 5), 144, (3, 3), 2, 1, groups=3),
        Case((1, 70, 1, 1), 130, (1, 1), blocked_out=False),
        Case((1, 48, 7), 96, (5,), padding=2, dtype="bfloat16"),
    ],
)
def test_weights_larger_than_the_input_stream(case: Case, target: Target) -> None:
    """Small images: whatever tile, image, group or ragged block comes next, results are right."""
    check(case, target)


@pytest.mark.parametrize(("pixels", "streaming"), [((7, 7), True), ((56, 56), False)])
def test_streaming_weights_are_prefetched(pixels: tuple[int, int], streaming: bool) -> None:
    """A weight larger than the input asks for its next blocks, into the second-level cache; one that stays in the cache does not."""
    kernel, _, _ = make(Case((1, 64, *pixels), 128, (1, 1)), HOST)
    assembly = compile_kernel(kernel, rules.emit).inspect_source("asm")
    assert ("prefetcht1" in assembly) == streaming


@pytest.mark.parametrize(
    "case", [Case((1, 128, 7, 7), 96, (3, 3), padding=1), Case((2, 512, 5, 3), 64, (3, 3), 2, 1, groups=2)]
)
def test_chunks_of_weights_are_prefetched(case: Case) -> None:
    """The next chunk of input channels is asked for, and results are right whichever task, group or image comes next."""
    target = dataclasses.replace(HOST, l2_bytes=256 << 10)
    check(case, target)
    kernel, _, _ = make(case, target)
    assert "prefetcht1" in compile_kernel(kernel, rules.emit, target).inspect_source("asm")


@pytest.mark.parametrize("groups", [1, 2])
def test_winograd_prefetches_its_weights(groups: int) -> None:
    """The next panel of weights is asked for, into the second-level cache."""
    kernel, _, _ = make(Case((1, 32, 14, 14), 32, (3, 3), padding=1, groups=groups, winograd=2), HOST)
    assert "prefetcht1" in compile_kernel(kernel, rules.emit).inspect_source("asm")


def test_column_tiles_say_which_columns_read_inside() -> None:
    """Borders have tiles of their own, the tiles between share one."""
    found = column_tiles(Axis(size=40, out=40, kernel=3, stride=1, padding=1, dilation=1), 5)
    assert [(t.first, t.count, t.columns) for t in found] == [(0, 1, 8), (8, 3, 8), (32, 1, 8)]
    assert found[0].inside[0] == (False,) + (True,) * 7
    assert found[2].inside[2] == (True,) * 7 + (False,)
    assert all(all(inside) for inside in found[1].inside)


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


def is_computed_for_small_output_channels(case: Case, target: Target, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the rule for few output channels computes the case; that its result is right is checked in any case."""
    computed = []

    def noted(parts: ConvParts) -> Stmt | None:
        body = small_output_channels(parts)
        computed.append(body is not None)
        return body

    monkeypatch.setattr(rules, "small_output_channels", noted)
    check(case, target)
    return any(computed)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 9, 37), 3, (3, 3), padding=1),
        Case((2, 32, 11, 17), 1, (3, 3), padding=1, blocked_out=False),
        Case((1, 64, 27, 39), 2, (3, 5), 2, (0, 2), long_epilogue=True),
        Case((3, 64, 7, 13), 2, (3, 3), padding=2, dilation=2, dtype="bfloat16"),
        Case((1, 64, 41), 2, (5,), padding=2),
        Case((1, 32, 3, 3), 1, (3, 3), padding=3),  # tiles that read nothing but padding
    ],
)
def test_small_output_channels(case: Case, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a vector of output channels: input channels are the lanes, whatever stride, padding, dilation and width."""
    assert is_computed_for_small_output_channels(case, target, monkeypatch)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 40, 9, 9), 2, (3, 3)),  # input channels that do not fill vectors
        Case((1, 64, 9, 9), 2, (3, 3), blocked_x=False),
        Case((1, 64, 9, 9), 16, (3, 3)),
        Case((1, 64, 2, 2), 3, (1, 1)),  # copying the weight would take longer
    ],
)
def test_small_output_channels_leaves_others(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no faster so, or cannot be read in vectors, is left to the direct rule."""
    assert not is_computed_for_small_output_channels(case, HOST, monkeypatch)
