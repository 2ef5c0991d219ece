"""`bisect(model, x)` names what in this backend makes a model wrong: a decomposition, the partitioner and a fix of capture as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.capture import aot, decompositions
from torch_hybrid_backend.passes.context import PassContext

aten = torch.ops.aten


class Model(nn.Module):
    """A model that capture takes apart in part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.glu(torch.tanh(nn.functional.softshrink(self.linear(x))))


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is timed, and no test leaves a patched table. The model is always the same: `softshrink` makes most of small numbers 0."""
    torch.manual_seed(0)
    monkeypatch.setenv("HYBRID_PLACEMENT", "estimate")
    yield
    decompositions._full_table.cache_clear()


def _planted(monkeypatch: pytest.MonkeyPatch, operator: Any, formula: Callable[..., object]) -> None:
    own = decompositions._own_formulas
    monkeypatch.setattr(decompositions, "_own_formulas", lambda: {**own(), operator: formula})
    decompositions._full_table.cache_clear()


def test_a_wrong_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong decomposition is named, among all that are applied."""
    _planted(monkeypatch, aten.glu.default, lambda x, dim=-1: x.chunk(2, dim)[0] + 0.5)
    with torch.no_grad():
        result = torch_hybrid_backend.bisect(Model(), torch.randn(4, 8))
    assert result is not None
    assert (result.backend, result.subsystem) == ("hybrid", "capture")
    assert result.debug_info == "the decomposition of aten.glu.default"


def test_a_wrong_partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are compared in grad mode; the partitioner is named where they are wrong for what it does."""
    import functorch.compile
    import torch._dynamo.backends.debugging  # takes the partitioner for aot_eager as it is imported

    right = functorch.compile.min_cut_rematerialization_partition

    def wrong(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        forward, backward = right(joint, *args, **kwargs)
        for node in backward.graph.find_nodes(op="call_function", target=aten.mul.Tensor)[:1]:
            node.target = aten.add.Tensor
        backward.recompile()
        return forward, backward

    monkeypatch.setattr(functorch.compile, "min_cut_rematerialization_partition", wrong)
    result = torch_hybrid_backend.bisect(Model(), torch.randn(4, 8))
    assert result is not None
    assert (result.backend, result.subsystem) == ("hybrid", "capture")
    assert result.debug_info == "the partitioner min_cut_rematerialization_partition"


def test_a_wrong_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fix of AOTAutograd's graphs that changes what they compute is named."""

    def correct_statistics(graph_module: torch.fx.GraphModule) -> None:
        for node in graph_module.graph.find_nodes(op="call_function", target=aten.tanh.default):
            node.target = aten.sigmoid.default
        graph_module.recompile()

    monkeypatch.setattr(aot, "correct_statistics", correct_statistics)
    with torch.no_grad():
        result = torch_hybrid_backend.bisect(Model().eval(), torch.randn(4, 8))
    assert result is not None
    assert (result.backend, result.subsystem) == ("hybrid", "capture")
    assert result.debug_info == "the fix correct_statistics"


def test_a_wrong_pass_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong pass of a model is found by a model and its arguments, too; a model that changes itself begins anew each time."""
    from torch_hybrid_backend.driver import prepared
    from torch_hybrid_backend.passes import pipeline

    def break_tanh(gm: torch.fx.GraphModule, _: PassContext) -> bool:
        for node in gm.graph.find_nodes(op="call_function", target=aten.tanh.default):
            node.target = aten.relu.default
        return True

    class Counting(Model):
        count = 0

        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            self.linear.weight.data.mul_(scale)
            return super().forward(x)

    monkeypatch.setattr(
        prepared, "PASSES", (*pipeline.PASSES[:2], (break_tanh, frozenset(), "a bug"), *pipeline.PASSES[2:])
    )
    with torch.no_grad():
        result = torch_hybrid_backend.bisect(Counting(), torch.randn(4, 8), scale=0.5)
    assert result is not None
    assert (result.backend, result.subsystem, result.debug_info) == ("hybrid", "passes", "break_tanh")
