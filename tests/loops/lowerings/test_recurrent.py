"""Recurrent layers that kernels take, and those that PyTorch's library keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.loops.lowering import supports
from torch_hybrid_backend.loops.policy import Abilities

aten = torch.ops.aten
TAKES = Abilities(recurrent=True)


def _verdict(layer: Any, operator: Any, abilities: Abilities = TAKES) -> Verdict:
    """The verdict on the operator that the layer calls, for two rows of five steps."""
    graph, dtype = torch.fx.Graph(), layer.weight_ih_l0.dtype

    def given(name: str, *shape: int) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.zeros(shape, dtype=dtype)
        return node

    x = given("x", 5, 2, layer.input_size)
    layers = layer.num_layers * (2 if layer.bidirectional else 1)
    hx: Any = given("h", layers, 2, layer.proj_size or layer.hidden_size)
    if layer.mode == "LSTM":
        hx = [hx, given("c", layers, 2, layer.hidden_size)]
    params = [given(f"p{n}", *p.shape) for n, p in enumerate(layer._flat_weights)]
    settings = (layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional, False)
    node = graph.call_function(operator, (x, hx, params, *settings))
    with torch.no_grad():
        found = layer(x.meta["val"])
    node.meta["val"] = (found[0], *(found[1] if isinstance(found[1], tuple) else (found[1],)))
    return supports(node, abilities)


def test_taken() -> None:
    """All kinds; dropout draws nothing in evaluation."""
    assert _verdict(nn.LSTM(3, 4, 2, bidirectional=True, dropout=0.5).eval(), aten.lstm.input) == Supported()
    assert _verdict(nn.GRU(3, 4, bias=False), aten.gru.input) == Supported()
    assert _verdict(nn.RNN(3, 4), aten.rnn_tanh.input) == Supported()
    assert _verdict(nn.RNN(3, 4, nonlinearity="relu"), aten.rnn_relu.input) == Supported()


@pytest.mark.parametrize(
    ("layer", "operator", "code", "abilities"),
    [
        pytest.param(nn.LSTM(3, 4, proj_size=2), aten.lstm.input, Reason.ARGUMENT, TAKES, id="projections"),
        pytest.param(nn.LSTM(3, 4, 2, dropout=0.5), aten.lstm.input, Reason.ARGUMENT, TAKES, id="dropout"),
        pytest.param(nn.GRU(3, 4).double(), aten.gru.input, Reason.DTYPE, TAKES, id="float64"),
        pytest.param(nn.GRU(3, 4), aten.gru.input, Reason.ARGUMENT, Abilities(), id="no kernels"),
    ],
)
def test_refused(layer: Any, operator: Any, code: Reason, abilities: Abilities) -> None:
    """Eager keeps what kernels do not compute."""
    verdict = _verdict(layer, operator, abilities)
    assert isinstance(verdict, Refused)
    assert verdict.code is code
