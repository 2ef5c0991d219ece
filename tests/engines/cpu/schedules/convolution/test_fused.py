"""Chains of convolutions against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, run_kernel
from tests.engines.cpu.schedules.convolution.convolutions_for_tests import INVERTED, Case, depthwise, make_stages
from torch_hybrid_backend.engines.cpu.convolution_fusion import fused_kernel
from torch_hybrid_backend.engines.cpu.schedules.convolution import fused
from torch_hybrid_backend.engines.cpu.target import Target


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "cases",
    [
        INVERTED,
        [Case((2, 19, 13, 17), 37, (1, 1)), depthwise(37, (13, 17), 5, images=2)],
        [Case((1, 3, 23, 31), 32, (3, 3), 2, 1, blocked_x=False), depthwise(32, (12, 16), images=1)],
        [depthwise(7, (1, 5)), Case((1, 7, 1, 5), 3, (1, 1), long_epilogue=True)],
        [Case((3, 5, 2, 3), 18, (1, 1)), depthwise(18, (2, 3), 5, 2, images=3), Case((3, 18, 1, 2), 5, (1, 1))],
        [Case((1, 8, 15, 9), 16, (1, 1)), depthwise(16, (15, 9), dilation=2)],
        [depthwise(33, (11, 7), 3, 3), depthwise(33, (4, 3), 7), Case((1, 33, 4, 3), 1, (1, 1))],
    ],
    ids=["inverted", "five", "stem", "one row", "clipped", "dilated", "two depthwise"],
)
def test_a_chain_computes_what_its_convolutions_do(cases: list[Case], target: Target) -> None:
    """Against float64, with sizes that no block divides, strips of unequal height, padding wider than the image."""
    stages, inputs, want = make_stages(cases, target)
    (got,) = run_kernel(fused_kernel(stages), fused.emit, inputs, target)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("cores", [1, 3, 8])
def test_any_number_of_strips(cores: int) -> None:
    """Neighbouring strips compute the rows they share, also where there are more cores than rows."""
    target = dataclasses.replace(HOST, cores=cores)
    stages, inputs, want = make_stages([Case((1, 4, 7, 5), 9, (1, 1)), depthwise(9, (7, 5))], target)
    (got,) = run_kernel(fused_kernel(stages), fused.emit, inputs, target)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
