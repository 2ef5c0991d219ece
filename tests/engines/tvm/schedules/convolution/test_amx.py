"""Convolution by AMX: the kernel runs on emulated tiles and is compared with eager in float64."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch

from tests.engines.tvm.amx_for_tests import SAPPHIRE_RAPIDS, emulated
from tests.engines.tvm.schedule_runner import HOST, compile_kernel, offsets, row_major, run_kernel, to_memory
from tests.engines.tvm.schedules.convolution.convolutions_for_tests import Case, make
from torch_hybrid_backend.engines.tvm.cpu.amx_formats import FORMATS
from torch_hybrid_backend.engines.tvm.cpu.kernels import TileConvKernel
from torch_hybrid_backend.engines.tvm.cpu.packing import pack_conv_tiles
from torch_hybrid_backend.engines.tvm.schedules.convolution.amx import emit
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import Blocked, Strided

__all__ = ["emulated"]  # the fixture

_HOST = dataclasses.replace(HOST, lanes=16, cores=2, l1_bytes=48 << 10, l2_bytes=2 << 20)


def tiles_of(
    case: Case, name: str, x: torch.Tensor | None = None
) -> tuple[TileConvKernel, dict[Buffer, torch.Tensor], torch.Tensor]:
    """As `make`, the kernel and its weight for tiles."""
    kernel, inputs, want = make(case, _HOST, x)
    # The weight that `make` packed, as it was: blocks of outputs come back together.
    blocks, in_group = inputs.pop(kernel.packed), case.o // case.groups
    weight = blocks.permute(0, 1, 5, 3, 2, 4).flatten(1, 2)[:, :in_group].flatten(0, 1)
    weight = weight.reshape(case.o, case.x[1] // case.groups, *case.kernel)
    ahead = pack_conv_tiles(weight, FORMATS[name], groups=case.groups)
    packed = Buffer(tuple(ahead.shape), FORMATS[name].dtype, "tiles")
    reads = tuple(row_major(packed) if read.buffer is kernel.packed else read for read in kernel.reads)
    tiles = TileConvKernel(
        reads,
        kernel.writes,
        kernel.domain,
        kernel.x_vars,
        kernel.x,
        packed,
        name,
        kernel.stride,
        kernel.padding,
        kernel.dilation,
        kernel.groups,
        kernel.kernel,
        kernel.accumulator,
        kernel.stores,
    )
    return tiles, {**inputs, packed: ahead}, want


@pytest.mark.parametrize(
    "case",
    [
        Case((2, 32, 7, 9), 40, (1, 1)),
        pytest.param(Case((1, 16, 9, 7), 32, (3, 3), padding=1), marks=pytest.mark.full),
        Case((1, 48, 11, 8), 33, (3, 2), stride=2, padding=(1, 0), blocked_x=False, blocked_out=False),
        pytest.param(
            Case((1, 16, 12, 12), 16, (3, 3), padding=2, dilation=2, long_epilogue=True), marks=pytest.mark.full
        ),
        Case((2, 32, 40), 32, (5,), padding=2),
        Case((1, 128, 6, 6), 32, (3, 3), padding=1),  # k in two parts
        Case((6, 32, 5, 7), 48, (3, 3), stride=2, padding=1),  # several images in a task
        pytest.param(Case((1, 32, 7, 7), 24, (3, 3), stride=2), marks=pytest.mark.full),
        Case((4, 96, 5, 7), 120, (3, 3), stride=2, padding=1, groups=3),
        pytest.param(Case((2, 64, 5, 7), 64, (1, 1), groups=2, blocked_x=False), marks=pytest.mark.full),
    ],
    ids=lambda case: f"{case.x} {case.o} {case.kernel}",
)
def test_matches_eager(emulated: ctypes.CDLL, case: Case) -> None:
    """Every geometry and layout, with a bias, a residual and a ReLU."""
    kernel, inputs, want = tiles_of(case, "float32")
    (got,) = run_kernel(kernel, emit, inputs, _HOST)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 32, 9, 9), 40, (3, 3), padding=1),
        Case((2, 40, 7, 6), 24, (3, 3), padding=1),  # channels that fill no vector
        Case((2, 24, 9, 5), 32, (1, 1), blocked_x=False),
        Case((2, 3, 13, 17), 40, (7, 5), stride=2, padding=(3, 2)),  # few channels
        Case((1, 1, 9, 30), 16, (3, 11), padding=2),
        Case((2, 5, 12, 9), 33, (2, 3), stride=3, dilation=2),
        Case((2, 12, 40), 32, (5,), padding=2),
        Case((3, 8, 6, 6), 32, (1, 1), stride=2, blocked_x=False),
        Case((4, 64, 5, 5), 40, (3, 3), padding=1),  # several images in a task
        Case((2, 96, 7, 6), 48, (3, 3), padding=1, groups=4),  # groups that begin within a vector
        Case((2, 128, 9, 5), 256, (1, 1), groups=2),
        Case((1, 80, 30), 80, (5,), padding=2, groups=5),
    ],
    ids=lambda case: f"{case.x} {case.o} {case.kernel}",
)
def test_bfloat16(emulated: ctypes.CDLL, case: Case) -> None:
    """Images and weights of bfloat16 are multiplied as they are."""
    kernel, inputs, want = tiles_of(dataclasses.replace(case, dtype="bfloat16"), "bfloat16")
    (got,) = run_kernel(kernel, emit, inputs, _HOST)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("float16 split", Case((1, 32, 9, 9), 40, (3, 3), padding=1)),
        ("float16", Case((2, 40, 7, 6), 24, (3, 3), padding=1)),
        ("float16", Case((2, 3, 13, 17), 40, (7, 5), stride=2, padding=(3, 2))),
    ],
)
def test_float16(emulated: ctypes.CDLL, name: str, case: Case) -> None:
    """By AMX-FP16, and as two bfloat16."""
    kernel, inputs, want = tiles_of(dataclasses.replace(case, dtype="float16"), name)
    before = emulated.products_so_far()
    (got,) = run_kernel(kernel, emit, inputs, _HOST)
    assert emulated.products_so_far() > before
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_some_of_the_channels_of_a_wider_image(emulated: ctypes.CDLL) -> None:
    """Three of four: whole vectors would read the fourth, and behind the last pixel there is none."""
    case = Case((1, 3, 9, 9), 32, (3, 3), padding=1, dtype="bfloat16")
    kernel, inputs, want = tiles_of(case, "bfloat16")
    wide = Strided((9 * 9 * 4, 1, 9 * 4, 4))
    reads = tuple(Argument(r.buffer, wide) if r.buffer.shape == case.x else r for r in kernel.reads)
    (got,) = run_kernel(dataclasses.replace(kernel, reads=reads), emit, inputs, _HOST)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))


@pytest.mark.parametrize("channels", [3, 24])
def test_pixels_beside_a_window_do_not_count(emulated: ctypes.CDLL, channels: int) -> None:
    """Not even infinite ones: a weight of 0 for them would make NaN. What lies in memory beside the channels is anything."""
    case = Case((1, channels, 12, 12), 32, (3, 3), padding=1, dtype="bfloat16")
    x = torch.randn(case.x).bfloat16()
    x[0, 1, 0, 5] = float("inf")
    kernel, inputs, want = tiles_of(case, "bfloat16", x)
    near = torch.zeros(12, 12, dtype=torch.bool)
    near[:2, 4:7] = True
    (write,) = kernel.writes
    memory = [to_memory(inputs[read.buffer], read.layout) for read in kernel.reads]
    (image,) = (number for number, read in enumerate(kernel.reads) if read.buffer.shape == case.x)
    layout = kernel.reads[image].layout
    assert isinstance(layout, Blocked)
    beside = torch.ones(memory[image].shape, dtype=torch.bool)
    beside[offsets(case.x, layout).flatten()] = False
    memory[image][beside] = float("nan")
    got = torch.empty(write.span, dtype=torch.bfloat16)
    compile_kernel(kernel, emit, _HOST)["kernel"](*memory, got)
    result = got[offsets(write.buffer.shape, write.layout)].double()
    assert beside.any()
    assert result[..., ~near].isfinite().all()
    torch.testing.assert_close(result[..., ~near], want[..., ~near], rtol=1e-2, atol=1e-2 * 30)


def test_bfloat16_is_rounded_by_one_instruction() -> None:
    """Where the processor has AVX512-BF16, and by integer arithmetic elsewhere."""
    kernel, _, _ = tiles_of(Case((1, 32, 9, 9), 64, (1, 1), dtype="bfloat16"), "bfloat16")
    target = dataclasses.replace(SAPPHIRE_RAPIDS, features=(*SAPPHIRE_RAPIDS.features, "avx512_bf16"))
    assembly = compile_kernel(kernel, emit, target).inspect_source("asm")
    assert "\tvcvtneps2bf16\t" in assembly
    assert "\tvcvtneps2bf16\t" not in compile_kernel(kernel, emit, SAPPHIRE_RAPIDS).inspect_source("asm")


@pytest.mark.parametrize(
    ("images", "channels", "channel"), [(1, 16, 3), (4, 16, 3), (1, 80, 3), (1, 80, 40), (1, 80, 70)]
)
def test_numbers_that_cannot_be_split(emulated: ctypes.CDLL, images: int, channels: int, channel: int) -> None:
    """Pixels that see such a number of the image are as eager's, and so are all others, whichever step of channels has it."""
    case = Case((images, channels, 12, 12), 32, (3, 3), padding=1)
    kernel, _, _ = tiles_of(case, "float32")
    function = compile_kernel(kernel, emit, _HOST)["kernel"]
    (write,) = kernel.writes
    near = torch.zeros(12, 12, dtype=torch.bool)
    near[:2, 4:7] = True
    products = channels / 16  # a bound is over |A| |B|, of 144 products
    for number in (float("inf"), float("nan"), 1e-40, 3e38):
        x = torch.randn(case.x)
        x[:: images + 1, channel, 0, 5] = x[images // 2, channel, 0, 5] = number
        own, inputs, want = tiles_of(case, "float32", x)
        got = torch.empty(write.span)
        before = emulated.products_so_far()
        function(*[to_memory(inputs[read.buffer], read.layout) for read in own.reads], got)
        assert emulated.products_so_far() > before
        got, want = got[offsets(write.buffer.shape, write.layout)], want.float().double()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
        torch.testing.assert_close(got[..., ~near].double(), want[..., ~near], rtol=2e-6, atol=1e-5 * products)
        finite = want.isfinite()
        bound = 5e-5 * products + (5e-6 * number if number == 3e38 else 0.0)
        assert ((got.double() - want).abs() <= bound)[finite].all()


def test_machine_code() -> None:
    """Tiles are multiplied in a loop without vectors, configured and released once."""
    kernel, _, _ = tiles_of(Case((1, 64, 14, 14), 64, (3, 3), padding=1), "float32")
    assembly = compile_kernel(kernel, emit, SAPPHIRE_RAPIDS).inspect_source("asm")
    assert "\ttdpbf16ps\t" in assembly
    assert assembly.count("\tldtilecfg\t") == assembly.count("\ttilerelease") == 1


@pytest.mark.parametrize("name", ["uint8", "int8"])
@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding"),
    [
        ((2, 48, 6, 7), (3, 3), 1, 1),
        ((1, 3, 23, 21), (7, 7), 2, 3),  # few channels: rows are copied from the image
        ((2, 4, 12, 9), (3, 3), 2, 1),
        ((2, 5, 8, 8), (2, 5), 1, 0),
        ((3, 8, 30), (5,), 1, 2),
        ((2, 4, 9, 9), (1, 1), 1, 0),
        ((1, 12, 9, 9), (5, 5), 3, 2),
        ((1, 16, 40, 6), (3, 3), 3, 1),
        ((1, 24, 9, 6), (3, 3), 2, 1),  # channels that fill no vector
        ((4, 32, 6, 6), (3, 3), 1, 1),  # several images in a task
        ((2, 77, 4, 6), (1, 1), 1, 0),
    ],
)
def test_integers(
    emulated: ctypes.CDLL, shape: tuple[int, ...], kernel: tuple[int, ...], stride: int, padding: int, name: str
) -> None:
    """Bytes are multiplied exactly, the most extreme ones too; outside of the image they are 0."""
    check_integers(shape, 33, kernel, stride, padding, name)


@pytest.mark.parametrize(
    ("shape", "outputs", "kernel", "groups", "together"),
    [
        ((2, 64, 6, 7), 32, (3, 3), 8, 4),
        ((1, 128, 5, 9), 64, (3, 3), 2, 1),
        ((2, 96, 30), 48, (5,), 4, 2),
        ((2, 72, 6, 6), 72, (3, 3), 3, 1),  # groups that begin within a vector
    ],
)
def test_groups_of_integers(
    emulated: ctypes.CDLL, shape: tuple[int, ...], outputs: int, kernel: tuple[int, ...], groups: int, together: int
) -> None:
    """Each by itself, or several as one."""
    check_integers(shape, outputs, kernel, 1, 1, "uint8", groups, together)


def check_integers(
    shape: tuple[int, ...],
    outputs: int,
    kernel: tuple[int, ...],
    stride: int,
    padding: int,
    name: str,
    groups: int = 1,
    together: int = 1,
) -> None:
    """The kernel's sums of random bytes and of the most extreme ones, against float64."""
    whole, _, _ = make(Case(shape, outputs, kernel, stride=stride, padding=padding, groups=groups), _HOST)
    torch.manual_seed(0)
    low = 0 if name == "uint8" else -128
    image = torch.randint(low, low + 256, shape).to(getattr(torch, name))
    weight = torch.randint(-128, 128, (outputs, shape[1] // groups, *kernel)).to(torch.int8)
    image[0], weight[0] = (255 if name == "uint8" else -128), -128
    ahead = pack_conv_tiles(weight, FORMATS[name], groups=groups, together=together)
    convolve = torch.nn.functional.conv1d if len(kernel) == 1 else torch.nn.functional.conv2d
    want = convolve(image.double(), weight.double(), stride=stride, padding=padding, groups=groups)
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
    tiles = TileConvKernel(
        (Argument(x, layout), row_major(packed)),
        (row_major(out),),
        whole.domain,
        whole.x_vars,
        ops.cast(x.at(tuple(map(index_of, whole.x_vars))), "int32"),
        packed,
        name,
        whole.stride,
        whole.padding,
        whole.dilation,
        groups // together,
        whole.kernel,
        sums,
        (Store(out, point, sums.at(point)),),
    )
    (got,) = run_kernel(tiles, emit, {x: image, packed: ahead}, _HOST)
    assert torch.equal(got.double(), want)
