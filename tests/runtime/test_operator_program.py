"""Regions of eager as programs: every operator is one step of the plan, and Python is needed for none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.runtime.operator_program import NotNativeError, operator_region
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

aten = torch.ops.aten


def _region(function: Callable[..., Any], *inputs: torch.Tensor) -> Region:
    (segment,) = partition_graph(trace(function, *inputs), [FakeEngine()], Config()).graph.segments
    return segment.region


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: aten.sort.default(x, 1, True), id="several-results"),
        pytest.param(lambda x: aten.topk.default(x, 2)[1], id="defaults-and-a-result-that-nobody-reads"),
        pytest.param(lambda x: aten.cat.default([x, aten.t.default(x)[:3, :1]], 1), id="a-list-of-tensors-and-views"),
        pytest.param(lambda x: aten.unsafe_split.Tensor(x, 2, 1)[0] * x[:, :2], id="a-list-of-results"),
        pytest.param(lambda x: aten._unsafe_index.Tensor(x, [None, aten.argmax.default(x, 1)]), id="a-list-with-none"),
        pytest.param(lambda x: aten.avg_pool2d.default(x[None, None], [2], count_include_pad=False), id="named"),
        pytest.param(lambda x: aten._to_copy.default(x, dtype=torch.float64).half(), id="dtypes"),
        pytest.param(lambda x: aten.div.Tensor_mode(x, aten.abs.default(x), rounding_mode="floor"), id="a-text"),
        pytest.param(lambda x: (x, x.relu(), aten.select.int(x, 0, 1)), id="an-input-is-returned"),
    ],
)
def test_a_plan_runs_it(function: Callable[..., Any]) -> None:
    """The results are eager's, bit for bit, with the traced strides."""
    x = torch.randn(3, 4)
    region = _region(function, x)
    made = operator_region(region)
    assert not any(step.runs_in_python for step in made.program.steps)
    specs = [each.spec for each in region.inputs]
    run = ProgramRunner(made.program, specs, [spec for spec in region.outputs if spec is not None])
    for each in (x, torch.randn(3, 4), torch.randn(4, 3).t()):
        for found, expected, spec in zip(run([each]), made([each]), region.outputs, strict=True):
            assert spec is not None
            assert torch.equal(found, expected)
            assert found.stride() == spec.strides


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: aten.histc.default(x, 4, -1, 1), r"dispatcher cannot call aten\.histc\.default"),
        (aten.bernoulli.default, r"aten\.bernoulli\.default does more than compute its value"),
        (lambda x: torch.view_as_complex(x.view(-1, 2)).conj(), "a value that is no plain tensor"),
        (aten.nonzero.default, "sizes that depend on data"),
    ],
)
def test_what_needs_python(function: Callable[..., Any], said: str) -> None:
    """The operator is named."""
    with pytest.raises(NotNativeError, match=said):
        operator_region(_region(function, torch.randn(3, 4)))


def test_what_pytorch_decomposes() -> None:
    """An operator without a kernel for the form of its inputs is known after a run."""
    x = torch.arange(12).reshape(1, 1, 3, 4)
    region = _region(lambda x: aten.upsample_nearest2d.default(x, [6, 8]), x)
    region.eager([x])
    with pytest.raises(NotNativeError, match="no kernel"):
        operator_region(region)
