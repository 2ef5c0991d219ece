"""Attention whose scores are int8 products, against float64 eager."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, compile_kernel, run_kernel
from tests.engines.cpu.schedules.attention.attention_for_tests import check_beside_eager, make, of_int8
from tests.engines.cpu.schedules.attention.test_bf16 import masks
from torch_hybrid_backend.engines.cpu.kernels import Int8AttentionKernel
from torch_hybrid_backend.engines.cpu.schedules.attention import rules
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.variants.attention import low_precision_attention
from torch_hybrid_backend.loops.kernels import AttentionKernel

Shape = tuple[int, int, int, int, int, int]
_VNNI = Target("cascadelake", "test", ("avx2", "avx512f", "avx512_vnni", "fma"), 16, 2, 32 << 10, 1 << 20)
_AVX_VNNI = Target("alderlake", "test", ("avx2", "avx_vnni", "fma"), 8, 2, 48 << 10, 1280 << 10)
_USDOT = Target.named("neoverse-v1")
_here = [_USDOT, *(target for target in (_VNNI, _AVX_VNNI) if target.features[-2] in HOST.features)]
on_hosts = pytest.mark.parametrize(
    "target",
    [
        pytest.param(
            target,
            marks=() if target in _here else pytest.mark.skip("this processor lacks it"),
            id=target.cpu or target.architecture,
        )
        for target in (_VNNI, _AVX_VNNI, _USDOT)
    ],
)


def in_int8(kernel: AttentionKernel, target: Target = _VNNI) -> Int8AttentionKernel:
    """The kernel that takes its place on the target."""
    (found,) = low_precision_attention(kernel, None, target)
    (other,) = found.kernels
    assert isinstance(other, Int8AttentionKernel)
    return other


@on_hosts
@pytest.mark.parametrize(
    ("shape", "causal", "dtypes", "zeros"),
    [
        ((1, 2, 70, 90, 64, 64), False, ("int8", "int8", "int8"), (0, 0, 0)),  # rows and keys left over
        ((2, 1, 40, 37, 20, 24), True, ("uint8", "int8", "uint8"), (255, 0, 17)),  # an odd number of keys
        ((1, 1, 50, 1100, 80, 40), False, ("int8", "int8", "int8"), (-128, 0, 3)),  # blocks of keys
        ((1, 1, 9, 9, 4, 4), False, ("uint8", "int8", "uint8"), (0, 0, 0)),  # one vector of keys, nothing moved
        ((1, 2, 5, 33, 128, 16), False, ("int8", "int8", "int8"), (127, 0, 0)),
    ],
)
def test_matches_eager(
    target: Target, shape: Shape, causal: bool, dtypes: tuple[str, ...], zeros: tuple[int, ...]
) -> None:
    """(B, H, S, T, D, E): as exact as eager in float32, of all integers there are and with zero points of queries and values."""
    kernel, inputs, values = of_int8(*make(shape, causal=causal, heads_inside=True), dtypes, zeros)
    (got,) = run_kernel(in_int8(kernel, target), rules.emit, inputs, target)
    check_beside_eager(got, values, causal=causal)


@on_hosts
def test_scores_are_exact(target: Target) -> None:
    """Scores of the largest integers are exact: scores that float32 rounds when it sums them differ by one, and so do what they are made of."""
    shape = (1, 1, 6, 40, 512, 16)
    kernel, inputs, _ = of_int8(*make(shape), ("uint8", "int8", "int8"), (0, 0, 0))
    q, k, v = inputs
    inputs[q].fill_(255)
    inputs[k].fill_(127)
    inputs[k][0, 0, ::2, 0] = 126  # 255 less
    inputs[v].zero_()
    inputs[v][0, 0, ::2] = 1
    # A difference of 1 in the sum of products is one of ln(2) / 255 in the score: even keys weigh half of odd ones.
    scale = 0.6931471805599453 / 255
    sharp = dataclasses.replace(in_int8(kernel, target), scale=scale)
    (got,) = run_kernel(sharp, rules.emit, inputs, target)
    torch.testing.assert_close(got, torch.full_like(got, 2 * 0.01 / 3), rtol=1e-3, atol=0)


@on_hosts
def test_masked(target: Target) -> None:
    """Infinities, a query that sees nothing."""
    mask = masks()
    kernel, inputs, (q, k, v) = of_int8(*make((1, 2, 70, 90, 32, 32), mask=mask), ("int8",) * 3, (0, 0, 0))
    (got,) = run_kernel(in_int8(kernel, target), rules.emit, inputs, target)
    want = 2 * torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtypes", "zeros", "depth"),
    [
        (("int8", "uint8", "int8"), (0, 0, 0), 64),  # keys without a sign
        (("int8", "int8", "int8"), (0, 5, 0), 64),  # keys with a zero point
        (("int8", "int8", "int8"), (0, 0, 0), 66),  # no whole groups
    ],
)
def test_what_stays_as_it_is(dtypes: tuple[str, ...], zeros: tuple[int, ...], depth: int) -> None:
    """Keys with a zero point or without a sign, and heads of no whole groups of four, are multiplied in float32."""
    kernel, _, _ = of_int8(*make((1, 2, 70, 90, depth, 64)), dtypes, zeros)
    assert not low_precision_attention(kernel, None, _VNNI)


def test_processors_without_the_instruction() -> None:
    """Processors without the instruction multiply in float32."""
    kernel, _, _ = of_int8(*make((1, 2, 70, 90, 64, 64)), ("int8",) * 3, (0, 0, 0))
    assert not low_precision_attention(kernel, None, dataclasses.replace(_VNNI, features=("avx2", "avx512f", "fma")))


@pytest.mark.parametrize("target", [_VNNI, _AVX_VNNI], ids=lambda target: target.cpu)
def test_machine_code(target: Target) -> None:
    """Scores by int8 dot products without spills between them, values by multiply-adds; squares of groups are transposed in registers."""
    # Nothing is moved: else sums of keys are stored between them.
    kernel, _, _ = of_int8(*make((1, 16, 128, 128, 64, 64), heads_inside=True), ("uint8", "int8", "int8"), (0, 0, 0))
    assembly = compile_kernel(in_int8(kernel, target), rules.emit, target).inspect_source("asm")
    lines = assembly.splitlines()
    places = [i for i, line in enumerate(lines) if "vpdpbusd\t" in line]
    assert len(places) > 30
    between = [line for a, b in itertools.pairwise(places) if b - a < 12 for line in lines[a:b]]
    assert not [line for line in between if re.search(r"[yz]mm\d+, .*\(%r[sb]p", line)]
    assert not [line for line in between if "vfmadd" in line]
    assert "vfmadd" in assembly
    assert "vpunpck" in assembly
