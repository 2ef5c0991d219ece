"""Operators that a plan calls without Python, and the reasons why it cannot call others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.graph.operator_calls import arguments_of, why_python

aten = torch.ops.aten


def _node(function: Callable[[torch.Tensor], Any]) -> torch.fx.Node:
    """The last operator of a graph."""
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.randn(3, 4)).graph
    node: torch.fx.Node = [node for node in graph.nodes if node.op == "call_function"][-1]
    return node


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.sort.stable(x, stable=True, dim=1),
        lambda x: aten.topk.default(x, 2)[1],
        lambda x: aten._fft_r2c.default(x, [1], 0, True),
        lambda x: aten.grid_sampler_2d.default(x[None, None], x.view(1, 2, 3, 2), 0, 0, False),
        lambda x: aten.searchsorted.Tensor(x, x, right=True),
        lambda x: aten.index_put.default(x, [None, aten.argmax.default(x, 1)], x[:, :3], True),
        lambda x: aten.masked_scatter.default(x, aten.isnan.default(x), x),
        lambda x: aten.split.Tensor(x, 2),
    ],
)
def test_what_a_plan_calls(function: Callable[[torch.Tensor], Any]) -> None:
    """Operators with several results, lists of results, complex results, indices and optional arguments."""
    assert why_python(_node(function), draws=False) == ""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: aten.histc.default(x, 4), "the C interface of PyTorch's dispatcher cannot call aten.histc.default"),
        (lambda x: aten.add_.Tensor(x, x), "aten.add_.Tensor does more than compute its value"),
        (lambda x: x.to_sparse(), "aten._to_sparse.default has a value that is no plain tensor"),
        (lambda x: aten.conj.default(aten.view_as_complex.default(x.view(3, 2, 2))), "no plain tensor"),
    ],
)
def test_what_needs_python(function: Callable[[torch.Tensor], Any], why: str) -> None:
    """The sentence names the operator and says why."""
    assert why in why_python(_node(function), draws=True)


def test_random_operators_are_called_where_they_may_draw() -> None:
    """Drawing is an effect: only a caller that keeps the order of effects allows it."""
    node = _node(lambda x: aten.bernoulli.default(x.sigmoid()))
    assert why_python(node, draws=True) == ""
    assert "does more than compute its value" in why_python(node, draws=False)


def test_arguments_by_the_schema() -> None:
    """Defaults are filled in, lists are tuples, and one number stands for a list of fixed length."""
    node = _node(lambda x: aten.avg_pool2d.default(x[None, None], [2], count_include_pad=False))
    arguments = arguments_of(node)
    assert list(arguments)[1:] == [
        "kernel_size",
        "stride",
        "padding",
        "ceil_mode",
        "count_include_pad",
        "divisor_override",
    ]
    assert list(arguments.values())[1:] == [(2,), (), (0, 0), False, False, None]
