"""The TVM engine takes the convolutional and vision models whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torch_hybrid_backend
from benchmarks.models import ZOO
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.cpu.resample_last import resample_last


def saved_by_resampling_last(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """By how much fewer FLOPs torch counts once `resample_last` has rewritten the model's graphs: the one pass that saves many."""
    saved: list[int] = []

    def compile_graph(graph: CapturedGraph) -> Callable[[list[Any]], Any]:
        module = graph.graph_module

        def count(arguments: list[Any]) -> tuple[int, Any]:
            with FlopCounterMode(display=False) as counter:
                outputs = module(*arguments)
            return counter.get_total_flops(), outputs

        def run(arguments: list[Any]) -> Any:
            before, _ = count(arguments)
            resample_last(module, PassContext.of(graph))
            module.recompile()
            after, outputs = count(arguments)
            saved.append(before - after)
            return outputs

        return run

    torch._dynamo.reset()
    torch.compile(model, backend=lambda gm, examples: capture(gm, examples, compile_graph, ()))(*inputs)
    return sum(saved)


# Convolutions, depthwise ones, attention, windows: the other models have no kernel of another kind. tests/passes/cpu/test_resample_last.py
# has the pass that only segformer_b0 needs.
_QUICK = ("resnet50", "efficientnet_b0", "vit_b16", "swin_tiny")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _QUICK else pytest.mark.full)
        for name, entry in ZOO.items()
        if entry.tvm_flops
    ],
)
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
    with torch.no_grad():
        saved = saved_by_resampling_last(model, inputs)
    assert (saved > 0) == (name == "segformer_b0")
    assert total + saved >= 0.95 * counter.get_total_flops() > 0  # other passes may save a little
    assert in_tvm >= 0.95 * total, elsewhere
