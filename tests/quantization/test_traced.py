"""`traced`: what Dynamo's graph tells of functions that it shows no mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.symbolic_convert
from torch.nn import functional

from torch_hybrid_backend.quantization import traced
from torch_hybrid_backend.quantization.functions import Function


@pytest.fixture(autouse=True)
def _new() -> None:
    torch._dynamo.reset()


def _traced(function: Function) -> torch.Tensor:
    compiled: Any = torch.compile(function, backend="eager", fullgraph=True)
    result: torch.Tensor = compiled(torch.zeros(3))
    return result


def test_eager_has_no_graph() -> None:
    """Modes are told of all there: nothing is to be found out."""
    assert traced.begins(torch.relu) == ("relu", False, False)
    assert not traced.may_know_more()
    assert not traced.is_never_negative()


@pytest.mark.parametrize(
    ("function", "wrote"),
    [
        (torch.neg, False),
        (torch.relu_, False),
        (functional.hardsigmoid, False),
        (torch.neg_, True),
        (lambda x: x.data.sub_(1), True),
    ],
)
def test_what_was_written_since(function: Function, wrote: bool) -> None:
    """A function between two of which a mode is told; what was there before the first is not told of again."""

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.neg_(x)
        _, first, _ = traced.begins(torch.relu)
        traced.ended(False)
        function(x)
        _, second, is_traced = traced.begins(torch.relu)
        return torch.tensor([first, second, is_traced])

    assert _traced(run).tolist() == [True, wrote, True]


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (functional.hardsigmoid, True),
        (torch.relu_, True),
        (torch.relu, False),
        (torch.neg_, False),
        (functional.hardswish, False),
    ],
)
def test_results(function: Function, known: bool) -> None:
    """Results of functions that no mode is told of (`torch.relu` is not asked for here)."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = function(x)
        traced.begins(torch.relu)
        if not traced.may_know_more():
            return torch.tensor([False])
        y.detach()
        return torch.tensor([traced.is_never_negative()])

    assert _traced(run).tolist() == [known]


def test_no_result_survives_a_write() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        functional.hardsigmoid(x)
        traced.begins(torch.relu)
        before = traced.may_know_more()
        traced.ended(True)
        return torch.tensor([before, traced.may_know_more()])

    assert _traced(run).tolist() == [True, False]


def test_nothing_is_known_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release of PyTorch may not let us find its graph."""
    monkeypatch.setattr(traced, "_graph", lambda: None)

    def run(x: torch.Tensor) -> torch.Tensor:
        functional.hardsigmoid(x)
        _, wrote, is_traced = traced.begins(torch.relu)
        traced.ended(False)
        return torch.tensor([wrote, is_traced, traced.may_know_more(), traced.is_never_negative()])

    assert _traced(run).tolist() == [True, True, False, False]


def test_tracing_that_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `current_tx` a function may be traced or not: it counts as traced, and nothing is known."""
    monkeypatch.delattr(torch._dynamo.symbolic_convert.InstructionTranslator, "current_tx")
    assert traced.begins(torch.relu) == ("relu", True, True)
