"""Attention of integers of 8 bits on AMX's tiles, emulated, against float64 eager."""

from __future__ import annotations

import ctypes
import dataclasses
import re

import pytest
import torch

from tests.engines.cpu.amx_for_tests import SAPPHIRE_RAPIDS, emulated
from tests.engines.cpu.schedule_runner import HOST, compile_kernel, run_kernel
from tests.engines.cpu.schedules.attention.attention_for_tests import check_beside_eager, in_bf16, make, of_int8
from tests.engines.cpu.schedules.attention.test_bf16 import masks
from torch_hybrid_backend.engines.cpu.kernels import Bf16AttentionKernel
from torch_hybrid_backend.engines.cpu.schedules.attention import rules
from torch_hybrid_backend.engines.cpu.variants import attention
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.kernels import AttentionKernel

__all__ = ["emulated"]  # the fixture

# This machine, with the vectors of a processor that has AMX.
_HOST = dataclasses.replace(HOST, lanes=16, cores=2)
Shape = tuple[int, int, int, int, int, int]


def on_tiles(kernel: AttentionKernel) -> Bf16AttentionKernel:
    """The kernel that takes its place where a processor has tiles, whatever it gains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_CONCEIVABLE_COST", float("inf"))
        (found, *_) = attention.low_precision_attention(kernel, None, SAPPHIRE_RAPIDS)
    assert found.name == "amx int8 as bfloat16"
    (other,) = found.kernels
    assert isinstance(other, Bf16AttentionKernel)
    return other


@pytest.mark.parametrize(
    ("shape", "causal", "dtypes", "zeros"),
    [
        ((1, 2, 70, 90, 64, 64), False, ("int8", "int8", "int8"), (0, 0, 0)),  # rows and keys left over
        ((2, 1, 40, 37, 20, 24), True, ("uint8", "int8", "uint8"), (255, -128, 17)),  # an odd number of keys
        ((1, 1, 50, 1100, 80, 40), False, ("int8", "uint8", "int8"), (0, 0, 3)),  # blocks of keys
    ],
)
def test_matches_eager(
    emulated: ctypes.CDLL, shape: Shape, causal: bool, dtypes: tuple[str, ...], zeros: tuple[int, ...]
) -> None:
    """(B, H, S, T, D, E): as exact as eager in float32, of all integers there are and with zero points."""
    kernel, inputs, values = of_int8(*make(shape, causal=causal, heads_inside=True), dtypes, zeros)
    before = emulated.products_so_far()
    (got,) = run_kernel(on_tiles(kernel), rules.emit, inputs, _HOST)
    assert emulated.products_so_far() > before
    check_beside_eager(got, values, causal=causal)


def test_masked(emulated: ctypes.CDLL) -> None:
    """Infinities, a query that sees nothing."""
    mask = masks()
    kernel, inputs, (q, k, v) = of_int8(*make((1, 2, 70, 90, 32, 32), mask=mask), ("int8",) * 3, (0, 0, 0))
    (got,) = run_kernel(on_tiles(kernel), rules.emit, inputs, _HOST)
    want = 2 * torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_rounded_integers(emulated: ctypes.CDLL) -> None:
    """Weights are rounded where a graph rounds integers to bfloat16: one product of each."""
    plain, inputs = make((1, 2, 70, 90, 64, 64))
    kernel, inputs, (q, k, v) = of_int8(plain, inputs, ("int8",) * 3, (0, 0, 0))
    rounded = (ops.round_to(e, "bfloat16") for e in (kernel.q, kernel.k, kernel.v))
    tiles = on_tiles(dataclasses.replace(kernel, **dict(zip("qkv", rounded, strict=True))))
    assert (tiles.format, tiles.weight_parts) == ("bfloat16", 1)
    (got,) = run_kernel(tiles, rules.emit, inputs, _HOST)
    want = 2 * torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


def test_computed_keys(emulated: ctypes.CDLL) -> None:
    """Keys of bfloat16 are computed row by row, and equal those that lie in memory."""
    plain, inputs = make((1, 2, 40, 70, 32, 32), dtype="bfloat16")
    kernel = dataclasses.replace(plain, k=ops.round_to(ops.mul(plain.k, ops.const(1.5, "float32")), "bfloat16"))
    (got,) = run_kernel(in_bf16(kernel, "bfloat16"), rules.emit, inputs, _HOST)
    same = {
        buffer: (x.float() * 1.5).bfloat16() if number == 1 else x for number, (buffer, x) in enumerate(inputs.items())
    }
    (want,) = run_kernel(in_bf16(plain, "bfloat16"), rules.emit, same, _HOST)
    assert torch.equal(got, want)


def test_machine_code() -> None:
    """Bytes are widened by one instruction each sixteen; tiles are configured and released once, after memory is taken."""
    kernel, _, _ = of_int8(*make((1, 16, 128, 128, 64, 64), heads_inside=True), ("int8",) * 3, (0, 0, 0))
    assembly = compile_kernel(on_tiles(kernel), rules.emit, SAPPHIRE_RAPIDS).inspect_source("asm")
    assert assembly.count("\tldtilecfg\t") == assembly.count("\ttilerelease") == 1
    configured, released = assembly.index("\tldtilecfg\t"), assembly.index("\ttilerelease")
    assert "BackendAllocWorkspace" not in assembly[configured:released]
    assert all(configured < place.start() < released for place in re.finditer("\ttdpbf16ps\t", assembly))
    assert "\ttdpbf16ps\t" in assembly
    assert "\tvpmovsxbd\t" in assembly
