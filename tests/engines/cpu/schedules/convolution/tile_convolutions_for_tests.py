"""Convolutions on AMX's tiles, as kernels to compile and to run."""

from __future__ import annotations

import dataclasses

import torch

from tests.engines.cpu.schedule_runner import HOST, row_major, run_kernel
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, make
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, with_weight
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.operands.packing import pack_conv_tiles
from torch_hybrid_backend.engines.cpu.schedules.convolution.amx import emit
from torch_hybrid_backend.engines.cpu.weights import AmxTiles
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Blocked

# This machine, with the vectors and the caches of a processor that has AMX.
TILES_HOST = dataclasses.replace(HOST, lanes=16, cores=2, l1_bytes=48 << 10, l2_bytes=2 << 20)


def tiles_of(
    case: Case, name: str, x: torch.Tensor | None = None
) -> tuple[CpuConvKernel[AmxTiles], dict[Buffer, torch.Tensor], torch.Tensor]:
    """Make, as `make` does, the kernel and its weight for tiles."""
    kernel, inputs, want = make(case, TILES_HOST, x)
    # The weight that `make` packed, as it was: blocks of outputs come back together.
    blocks, in_group = inputs.pop(kernel.weight.buffer), case.o // case.groups
    weight = blocks.permute(0, 1, 5, 3, 2, 4).flatten(1, 2)[:, :in_group].flatten(0, 1)
    weight = weight.reshape(case.o, case.x[1] // case.groups, *case.kernel)
    ahead = pack_conv_tiles(weight, FORMATS[name], groups=case.groups)
    packed = Buffer(tuple(ahead.shape), FORMATS[name].dtype, "tiles")
    tiles = with_weight(kernel, AmxTiles(buffer=packed, tile_format=name))
    return tiles, {**inputs, packed: ahead}, want


def check_integers(
    shape: tuple[int, ...],
    outputs: int,
    kernel: tuple[int, ...],
    stride: int,
    padding: int,
    name: str,
    groups: int = 1,
    together: int = 1,
    border: int = 0,
) -> None:
    """The kernel's sums of random bytes and of the most extreme ones, against float64. `border`: what lies around the image."""
    whole, _, _ = make(Case(shape, outputs, kernel, stride=stride, padding=padding, groups=groups), TILES_HOST)
    torch.manual_seed(0)
    low = 0 if name == "uint8" else -128
    image = torch.randint(low, low + 256, shape).to(getattr(torch, name))
    weight = torch.randint(-128, 128, (outputs, shape[1] // groups, *kernel)).to(torch.int8)
    image[0], weight[0] = (255 if name == "uint8" else -128), -128
    ahead = pack_conv_tiles(weight, FORMATS[name], groups=groups, together=together)
    convolve = torch.nn.functional.conv1d if len(kernel) == 1 else torch.nn.functional.conv2d
    around = torch.nn.functional.pad(image.double(), (padding, padding) * len(kernel), value=border)
    want = convolve(around, weight.double(), stride=stride, groups=groups)
    x, packed, out, sums = (
        Buffer(shape, dtype)
        for shape, dtype in [
            (tuple(image.shape), name),
            (tuple(ahead.shape), "int8"),
            (tuple(want.shape), "int32"),
            (tuple(want.shape), "int32"),
        ]
    )
    # As the engine has it; where that is one block of few channels, whole vectors are copied. In larger blocks, channels are.
    layout = Blocked(min(16, 1 << (shape[1] - 1).bit_length()) if stride > 1 else 16)
    point = tuple(map(index_of, whole.domain))
    tiles = dataclasses.replace(
        with_weight(whole, AmxTiles(buffer=packed, tile_format=name)),
        reads=(Argument(x, layout), row_major(packed)),
        writes=(row_major(out),),
        x=ops.cast(x.at(tuple(map(index_of, whole.x_vars))), "int32"),
        groups=groups // together,
        accumulator=sums,
        stores=(Store(out, point, sums.at(point)),),
        border=border,
    )
    (got,) = run_kernel(tiles, emit, {x: image, packed: ahead}, TILES_HOST)
    assert torch.equal(got.double(), want)
