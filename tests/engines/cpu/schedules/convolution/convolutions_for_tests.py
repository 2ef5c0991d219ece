"""Convolution kernels of any geometry with their inputs and results, and chains of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.engines.cpu.schedule_runner import HOST, printer_of, row_major, run_kernel, runner_of
from torch_hybrid_backend.engines.cpu import tile_sizes
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.operands import packing
from torch_hybrid_backend.engines.cpu.schedules.convolution import rules
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import Panels, Winograd
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Load, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Blocked, Layout, contiguous
from torch_hybrid_backend.sizes.size import Dim, symbol


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
    mixed: bool = True  # the residual lies in the other layout than the output
    long_epilogue: bool = False
    dtype: str = "float32"
    winograd: int = 0
    open_images: bool = False  # how many there are, the kernel knows at run time only
    typical: tuple[
        int, ...
    ] = ()  # height and width that the kernel is made for; it knows those of `x` at run time only


def layout_of(buffer: Buffer, block: int, blocked: bool) -> Layout:
    return Blocked(block) if blocked else contiguous(buffer.shape)


Made = tuple[CpuConvKernel[Panels], dict[Buffer, torch.Tensor], torch.Tensor]


def make(case: Case, target: Target, x_values: torch.Tensor | None = None) -> Made:
    """(kernel, inputs, result in float64) of out = relu(conv(x, w) + bias + residual), and more of it in long epilogues.

    x_values: the input, random where it is not given.
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

    block = tile_sizes.output_block(case.o, case.groups, target)
    compute = compute_dtype(case.dtype)
    images = symbol("images", case.x[0]) if case.open_images else case.x[0]
    size: list[Dim] = [symbol(f"size{d}", n) for d, n in enumerate(case.typical)] or list(case.x[2:])
    out_size = [
        (n + 2 * p - case.dilation * (k - 1) - 1) // case.stride + 1
        for n, p, k in zip(size, padding, case.kernel, strict=True)
    ]
    x = Buffer((images, case.x[1], *size), case.dtype, "x")
    out = Buffer((images, case.o, *out_size), case.dtype, "out")
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
    weight = (
        Winograd(buffer=packed, width=block, outputs=case.winograd)
        if case.winograd
        else Panels(buffer=packed, width=block)
    )
    kernel = CpuConvKernel(
        reads=(
            Argument(x, layout_of(x, tile_sizes.output_block(case.x[1], 1, target), case.blocked_x)),
            row_major(packed),
            row_major(bias),
            Argument(residual, layout_of(residual, block, case.blocked_out != case.mixed)),
        ),
        writes=(Argument(out, layout_of(out, block, case.blocked_out)),),
        domain=domain,
        x_vars=x_vars,
        x=x.at(tuple(map(index_of, x_vars))),
        weight=weight,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=case.groups,
        kernel=case.kernel,
        accumulator=accumulator,
        stores=(Store(out, point, value),),
    )
    return kernel, {x: xt, packed: ahead, bias: bt, residual: rt}, want


def check(case: Case, target: Target = HOST) -> None:
    """The kernel's result against float64."""
    kernel, inputs, want = make(case, target)
    (got,) = run_kernel(kernel, rules.emit, inputs, target)
    tolerance = 1e-2 if case.dtype == "bfloat16" else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


def check_sizes(case: Case, sizes: Sequence[tuple[int, ...]], target: Target = HOST) -> None:
    """The results of a kernel that is made for the size of `case` and runs at others, against float64."""
    made = dataclasses.replace(case, typical=case.x[2:])
    kernel, _, _ = make(made, target)
    run = runner_of(kernel, rules.emit, target)
    for size in sizes:
        other, inputs, want = make(dataclasses.replace(made, x=(*case.x[:2], *size)), target)
        given = {a.buffer: inputs[b.buffer] for a, b in zip(kernel.reads, other.reads, strict=True)}
        (got,) = run(given)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()), msg=f"{size}")


# Its caches hold 32 KB: what follows is large beside them, its weights are not.
SMALL = dataclasses.replace(HOST, cores=2, l2_bytes=64 << 10)


def depthwise(channels: int, size: tuple[int, int], kernel: int = 3, stride: int = 1, **more: int) -> Case:
    """A depthwise convolution that keeps the size but for the stride."""
    x = (more.pop("images", 1), channels, *size)
    return Case(x, channels, (kernel, kernel), stride, kernel // 2, groups=channels, **more)  # type: ignore[arg-type]


def make_stages(
    cases: list[Case], target: Target
) -> tuple[list[CpuConvKernel[Panels]], dict[Buffer, torch.Tensor], torch.Tensor]:
    """(kernels, inputs, result in float64) of convolutions each of which reads what the one before it writes."""
    stages: list[CpuConvKernel[Panels]] = []
    inputs: dict[Buffer, torch.Tensor] = {}
    want: torch.Tensor | None = None
    for case in cases:
        kernel, own, want = make(case, target, want)
        assert isinstance(kernel.x, Load)
        if stages:
            before, x = stages[-1].writes[0], kernel.x
            del own[x.buffer]
            reads = (before, *(read for read in kernel.reads if read.buffer is not x.buffer))
            kernel = dataclasses.replace(kernel, x=Load(x.dtype, before.buffer, x.index), reads=reads)
        stages.append(kernel)
        inputs.update(own)
    assert want is not None
    return stages, inputs, want


INVERTED = [Case((1, 8, 40, 60), 32, (1, 1)), depthwise(32, (40, 60), stride=2), Case((1, 32, 20, 30), 12, (1, 1))]


def parts_of(case: Case, target: Target = HOST, schedule_rank: int = 0) -> ConvParts:
    """The parts that the rules get of a kernel."""
    kernel, _, _ = make(case, target)
    printer = printer_of(kernel, schedule_rank)
    return ConvParts(kernel, printer.builder, printer, target)
