"""Floating-point operations per node: a multiply-add counts two, pointwise operators nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.partition.flops import node_flops

r = torch.randn


@pytest.mark.parametrize(
    ("function", "inputs", "flops"),
    [
        pytest.param(torch.mm, (r(3, 4), r(4, 5)), 2 * 3 * 4 * 5, id="mm"),
        pytest.param(torch.addmm, (r(5), r(3, 4), r(4, 5)), 2 * 3 * 4 * 5, id="addmm"),
        pytest.param(torch.bmm, (r(2, 3, 4), r(2, 4, 5)), 2 * 2 * 3 * 4 * 5, id="bmm"),
        pytest.param(torch.baddbmm, (r(2, 3, 5), r(2, 3, 4), r(2, 4, 5)), 2 * 2 * 3 * 4 * 5, id="baddbmm"),
        pytest.param(torch.ops.aten.mv.default, (r(3, 4), r(4)), 2 * 3 * 4, id="mv"),
        pytest.param(
            lambda x, w: functional.conv2d(x, w, padding=1, groups=2),
            (r(1, 4, 8, 8), r(6, 2, 3, 3)),
            2 * 6 * 2 * 9 * 64,
            id="grouped convolution",
        ),
        pytest.param(
            lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)[0],
            (r(1, 2, 8, 4), r(1, 2, 6, 4), r(1, 2, 6, 4)),
            2 * 2 * 8 * 6 * (4 + 4),
            id="attention",
        ),
        pytest.param(lambda x: torch.softmax(x.sin() + 1, 0), (r(100),), 0, id="pointwise and softmax"),
    ],
)
def test_flops(function: Callable[..., object], inputs: tuple[torch.Tensor, ...], flops: int) -> None:
    """By the formulas of torch.utils.flop_counter, and the same for operators it lacks."""
    assert sum(map(node_flops, trace(function, *inputs).graph.nodes)) == flops
