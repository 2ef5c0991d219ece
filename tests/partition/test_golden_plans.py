"""Golden plans: whole plans of small models, frozen with a clock that ticks evenly.

Every call of every contender takes one tick, so that costs are equal and order decides; what the files record is the
partition, the verdicts, the keys and the form of a plan.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.conftest import Golden, traced
from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.plan import RegionDecision
from torch_hybrid_backend.measuring.measure import HostTimer
from torch_hybrid_backend.partition.placement import Pricing, choose
from torch_hybrid_backend.partition.plan_builder import make_plan
from torch_hybrid_backend.partition.regions import partition_graph


class _Attention(nn.Module):
    """A head over a sequence of 6 positions of width 8, with a residual connection and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        return self.norm(x + torch.softmax(query @ key.transpose(-2, -1) / 8**0.5, -1) @ value)


class _Convolutional(nn.Module):
    """A convolution, a normalisation and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class _Sorting(nn.Module):
    """Products around an operator that no engine takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(torch.relu(x @ x), -1).values.sin() @ x


_CASES = {
    "attention": (_Attention, (1, 6, 8)),
    "convolutional": (_Convolutional, (1, 3, 9, 9)),
    "sorting": (_Sorting, (8, 8)),
}


@traced
@pytest.mark.parametrize("case", _CASES)
def test_plan(case: str, golden: Golden) -> None:
    """The plan is what it was: a change of partitioning, keys or the plan's form shows as a difference of the file."""
    torch.manual_seed(0)
    make, shape = _CASES[case]
    model, x = make().eval(), torch.randn(shape)
    # Parameters enter as inputs, as they do from AOTAutograd.
    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = list(parameters)

    def function(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))  # type: ignore[no-any-return]

    module = trace(function, x, *parameters.values())
    for node in list(module.graph.nodes)[1 : 1 + len(names)]:
        node.meta["constant"] = True
    engine = FakeEngine("engine", refuses=["sort"])
    found = partition_graph(module, [engine], Config())
    ticks = itertools.count(step=1000)
    values: dict[str, torch.Tensor] = dict(zip(found.graph.inputs, [x, *parameters.values()], strict=True))
    decisions: list[RegionDecision] = []
    for segment in found.graph.segments:
        inputs = [values[name] for name in segment.inputs]
        if segment.engine_hint == "eager":
            outputs = segment.region.graph_module(*inputs)
        else:
            (compiled,) = engine.compile([segment.region], Deadline(1.0))
            pricing = Pricing(timer=HostTimer(lambda: next(ticks)))
            choice = choose(segment.region, {"engine": compiled}, inputs, Config(measure_budget_s=1e-5), pricing)
            decisions.append(choice.decision)
            outputs = choice.outputs
        values.update(zip(segment.outputs, outputs, strict=True))
    golden.check(make_plan(case, "inference", found, decisions).to_json())
