"""Programs of hundreds and thousands of operators one after another are compiled as any other, by kernels of a limited depth."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend import backend
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.engines.cpu.policy import POLICY as CPU_POLICY
from torch_hybrid_backend.engines.triton.policy import POLICY as GPU_POLICY
from torch_hybrid_backend.loops.fusion import fuse, inlined
from torch_hybrid_backend.loops.graph import lower_region
from torch_hybrid_backend.loops.ir import depth
from torch_hybrid_backend.loops.policy import FusionPolicy
from torch_hybrid_backend.partition.regions import partition_graph

Program = Callable[[torch.Tensor, int], torch.Tensor]


def _pointwise(x: torch.Tensor, count: int) -> torch.Tensor:
    y = x
    for step in range(count):
        y = torch.sin(y) if step % 3 == 0 else y * 1.01 if step % 3 == 1 else y + x
    return y


def _chosen(x: torch.Tensor, count: int) -> torch.Tensor:
    y = x
    for step in range(count // 2):
        y = torch.where(x > step / count, y, y * 0.99)
    return y


def _cast(x: torch.Tensor, count: int) -> torch.Tensor:
    y = x
    for _ in range(count // 2):
        y = y.half().to(x.dtype)
    return y.sin()


def _reduced(x: torch.Tensor, count: int) -> torch.Tensor:
    y = x
    for step in range(count // 3):
        y = y - y.mean(step % 2, keepdim=True) * 0.01
    return y


def _viewed(x: torch.Tensor, count: int) -> torch.Tensor:
    y = x
    for _ in range(count // 2):
        y = y.t() + x
    return y


def _rearranged(x: torch.Tensor, count: int) -> torch.Tensor:
    y = x
    for _ in range(count // 4):
        y = y.t().flip(0).reshape(2, -1).flip(1).view(16, 8)
    return y.sin()


def _concatenated(x: torch.Tensor, count: int) -> torch.Tensor:
    y = x
    for _ in range(count // 4):
        y = torch.cat([y[:, 4:], y[:, :4] * 0.99], 1)
    return y


def _stacked(x: torch.Tensor, count: int) -> torch.Tensor:
    parts = [x * (step / count) for step in range(count // 2)]
    return torch.stack(parts).sum(0)


def _attention(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.softmax(_pointwise(x @ x.t(), count), -1) @ x


def _compiled(program: Program, count: int, x: torch.Tensor) -> tuple[torch.Tensor, list[Plan]]:
    """The result of a compiled program, and its plans; those of gradients are added when they are asked for."""
    plans: list[Plan] = []
    compile_graph = functools.partial(
        backend.compile_for_dynamo, config=Config.from_env(os.environ), on_plan=plans.append
    )
    return torch.compile(lambda x: program(x, count), backend=compile_graph)(x), plans


@pytest.mark.parametrize(
    "program",
    [_pointwise, _chosen, _cast, _reduced, _viewed, _rearranged, _concatenated, _stacked, _attention],
    ids=lambda program: program.__name__,
)
def test_hundreds_of_operators(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    """400 operators, each of which reads the one before: kernels run them, nothing is warned of, and results are eager's."""
    x = torch.randn(8, 16) if program is _rearranged else torch.randn(16, 16)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        answer, plans = _compiled(program, 400, x)
        expected = program(x, 400)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)
    assert {region.engine for plan in plans for region in plan.regions} == {"tvm"}
    assert not caplog.records


def test_gradients_of_hundreds_of_operators(caplog: pytest.LogCaptureFixture) -> None:
    """The graph of the gradients is as deep, and is compiled too."""
    x = torch.randn(16, 16, requires_grad=True)
    with caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        answer, plans = _compiled(_pointwise, 400, x)
        (gradient,) = torch.autograd.grad(answer.sum(), x)
    (expected,) = torch.autograd.grad(_pointwise(x, 400).sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)
    assert [plan.kind for plan in plans] == ["forward", "backward"]
    assert {region.engine for plan in plans for region in plan.regions} == {"tvm"}
    assert not caplog.records


def test_from_a_deep_stack(caplog: pytest.LogCaptureFixture) -> None:
    """A program that calls a model from 400 functions deep leaves enough of Python's stack."""
    x = torch.randn(16, 16)

    def deep(levels: int) -> tuple[torch.Tensor, list[Plan]]:
        return deep(levels - 1) if levels else _compiled(_viewed, 100, x)

    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        answer, plans = deep(400)
    torch.testing.assert_close(answer, _viewed(x, 100), rtol=1e-4, atol=1e-4)
    assert {region.engine for plan in plans for region in plan.regions} == {"tvm"}
    assert not caplog.records


@pytest.mark.parametrize("program", [_pointwise, _viewed], ids=lambda program: program.__name__)
@pytest.mark.parametrize("policy", [CPU_POLICY, GPU_POLICY], ids=["cpu", "gpu"])
def test_thousands_of_operators(program: Program, policy: FusionPolicy) -> None:
    """2,000 operators are divided into kernels without recursion over the graph, and no kernel is deeper than the policy has it."""
    x = torch.randn(8, 8)
    module = trace(lambda x: program(x, 2000), x)
    partition = partition_graph(module, [FakeEngine()], Config())
    (segment,) = partition.graph.segments
    graph = lower_region(segment.region, policy)
    groups = fuse(graph, policy)
    values = [value for group in groups for value in inlined(group).values()]
    assert 10 < max(map(depth, values)) <= policy.max_depth
