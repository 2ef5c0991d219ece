"""Products with a quantized weight by AMX: kernels run on emulated tiles and are compared with float64; their machine code is looked at."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.engines.cpu.amx_for_tests import SAPPHIRE_RAPIDS, emulated
from tests.engines.cpu.schedule_runner import HOST, compile_kernel, run_kernel
from tests.engines.cpu.schedules.matmul.test_weight_only import check, kernel_of, packed_weight
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import LARGEST, SMALLEST
from torch_hybrid_backend.engines.cpu.operands.packing import pack_b
from torch_hybrid_backend.engines.cpu.schedules.matmul.weight_only_amx import emit
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import Quantized

__all__ = ["emulated"]  # the fixture

# This machine, with the vectors and the caches of a processor that has AMX.
_HOST = dataclasses.replace(HOST, lanes=16, cores=2, l1_bytes=48 << 10, l2_bytes=2 << 20)
# Small caches and many cores: more, smaller tasks. Without AVX-512, as no processor with AMX is, nibbles are converted.
_NARROW = dataclasses.replace(_HOST.within("AVX2"), lanes=16, cores=5, l2_bytes=256 << 10)


def tiles_of(*sizes: int, form: str = "float32", target: Target = _HOST, **how: object) -> CpuMatMulKernel[Quantized]:
    """`kernel_of` (m, k, n, bits, group) on tiles."""
    m, k, n, *rest = sizes
    kernel = kernel_of(m, k, n, target, *rest, **how)  # type: ignore[arg-type]
    return dataclasses.replace(kernel, weight=dataclasses.replace(kernel.weight, tile_format=form))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("target", [_HOST, _NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("m", [8, pytest.param(33, marks=pytest.mark.full), 129])
def test_matches_float64(target: Target, m: int) -> None:
    """8 and 4 bits, one group and several, with zero points and without, any number of rows, columns and of k."""
    for kernel in (
        tiles_of(m, 67, 37, 8, target=target),
        tiles_of(m, 1100, 97, 8, dtype="uint8", zeros=True, target=target),
        tiles_of(m, 1056, 64, 8, 32, target=target),
        tiles_of(m, 1056, 64, 8, 96, in_words=True, target=target),
        tiles_of(m, 100, 64, 8, zeros=True, in_words=True, target=target),
        tiles_of(m, 96, 37, 4, 32, scaled_by="bfloat16", target=target),
        tiles_of(m, 1152, 97, 4, 128, zeros=True, target=target),
        tiles_of(m, 2048, 64, 4, 1024, target=target),
        tiles_of(m, 40, 64, 4, target=target),
        tiles_of(m, 96, 37, 4, 32, form="float32 high", row_parts=2, target=target),
    ):
        check(kernel, target, emit)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("target", [_HOST, _NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("m", [8, 129])
def test_half_activations(target: Target, m: int) -> None:
    """Activations of bfloat16 are multiplied by the dequantized weight rounded to it; of float16: by the dequantized weight."""
    for kernel in (
        tiles_of(m, 67, 37, 8, form="bfloat16", target=target),
        tiles_of(m, 1100, 97, 8, dtype="uint8", zeros=True, form="bfloat16", target=target),
        tiles_of(m, 1056, 64, 8, 96, in_words=True, form="bfloat16", target=target),
        tiles_of(m, 1200, 97, 4, 24, zeros=True, form="bfloat16", target=target),
        tiles_of(m, 1152, 97, 4, 32, form="float16 split", target=target),
    ):
        check(kernel, target, emit)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("m", [8, 129])
def test_rows_that_may_be_rounded_to_a_byte(m: int) -> None:
    """Rows and the dequantized weight are rounded to bfloat16; k of one part and of several, infinities and NaN as in eager."""
    for kernel in (
        tiles_of(m, 96, 37, 4, 32, scaled_by="bfloat16", form="bfloat16", row_parts=1),
        tiles_of(m, 1100, 97, 8, zeros=True, in_words=True, form="bfloat16", row_parts=1),
    ):
        check(kernel, _HOST, emit)
    k, n = 64, 32
    kernel = tiles_of(m, k, n, 8, in_words=True, form="bfloat16", row_parts=1)
    a, weight, scales, bias, residual = (argument.buffer for argument in kernel.reads)
    x, q = torch.zeros(1, m, k), torch.full((1, k, n), 3)
    x[0, :4, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    inputs = {
        a: x,
        weight: packed_weight(q, kernel.weight),
        scales: pack_b(torch.full((1, 1, n), 0.5), kernel.weight.width),
    }
    (got,) = run_kernel(kernel, emit, inputs | {bias: torch.zeros(n), residual: torch.ones(1, m, n)}, _HOST)
    torch.testing.assert_close(got, torch.relu(x @ (q * 0.5)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_special_activations(bits: int, zeros: bool) -> None:
    """Rows with numbers that cannot be split are multiplied in float32, and give what they give with the dequantized weight."""
    specials = [0.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-40, 2 * LARGEST, SMALLEST / 2]
    m, k, n, group = 70, 96, 48, 32
    kernel = tiles_of(m, k, n, bits, group, zeros=zeros)
    a, weight, scales, bias, residual, *moved = (argument.buffer for argument in kernel.reads)
    torch.manual_seed(0)
    q = torch.randint(1, 7, (1, k, n))
    zero = torch.full((1, k // group, n), -0.5 if zeros else 0.0)
    x = torch.randn(1, m, k)
    # In the first panel of rows, in one group of the second; none in the third.
    x[0, torch.arange(8), 0] = torch.tensor(specials)
    x[0, 32 + torch.arange(8), 40] = torch.tensor(specials)
    inputs = {a: x, weight: packed_weight(q, kernel.weight), bias: torch.zeros(n), residual: torch.ones(1, m, n)}
    inputs |= {scales: pack_b(torch.full((1, k // group, n), 0.125), kernel.weight.width)}
    inputs |= {buffer: pack_b(zero, kernel.weight.width) for buffer in moved}
    (got,) = run_kernel(kernel, emit, inputs, _HOST)
    w = (q - zero.repeat_interleave(group, 1)) * 0.125
    torch.testing.assert_close(got, torch.relu(x @ w), rtol=1e-5, atol=1e-5, equal_nan=True)
    want = torch.relu(x[:, 64:].double() @ w.double())
    assert float((got[:, 64:] - want).abs().max()) < 1e-5


def test_machine_code() -> None:
    """Products of three parts of rows and one of weights, and of nibbles one permutation for 32 of them; nothing of a product is spilled."""
    target = dataclasses.replace(SAPPHIRE_RAPIDS, features=(*SAPPHIRE_RAPIDS.features, "avx512bw"))
    kernel = tiles_of(64, 1024, 256, 4, 32, target=target)
    assembly = compile_kernel(kernel, emit, target).inspect_source("asm")
    assert len(re.findall(r"\ttdpbf16ps", assembly)) % 12 == 0
    assert "tdpbf16ps" in assembly
    assert len(re.findall(r"\tvpermw\s.*%zmm", assembly)) >= 8
    assert "vcvtdq2ps" not in assembly
