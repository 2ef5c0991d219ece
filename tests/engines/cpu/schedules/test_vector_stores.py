"""Stores of vectors: bfloat16 by one instruction, beside PyTorch's rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, compile_kernel, run_kernel
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import Case, check, make
from torch_hybrid_backend.engines.cpu.schedules.convolution.rules import emit
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.layout import contiguous

_ZEN4 = Target("znver4", "x", ("avx512f", "avx512bw", "avx512vl", "avx512_bf16"), 16, 2, 32 << 10, 1 << 20)
_DEPTHWISE = Case((1, 32, 9, 20), 32, (3, 3), 1, 1, groups=32, dtype="bfloat16")


def assembly(case: Case, target: Target, *, is_blocked: bool = True) -> str:
    kernel, _, _ = make(case, target)
    if not is_blocked:
        writes = tuple(dataclasses.replace(write, layout=contiguous(write.buffer.shape)) for write in kernel.writes)
        kernel = dataclasses.replace(kernel, writes=writes)
    return str(compile_kernel(kernel, emit, target).inspect_source("asm"))


def test_the_instruction_is_used_where_lanes_are_neighbours() -> None:
    """Not on processors without it, and not where the channels of a pixel lie apart; what is rounded stays in registers."""
    assert "\tvcvtneps2bf16\t" in assembly(_DEPTHWISE, _ZEN4)
    assert "\tvcvtneps2bf16\t" not in assembly(_DEPTHWISE, _ZEN4, is_blocked=False)
    without = dataclasses.replace(_ZEN4, features=("avx512f", "avx512bw", "avx512vl"))
    assert "\tvcvtneps2bf16\t" not in assembly(_DEPTHWISE, without)
    assert not [line for line in assembly(_DEPTHWISE, _ZEN4).splitlines() if "vcvtneps2bf16" in line and "rsp" in line]


@pytest.mark.parametrize("target", [HOST, dataclasses.replace(HOST, features=())], ids=["host", "without"])
@pytest.mark.parametrize(
    "case",
    [
        _DEPTHWISE,
        dataclasses.replace(_DEPTHWISE, x=(2, 29, 9, 9), o=29, groups=29),
        Case((1, 32, 7, 7), 40, (1, 1), dtype="bfloat16"),
    ],
    ids=["depthwise", "ragged", "1x1"],
)
def test_results_are_rounded_to_nearest(case: Case, target: Target) -> None:
    check(case, target)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_special_numbers_stay(number: float) -> None:
    """Infinities and NaN are what eager makes of them."""
    x = torch.randn(_DEPTHWISE.x).bfloat16()
    x[0, 5, 4, 4] = number
    kernel, inputs, want = make(_DEPTHWISE, HOST, x)
    (got,) = run_kernel(kernel, emit, inputs)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
