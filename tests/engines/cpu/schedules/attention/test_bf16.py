"""Attention by dot products of bfloat16 against float64 eager, beside eager in bfloat16; its machine code is looked at."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, compile_kernel, run_kernel
from tests.engines.cpu.schedules.attention.attention_for_tests import check_bf16, in_bf16, make
from torch_hybrid_backend.engines.cpu.schedules.attention import rules
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops import ops

here = pytest.mark.skipif("avx512_bf16" not in HOST.features, reason="this processor has no AVX-512 BF16")
_ZEN4 = Target("znver4", "x", ("avx512_bf16", "avx512f"), 16, 2, 32 << 10, 1 << 20)


@here
@pytest.mark.parametrize(
    ("shape", "heads_inside"),
    [
        ((1, 2, 70, 90, 64, 64), True),  # a last panel of two vectors; squares of pairs
        ((2, 1, 40, 37, 20, 24), False),  # ragged everywhere, an odd number of keys
        ((1, 2, 5, 7, 16, 16), False),  # smaller than a vector of keys: a panel of one
        ((1, 3, 29, 69, 80, 40), True),  # squares and a rest
        ((1, 1, 6, 1, 8, 40), False),  # one key
        ((1, 1, 50, 1100, 32, 40), False),  # blocks of keys
    ],
)
def test_is_as_exact_as_eager(shape: tuple[int, int, int, int, int, int], heads_inside: bool) -> None:
    """(B, H, S, T, D, E)."""
    check_bf16(shape, heads_inside=heads_inside)


def masks() -> torch.Tensor:
    """(1, 2, 70, 90): infinities in places, a query that sees nothing, keys that nobody sees."""
    torch.manual_seed(1)
    mask = torch.randn(1, 2, 70, 90)
    mask[torch.rand(mask.shape) < 0.3] = -math.inf
    mask[:, :, 3] = -math.inf
    mask[..., 80:] = -math.inf
    return mask


def test_by_bfdot() -> None:
    """The loops for AArch64, with arithmetic in place of its instruction: ragged sizes, blocks of keys, masks."""
    target = Target.named("neoverse-v1")
    check_bf16((2, 1, 40, 37, 20, 24), heads_inside=True, target=target)
    check_bf16((1, 1, 50, 1100, 32, 40), causal=True, target=target)
    check_bf16((1, 2, 70, 90, 64, 64), mask=masks(), target=target)


@here
def test_masked_and_causal() -> None:
    """Scaled before a mask is added; a query that sees nothing is zero; causal over several tiles, and over blocks of keys."""
    check_bf16((1, 2, 70, 90, 64, 64), mask=masks())
    check_bf16((1, 2, 100, 100, 48, 48), causal=True)
    check_bf16((1, 1, 1100, 1100, 16, 16), causal=True)


@here
def test_operands_that_are_computed() -> None:
    """Operands that fusion leaves are rounded to bfloat16 and packed as they are computed: the result is that of operands in memory."""
    kernel, inputs = make((1, 2, 40, 50, 32, 32), dtype="bfloat16")
    half = ops.const(0.5, "float32")
    q, k, v = (ops.round_to(ops.mul(e, half), "bfloat16") for e in (kernel.q, kernel.k, kernel.v))
    (got,) = run_kernel(in_bf16(dataclasses.replace(kernel, q=q, k=k, v=v)), rules.emit, inputs)
    (want,) = run_kernel(in_bf16(kernel), rules.emit, {buffer: x * 0.5 for buffer, x in inputs.items()})
    assert torch.equal(got, want)


@here
def test_numbers_that_are_not_finite() -> None:
    """NaN and infinities in operands come out where eager has them, also in weights that are rounded."""
    kernel, inputs = make((1, 1, 20, 40, 16, 16), dtype="bfloat16")
    q, k, v = inputs
    inputs[q][0, 0, 3, 2], inputs[k][0, 0, 39, 5], inputs[v][0, 0, 7, 1] = math.nan, 3e38, math.inf
    (got,) = run_kernel(in_bf16(kernel), rules.emit, inputs)
    want = 2 * torch.nn.functional.scaled_dot_product_attention(*(inputs[x].float() for x in (q, k, v)))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert want.isnan().any()
    assert want.isinf().any()
    finite = want.isfinite()
    torch.testing.assert_close(got[finite].float(), want[finite], rtol=2e-2, atol=2e-2)


def test_machine_code() -> None:
    """Compiled for Zen 4: both products by its instruction without spills between them, weights rounded by one, and no float32 product."""
    kernel, _ = make((1, 2, 70, 96, 64, 64), dtype="bfloat16", heads_inside=True)
    assembly = compile_kernel(in_bf16(kernel), rules.emit, _ZEN4).inspect_source("asm")
    lines = assembly.splitlines()
    places = [i for i, line in enumerate(lines) if "\tvdpbf16ps\t" in line]
    assert len(places) >= 2 * 28
    assert "\tvcvtne2ps2bf16\t" in assembly
    between = [line for a, b in itertools.pairwise(places) if b - a < 12 for line in lines[a:b]]
    assert not [line for line in between if re.search(r"zmm\d+, .*\(%r[sb]p", line)]
    assert not [line for line in between if "vfmadd" in line]
