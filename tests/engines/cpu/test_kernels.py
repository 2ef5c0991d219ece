"""Kernels of a processor: their multiply-adds, which decide what is worth tuning, and their weights."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engines.cpu.kernels_for_tests import conv_kernel, matmul_kernel
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import INVERTED, SMALL, Case, make, make_stages
from tests.engines.cpu.schedules.matmul.unpacked_for_tests import kernel_of
from torch_hybrid_backend.engines.cpu.convolution_fusion import fused_kernel
from torch_hybrid_backend.engines.cpu.kernels import with_weight
from torch_hybrid_backend.engines.cpu.weights import AmxTiles, InPlace, Panels, Quantized, Taps, Winograd
from torch_hybrid_backend.loops.ir import Buffer


def test_products() -> None:
    """Packed or not: rows by columns by depth."""
    assert matmul_kernel().multiply_adds == 8 * 64 * 16
    assert kernel_of(5, 40, 33).multiply_adds == 5 * 40 * 33


@pytest.mark.parametrize(
    ("case", "work"),
    [
        (Case((2, 24, 9, 7), 40, (3, 3), padding=1), 2 * 40 * 63 * 24 * 9),
        (Case((1, 32, 10, 10), 64, (3, 3), padding=1, groups=4), 64 * 100 * 8 * 9),
        (Case((1, 20, 11, 5), 20, (7, 7), 1, 3, groups=20), 20 * 55 * 49),
        (Case((1, 8, 50), 12, (5,), 2, 2), 12 * 25 * 8 * 5),
    ],
)
def test_convolutions(case: Case, work: int) -> None:
    """Padding of packed weights does not count."""
    kernel, _, _ = make(case, SMALL)
    assert kernel.multiply_adds == work


def test_chains() -> None:
    """Those of their convolutions together."""
    stages, _, _ = make_stages(INVERTED, SMALL)
    assert fused_kernel(stages).multiply_adds == 8 * 32 * 2400 + 32 * 600 * 9 + 32 * 12 * 600


def test_another_weight_takes_the_place_of_the_own() -> None:
    """At the same position of the arguments, row by row; the same buffer in another form stays as it lies."""
    kernel = matmul_kernel()
    changed = with_weight(kernel, Panels(buffer=Buffer((1, 2, 70, 16), "float32", "other"), width=16))
    assert changed.reads[0] is kernel.reads[0]
    assert changed.reads[1].buffer is changed.weight.buffer
    assert changed.reads[1].span == 2 * 70 * 16
    assert len(changed.reads) == len(kernel.reads)
    tiles = with_weight(kernel, AmxTiles(buffer=kernel.weight.buffer, tile_format="bfloat16", is_vnni=True))
    assert tiles.reads is kernel.reads


def test_names_say_the_form_of_the_weight() -> None:
    """Profiles and reports show the same names whatever classes are called."""
    kernel = matmul_kernel()
    buffer = kernel.weight.buffer
    quantized = Quantized(buffer=buffer, bits=8, scales=buffer, group=16, width=32)
    names = {
        kernel.weight: "packed_matmul",
        InPlace(buffer=buffer, offset=0, row_stride=16, k_stride=1): "unpacked_matmul",
        quantized: "dequantized_matmul",
        dataclasses.replace(quantized, tile_format="float32"): "tile_dequantized_matmul",
        AmxTiles(buffer=buffer, tile_format="float32"): "tile_matmul",
    }
    assert [with_weight(kernel, weight).kind for weight in names] == [*names.values()]
    convolution = conv_kernel()
    assert convolution.kind == with_weight(convolution, Taps(buffer=buffer, width=16)).kind == "packed_conv"
    assert with_weight(convolution, Winograd(buffer=buffer, width=16, outputs=4)).kind == "packed_conv"
    assert with_weight(convolution, AmxTiles(buffer=buffer, tile_format="float32")).kind == "tile_conv"
    assert fused_kernel([convolution]).kind == "fused_conv"
