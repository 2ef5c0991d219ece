"""Errors of a graph of reduced precision beside itself as written."""

from __future__ import annotations

import math

import pytest
import torch

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.partition.deviation import (
    WrittenRun,
    any_telling,
    changing_inputs,
    is_telling,
    layer_errors,
    relative_error,
)

_INF, _NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("reference", "result", "error"),
    [
        ([3.0, 4.0], [3.0, 4.5], 0.1),
        ([3.0, 4.0, _INF, _NAN], [3.0, 4.5, _INF, _NAN], 0.1),
        ([3.0, _INF], [3.0, 3e38], _INF),
        ([3.0, _INF], [3.0, -_INF], _INF),
        ([3.0, 1.0], [3.0, _NAN], _INF),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1e-30], _INF),
        ([], [], 0.0),
        ([_NAN], [_NAN], 0.0),
    ],
)
def test_relative_error(reference: list[float], result: list[float], error: float) -> None:
    """Root mean square over root mean square; values without a number count where they differ, and then for all."""
    a, b = torch.tensor(reference), torch.tensor(result)
    assert relative_error(a, b) == pytest.approx(error)
    assert relative_error(a.double(), b.double()) == pytest.approx(error)


def test_relative_error_of_several_values() -> None:
    """The largest counts; integers and literals are not compared; sums do not overflow in the values' own dtype."""
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert relative_error([a, a], [a, b]) == pytest.approx(0.1)
    assert relative_error((torch.tensor([1, 2]), 3, None), (torch.tensor([2, 1]), 4, None)) is None
    assert relative_error(None, a) is None
    assert relative_error(a, a.to(torch.int8)) is None
    large = torch.full((100,), 60000.0)
    assert relative_error(large.half(), large.half()) == 0.0
    assert relative_error(large * 1e33, large * 1e33 * 1.01) == pytest.approx(0.01, rel=1e-4)
    assert relative_error(a, a.bfloat16()) == relative_error(a, a.to(torch.float8_e5m2)) == 0.0
    assert relative_error(a.to_sparse(), a.to_sparse()) is None


def test_the_graph_as_written_runs_as_far_as_it_is_asked() -> None:
    """Values are given in any order, once; the outputs come last; what nobody asks for is not kept."""
    gm = trace(lambda x: ((x.sin().cos()).exp(), x.neg()), torch.rand(4))
    x = torch.rand(4)
    run = WrittenRun(gm, [x], {"cos", "sin", "absent", "arg0_1"})
    torch.testing.assert_close(run.value("cos"), x.sin().cos())
    torch.testing.assert_close(run.value("sin"), x.sin())
    assert run.value("absent") is None
    assert run.value("exp") is None
    torch.testing.assert_close(list(run.outputs()), [x.sin().cos().exp(), -x])


def test_layers_errors_are_their_own() -> None:
    """Each layer is computed by itself in its precision from values as written: the error of the first is not counted for those behind it.
    Casts between a layer and such values are computed with it. A layer that eager cannot run comes first."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).relu() @ w) @ w

    written, reduced = trace(function, x, w), trace(function, x, w)
    nodes = {node.name: node for node in reduced.graph.nodes}
    with reduced.graph.inserting_after(nodes["relu"]):  # the second layer alone is converted, by a cast of its own
        cast = reduced.graph.call_function(torch.ops.aten._to_copy.default, (nodes["relu"],), {"dtype": torch.bfloat16})
    with reduced.graph.inserting_after(cast):
        back = reduced.graph.call_function(torch.ops.aten._to_copy.default, (cast,), {"dtype": torch.float32})
    nodes["mm_1"].replace_input_with(nodes["relu"], back)
    errors = layer_errors(written, reduced, {"mm", "mm_1", "mm_2"}, [x, w])
    between = (x @ w).relu()
    assert errors["mm"] == errors["mm_2"] == 0.0
    assert errors["mm_1"] == pytest.approx(relative_error(between @ w, between.bfloat16().float() @ w))
    assert errors["mm_1"] > 1e-4

    nodes["mm_2"].args = (nodes["mm_1"], cast)
    assert layer_errors(written, reduced, {"mm_2"}, [x, w])["mm_2"] == math.inf


def test_values_that_tell_something_of_errors() -> None:
    """Not zeros, nor what is nearly all zero, the same number everywhere, or empty; a single number does if it is not zero."""
    sparse = torch.zeros(1000)
    sparse[0] = 1.0
    for values in (
        torch.zeros(9),
        torch.full((9,), 3.0),
        torch.zeros(0),
        torch.zeros(1),
        sparse,
        torch.zeros(4).long(),
    ):
        assert not is_telling(values)
    for values in (torch.tensor([0.0, 1.0]), torch.ones(1), torch.tensor([1, 2]), sparse[:50], torch.randn(9).relu()):
        assert is_telling(values)
    mask, token = torch.ones(8), torch.ones(1, 1)
    assert any_telling([mask, torch.randn(8), 3])
    assert any_telling([token])
    assert not any_telling([token, mask])
    assert not any_telling([torch.zeros(0, 8)])


def test_layers_that_saw_nothing() -> None:
    """Layers that saw nothing are named once they have run: their inputs that calls change are looked at, not weights."""
    module = trace(lambda x, y, w: ((x @ w) + (y * 0) @ w,), torch.ones(4, 4), torch.ones(4, 4), torch.zeros(4, 4))
    x, _, w = (node.name for node in module.graph.find_nodes(op="placeholder"))
    first, second = (node.name for node in module.graph.nodes if node.target is torch.ops.aten.mm.default)
    changing = changing_inputs(module, {w})
    assert {node.name for node in changing[first]} == {x}
    watched = {name: changing[name] for name in (first, second)}
    run = WrittenRun(module, [torch.randn(4, 4), torch.randn(4, 4), torch.zeros(4, 4)], [], watched)
    run.outputs()
    assert run.unseen == [second]
