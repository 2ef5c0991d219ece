"""The TVM engine takes the convolutional and vision models whole."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torch_hybrid_backend
from benchmarks.models import ZOO


@pytest.mark.parametrize("name", [entry.name for entry in ZOO.values() if entry.tvm_flops])
def test_at_least_95_percent_of_flops_run_in_tvm(name: str) -> None:
    """By the plan's own account, whose total is what torch counts for matrix products and convolutions, or more.

    Placement is by estimate: what such small configurations measure on a busy machine would decide nothing.
    """
    entry = ZOO[name]
    model, inputs = entry.build("small"), entry.inputs("small", batch=1)
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            model(*inputs)
        explanation = torch_hybrid_backend.explain(model, *inputs)
    nodes = [node for plan in explanation.plans for node in plan.nodes]
    total = sum(node.flops for node in nodes)
    in_tvm = sum(node.flops for node in nodes if node.engine == "tvm")
    elsewhere = [(node.operator, node.flops, node.refusals) for node in nodes if node.engine != "tvm" and node.flops]
    assert (
        total >= 0.85 * counter.get_total_flops() > 0
    )  # passes save some: SegFormer's projection before its resampling 13 %
    assert in_tvm >= 0.95 * total, elsewhere
