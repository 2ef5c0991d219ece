"""Winograd convolutions through torch.compile."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.codegen import engine
from torch_hybrid_backend.codegen.assemble import RegionKernels
from torch_hybrid_backend.codegen.search import CompiledVariant
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.partition import placement


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants of the kernels that were compiled, in order."""
    found: list[str] = []
    program_of = engine.program_of

    def record(kernels: RegionKernels, options: Sequence[CompiledVariant]) -> Program:
        found.extend(option.variant.name for option in options)
        return program_of(kernels, options)

    monkeypatch.setattr(engine, "program_of", record)
    return found


def compiled(model: nn.Module, plans: list[Plan]) -> nn.Module:
    config = Config.from_env(os.environ).with_options({"strict": True, "placement": "estimate"}, None)
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append)
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_residual_block(dynamic: bool, chosen: list[str]) -> None:
    """3x3 convolutions of many channels take it by themselves, for a batch known or not, with bias, sum and activation fused."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.second(torch.relu(self.first(x))))

    plans: list[Plan] = []
    model = Block().eval()
    exact = copy.deepcopy(model).double()
    fast = compiled(model, plans)
    with torch.no_grad():
        for batch in (2, 3, 5) if dynamic else (2,):
            x = torch.randn(batch, 64, 27, 30)
            if dynamic:
                torch._dynamo.mark_dynamic(x, 0)
            want = exact(x.double())
            torch.testing.assert_close(fast(x).double(), want, rtol=1e-5, atol=1e-5)
    assert chosen == ["winograd 4", "winograd 4"]
    assert len(plans) == 1
    assert {node.engine for plan in plans for node in plan.nodes} == {"tvm"}


def test_weights_that_are_trained(chosen: list[str]) -> None:
    """A weight that changes from call to call is transformed in each, if at all."""
    model = nn.Conv2d(64, 64, 3, padding=1)
    x = torch.randn(1, 64, 28, 28)
    fast = compiled(model, [])
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            model.weight.mul_(-2)
    assert chosen


def test_a_region_that_rounds_too_much_is_summed_directly(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The accuracy check takes Winograd from a region, not the region from the engine."""
    model = nn.Conv2d(64, 64, 3, padding=1).eval()
    compare = placement.compare
    found = iter([{"why": "it rounds too much", "relative_error": 0.1}])
    monkeypatch.setattr(
        placement, "compare", lambda *arguments: dataclasses.replace(compare(*arguments), **next(found, {}))
    )
    with torch.no_grad():
        x = torch.randn(1, 64, 28, 28)
        torch.testing.assert_close(compiled(model, [])(x), model(x), rtol=1e-5, atol=1e-5)
    assert chosen == ["winograd 4", ""]
