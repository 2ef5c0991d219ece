"""Depthwise convolution of bytes by dot products of neighbouring pixels, beside sums of int64."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, compile_kernel, row_major, run_kernel
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.operands.vnni_packing import channel_sums, pack_taps
from torch_hybrid_backend.engines.cpu.schedules.convolution.rules import emit
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import Taps
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Blocked
from torch_hybrid_backend.sizes.size import Dim, symbol

_HAS_DOTS = HOST.lanes == 16 and "avx512_vnni" in HOST.features


def made(
    shape: tuple[int, ...],
    size: tuple[int, ...],
    stride: int,
    padding: int,
    dtype: torch.dtype = torch.uint8,
    zero: int = 0,
    *,
    is_open: bool = False,
) -> tuple[CpuConvKernel[Taps], dict[Buffer, torch.Tensor], torch.Tensor]:
    """(kernel, inputs, sums) of images of `shape` and a window of `size`, with the most extreme bytes in both, and a zero point. `is_open`: the
    kernel knows the image's size at run time only."""
    torch.manual_seed(0)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.randint(least, most + 1, shape).to(dtype)
    w = torch.randint(-128, 128, (shape[1], 1, *size)).to(torch.int8)
    x[0], x[0, 1], w[0], w[1] = most, least, -128, 127
    convolve = torch.nn.functional.conv1d if len(size) == 1 else torch.nn.functional.conv2d
    want = convolve(x.double() - zero, w.double(), stride=stride, padding=padding, groups=shape[1])
    ahead = pack_taps(w, 16)
    sizes: list[Dim] = [symbol(f"size{d}", 20) for d in range(len(size))] if is_open else list(shape[2:])
    results = [(n + 2 * padding - k) // stride + 1 for n, k in zip(sizes, size, strict=True)]
    image, packed = (
        Buffer((*shape[:2], *sizes), str(dtype).removeprefix("torch."), "x"),
        Buffer(tuple(ahead.shape), "int8", "w"),
    )
    moved = zero + (128 if dtype == torch.int8 else 0)
    begin = channel_sums(w, 1, 16, -moved)
    start = Buffer(tuple(begin.shape), "int32", "start") if moved else None
    out, sums = (Buffer((*shape[:2], *results), "int32", name) for name in ("out", "sums"))
    domain = tuple(LoopVar(f"d{i}", n) for i, n in enumerate(out.shape))
    x_vars = tuple(LoopVar(f"x{i}", n) for i, n in enumerate(image.shape))
    point = tuple(map(index_of, domain))
    kernel = CpuConvKernel(
        reads=(Argument(image, Blocked(16)), row_major(packed), *([] if start is None else [row_major(start)])),
        writes=(row_major(out),),
        domain=domain,
        x_vars=x_vars,
        x=image.at(tuple(map(index_of, x_vars))),
        weight=Taps(buffer=packed, width=16, start=start),
        stride=(stride,) * len(size),
        padding=(padding,) * len(size),
        dilation=(1,) * len(size),
        groups=shape[1],
        kernel=size,
        accumulator=sums,
        stores=(Store(out, point, sums.at(point)),),
        border=zero,
    )
    return kernel, {image: x, packed: ahead, **({} if start is None else {start: begin})}, want


@pytest.mark.skipif(not _HAS_DOTS, reason="this processor has no AVX-512 VNNI")
@pytest.mark.parametrize(("dtype", "zero"), [(torch.uint8, 200), (torch.int8, 0)])
def test_sums_at_sizes_known_at_run_time(dtype: torch.dtype, zero: int) -> None:
    """Pixels outside of the image count as the zero point wherever it ends."""
    for size, stride, padding, least in (((3, 3), 1, 1, 1), ((5, 7), 2, 3, 2)):
        for image in ((least, least), (3, 5), (9, 20), (13, 33)):
            kernel, inputs, want = made((1, 20, *image), size, stride, padding, dtype, zero, is_open=True)
            (got,) = run_kernel(kernel, emit, inputs)
            assert torch.equal(got.double(), want), image


@pytest.mark.skipif(not _HAS_DOTS, reason="this processor has no AVX-512 VNNI")
@pytest.mark.parametrize(
    ("shape", "size", "stride", "padding"),
    [
        ((2, 32, 9, 20), (3, 3), 1, 1),
        ((1, 29, 9, 9), (3, 3), 2, 1),
        ((1, 20, 11, 5), (7, 7), 1, 3),
        ((1, 16, 8, 7), (5, 2), 1, 0),
        ((2, 40, 3, 2), (3, 3), 1, 2),
        ((1, 16, 60), (8,), 3, 5),
        ((1, 48, 1, 1), (5, 5), 1, 2),
    ],
)
@pytest.mark.parametrize(("dtype", "zero"), [(torch.uint8, 0), (torch.uint8, 200), (torch.int8, 0), (torch.int8, -128)])
def test_sums_are_exact(
    shape: tuple[int, ...], size: tuple[int, ...], stride: int, padding: int, dtype: torch.dtype, zero: int
) -> None:
    """Windows of one word and of two, with and without padding, ragged last blocks, images smaller than the window; signs and zero points."""
    kernel, inputs, want = made(shape, size, stride, padding, dtype, zero)
    (got,) = run_kernel(kernel, emit, inputs)
    assert torch.equal(got.double(), want)


@pytest.mark.parametrize(
    ("mcpu", "permutation"), [("icelake-server", r"vpermb"), ("cascadelake", r"vpermd|vpermt2d|vpshufb")]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_machine_code(mcpu: str, permutation: str, dtype: torch.dtype) -> None:
    """Sums stay in registers, and each line of a window is a load, a permutation and a dot product; of signed pixels an exclusive or, too."""
    features = ("avx512bw", "avx512f", "avx512vl", "avx512_vnni")
    target = Target(mcpu, "x", features, 16, 2, 48 << 10, 1 << 20)
    kernel, _, _ = made((1, 32, 12, 56), (3, 3), 1, 1, dtype)
    plain = dataclasses.replace(kernel, writes=(Argument(kernel.writes[0].buffer, Blocked(16)),))
    assembly = compile_kernel(plain, emit, target).inspect_source("asm")
    count = assembly.count("\tvpdpbusd\t")
    assert count >= 3 * 14
    permuted = count if dtype == torch.uint8 else 3 * 14  # lines outside of the image are constants
    assert len(re.findall(rf"\t(?:{permutation})\t", assembly)) >= permuted
    assert (assembly.count("vpxor") >= permuted) == (dtype == torch.int8)
    assert not [line for line in assembly.splitlines() if "vpdpbusd" in line and "rsp" in line]
