"""Facts that passes are told of a captured graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.passes.context import PassContext


@pytest.mark.parametrize("kind", ["inference", "forward", "backward"])
def test_parameters_are_constants_of_inference_alone(kind) -> None:
    """Every training step changes the parameters: nothing computed from them may be kept between calls."""
    static = frozenset({"w_1"})
    context = PassContext.of(CapturedGraph(trace(torch.mm, torch.ones(2, 2), torch.ones(2, 2)), kind, static))
    assert context.kind == kind
    assert context.constants == (static if kind == "inference" else frozenset())


@pytest.mark.parametrize("grad", [False, True])
def test_captured_models(captured, grad) -> None:
    """The constants of a real graph are placeholders of it, one for each parameter, in inference only."""
    subject = captured(nn.Linear(3, 2), torch.ones(4, 3), grad=grad)
    names = {node.name for node in subject.gm.graph.find_nodes(op="placeholder")}
    assert len(subject.captured.static_inputs) == 2
    assert subject.ctx.constants <= names
    assert len(subject.ctx.constants) == (0 if grad else 2)
