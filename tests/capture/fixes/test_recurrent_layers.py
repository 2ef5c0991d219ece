"""Recurrent layers stay one operator where nothing needs gradients, and Dynamo traces them for this backend alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torch_hybrid_backend.torch_private import dynamo_config, meta_table

aten = torch.ops.aten
LAYERS = [
    pytest.param(lambda: nn.LSTM(5, 6, 2, bidirectional=True, batch_first=True), aten.lstm.input, id="lstm"),
    pytest.param(lambda: nn.GRU(5, 6), aten.gru.input, id="gru"),
    pytest.param(lambda: nn.RNN(5, 6), aten.rnn_tanh.input, id="tanh"),
    pytest.param(lambda: nn.RNN(5, 6, nonlinearity="relu", bias=False), aten.rnn_relu.input, id="relu"),
]


@pytest.mark.parametrize(("make", "operator"), LAYERS)
def test_whole(recorder: Any, make: Any, operator: Any) -> None:
    """A layer is one operator, whose results have eager's shapes, strides and values; PyTorch's tables are afterwards as before."""
    torch.compiler.reset()
    layer, x = make().eval(), torch.randn(3, 4, 5)
    kernels = dict(operator.py_kernels)
    with torch.no_grad(), dynamo_config.patch(allow_rnn=True):
        found, expected = recorder.compile(layer)(x), layer(x)
    for a, b in zip(_flat(found), _flat(expected), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    nodes = recorder.graphs[0].graph_module.graph.find_nodes(op="call_function", target=operator)
    assert len(nodes) == 1
    assert operator.py_kernels == kernels
    assert operator not in meta_table


def test_gradients(recorder: Any) -> None:
    """With gradients PyTorch's formula is traced, as before."""
    torch.compiler.reset()
    layer, x = nn.GRU(5, 6), torch.randn(2, 4, 5)
    with dynamo_config.patch(allow_rnn=True):
        recorder.compile(layer)(x)[0].sum().backward()
    operators = {node.target for graph in recorder.graphs for node in graph.graph_module.graph.nodes}
    assert aten.gru.input not in operators
    assert aten.sigmoid.default in operators
    assert layer.weight_hh_l0.grad is not None


def test_who_traces() -> None:
    """Dynamo traces a layer for this backend without gradients, also after a reset; not with gradients, nor for another backend."""
    layer, x, seen = nn.LSTM(3, 4).eval(), torch.randn(2, 1, 3), []

    def other(gm: torch.fx.GraphModule, _: object) -> Any:
        seen.append(gm)
        return gm.forward

    for _ in range(2):
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(layer, backend="hybrid", fullgraph=True)(x)
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(layer, backend=other)(x)
    assert not seen
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN"):
        torch.compile(layer, backend="hybrid", fullgraph=True)(x)
    assert dynamo_config.allow_rnn is False


def _flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in _flat(result)]


def test_gradients_of_states_alone(recorder: Any) -> None:
    """A state that needs a gradient gets it, though no weight does."""
    torch.manual_seed(0)
    layer = nn.GRU(4, 4).requires_grad_(False)
    x, weights = torch.randn(3, 2, 4), list(layer.parameters())

    def last(h0: torch.Tensor) -> torch.Tensor:
        return torch.gru(x, h0, weights, True, 1, 0.0, False, False, False)[1].sum()

    gradients = []
    for function in (last, torch.compile(last, backend="hybrid")):
        h0 = torch.ones(1, 2, 4, requires_grad=True)
        function(h0).backward()
        gradients.append(h0.grad)
    torch.testing.assert_close(*gradients)
