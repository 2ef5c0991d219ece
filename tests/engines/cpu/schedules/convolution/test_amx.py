"""Convolution by AMX, with many channels and with few: the kernel runs on emulated tiles and is compared with eager in float64."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch

from tests.engines.cpu.amx_for_tests import SAPPHIRE_RAPIDS, emulated
from tests.engines.cpu.schedule_runner import compile_kernel, offsets, run_kernel, runner_of, to_memory
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case
from tests.engines.cpu.schedules.convolution.tile_convolutions_for_tests import TILES_HOST, check_integers, tiles_of
from torch_hybrid_backend.engines.cpu.schedules.convolution.amx import emit
from torch_hybrid_backend.loops.layout import Blocked

__all__ = ["emulated"]  # the fixture


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
    (got,) = run_kernel(kernel, emit, inputs, TILES_HOST)
    assert emulated.products_so_far() > before
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("bfloat16", Case((2, 32, 9, 9), 40, (3, 3), padding=1, dtype="bfloat16")),
        ("bfloat16", Case((2, 48, 7, 6), 24, (1, 1), dtype="bfloat16")),
        ("bfloat16", Case((2, 3, 13, 17), 40, (7, 5), stride=2, padding=(3, 2), dtype="bfloat16")),  # few channels
        ("float32", Case((2, 64, 9, 9), 24, (3, 3), padding=1, groups=2)),
        ("float32", Case((2, 32, 33), 24, (5,), stride=2, padding=2)),
    ],
)
def test_images_known_at_run_time(emulated: ctypes.CDLL, name: str, case: Case) -> None:
    """A kernel serves any number of images."""
    kernel, _, _ = tiles_of(dataclasses.replace(case, open_images=True), name)
    convolution = runner_of(kernel, emit, TILES_HOST)
    for images in (2, 1, 0, 5):
        (own, inputs, want) = tiles_of(dataclasses.replace(case, x=(images, *case.x[1:])), name)
        arrays = [inputs[read.buffer] for read in own.reads]
        before = emulated.products_so_far()
        (got,) = convolution({read.buffer: array for read, array in zip(kernel.reads, arrays, strict=True)})
        assert (emulated.products_so_far() > before) == (images > 0)
        tolerance = 1e-2 if name == "bfloat16" else 1e-5
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * 10)


def test_bfloat16_is_rounded_by_one_instruction() -> None:
    """The instruction is used where the processor has AVX512-BF16, and by integer arithmetic elsewhere."""
    kernel, _, _ = tiles_of(Case((1, 32, 9, 9), 64, (1, 1), dtype="bfloat16"), "bfloat16")
    target = dataclasses.replace(SAPPHIRE_RAPIDS, features=(*SAPPHIRE_RAPIDS.features, "avx512_bf16"))
    assembly = compile_kernel(kernel, emit, target).inspect_source("asm")
    assert "\tvcvtneps2bf16\t" in assembly
    assert "\tvcvtneps2bf16\t" not in compile_kernel(kernel, emit, SAPPHIRE_RAPIDS).inspect_source("asm")


def test_machine_code() -> None:
    """Tiles are multiplied in a loop without vectors, configured and released once."""
    kernel, _, _ = tiles_of(Case((1, 64, 14, 14), 64, (3, 3), padding=1), "float32")
    assembly = compile_kernel(kernel, emit, SAPPHIRE_RAPIDS).inspect_source("asm")
    assert "\ttdpbf16ps\t" in assembly
    assert assembly.count("\tldtilecfg\t") == assembly.count("\ttilerelease") == 1


@pytest.mark.parametrize(("name", "border"), [("uint8", 0), ("int8", 0), ("uint8", 131)])
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
    emulated: ctypes.CDLL,
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: int,
    padding: int,
    name: str,
    border: int,
) -> None:
    """Bytes are multiplied exactly, the most extreme ones too; outside of the image they are the border."""
    check_integers(shape, 33, kernel, stride, padding, name, border=border)


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
    compile_kernel(kernel, emit, TILES_HOST)["kernel"](*memory, got)
    result = got[offsets(write.buffer.shape, write.layout)].double()
    assert beside.any()
    assert result[..., ~near].isfinite().all()
    torch.testing.assert_close(result[..., ~near], want[..., ~near], rtol=1e-2, atol=1e-2 * 30)
