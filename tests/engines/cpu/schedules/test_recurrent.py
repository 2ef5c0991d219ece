"""Recurrent layers as kernels beside eager in float64: kinds, widths, batches, directions, sizes known only at run time, NaN."""

from __future__ import annotations

from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.engines.cpu.schedule_runner import HOST, NARROW
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.engine import KernelEngine, KernelRegion
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.kernels import RecurrentKernel
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.torch_private import FakeTensorMode

aten = torch.ops.aten
OPERATORS = {"LSTM": aten.lstm.input, "GRU": aten.gru.input, "RNN": aten.rnn_tanh.input}


def _graph(
    operator: Any, x: torch.Tensor, hx: Any, parameters: list[torch.Tensor], settings: Any
) -> torch.fx.GraphModule:
    """A graph of the one operator, on fake tensors."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()

    def given(name: str, tensor: torch.Tensor) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = mode.from_tensor(tensor)
        return node

    first = given("x", x)
    states = [given(f"state{n}", tensor) for n, tensor in enumerate(hx)] if isinstance(hx, list) else given("state", hx)
    params = [given(f"param{n}", tensor) for n, tensor in enumerate(parameters)]
    node = graph.call_function(operator, (first, states, params, *settings))
    node.meta["val"] = tuple(mode.from_tensor(tensor) for tensor in operator(x, hx, parameters, *settings))
    results = [graph.call_function(getitem, (node, n)) for n in range(len(node.meta["val"]))]
    for result, value in zip(results, node.meta["val"], strict=True):
        result.meta["val"] = value
    graph.output(tuple(results))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _check(layer: Any, *shape: int, target: Target = HOST, changed: Any = lambda x: None) -> None:
    """The layer's results by one region with a kernel for each direction are eager's in float64; parameters are inputs."""
    x = torch.randn(shape)
    changed(x)
    first, directions = layer.batch_first, 2 if layer.bidirectional else 1
    states = [torch.randn(layer.num_layers * directions, shape[0 if first else 1], layer.hidden_size)]
    states *= 2 if layer.mode == "LSTM" else 1
    parameters = [p.detach() for p in layer._flat_weights]
    operator = aten.rnn_relu.input if layer.mode == "RNN_RELU" else OPERATORS[layer.mode.split("_")[0]]
    settings = (layer.bias, layer.num_layers, 0.0, False, layer.bidirectional, first)

    hx = states if len(states) == 2 else states[0]
    inputs = [x, *states, *parameters]
    engine = KernelEngine(TvmBackend(target), Config(), services())
    graph = partition_graph(_graph(operator, x, hx, parameters, settings), [engine], Config()).graph
    (segment,) = graph.segments
    (region,) = engine.compile([segment.region], Deadline(120.0))
    assert isinstance(region, KernelRegion), region
    kernels = [kernel for kernel in region.kernels.kernels if isinstance(kernel, RecurrentKernel)]
    assert len(kernels) == layer.num_layers * directions
    found = region([inputs[graph.inputs.index(name)] for name in segment.inputs])
    wide = [tensor.double() for tensor in states]
    expected = operator(x.double(), wide if len(wide) == 2 else wide[0], [p.double() for p in parameters], *settings)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "three cores"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        pytest.param(nn.LSTM(5, 37, 2, bidirectional=True, batch_first=True), (3, 6, 5), id="lstm"),
        pytest.param(nn.GRU(5, 64, bidirectional=True), (6, 1, 5), id="gru"),
        pytest.param(nn.RNN(5, 3, 2, bias=False), (6, 2, 5), id="tanh"),
        pytest.param(nn.RNN(5, 96, nonlinearity="relu"), (6, 1, 5), id="relu"),
    ],
)
def test_layers(layer: Any, shape: tuple[int, ...], target: Target) -> None:
    """Several layers and directions, units that are no whole vectors, and steps that threads share."""
    _check(layer, *shape, target=target)


@pytest.mark.parametrize("batch", [8, 29, 70])
def test_batches(batch: int) -> None:
    """Rows as one tile, as several that read the weights piece by piece, and as several of those; the last of each is smaller."""
    _check(nn.LSTM(4, 72), 3, batch, 4)
    _check(nn.RNN(4, 50), 3, batch, 4)


def test_numbers() -> None:
    """NaN and infinities of one sample reach no other; one step."""

    def change(x: torch.Tensor) -> None:
        x[1, 0, 2], x[3, 2, 0] = torch.nan, torch.inf

    _check(nn.GRU(5, 20), 6, 4, 5, changed=change)
    _check(nn.LSTM(5, 20), 6, 4, 5, changed=change)
    _check(nn.RNN(5, 20, nonlinearity="relu"), 6, 4, 5, changed=change)
    _check(nn.LSTM(5, 20), 1, 1, 5)


def test_unknown_sizes() -> None:
    """Numbers of steps and of rows are arguments of one compilation."""
    torch.compiler.reset()
    layer = nn.LSTM(5, 20, bidirectional=True).eval()
    with torch.no_grad():
        fast = torch.compile(layer, backend="hybrid", dynamic=True)
        for shape in ((7, 3, 5), (9, 13, 5), (2, 4, 5)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x)[0], layer(x)[0], rtol=1e-5, atol=2e-6)


def test_files(tmp_path: Path) -> None:
    """A file with a recurrent layer needs no operator of PyTorch."""
    layer, x = nn.LSTM(5, 20, batch_first=True).eval(), torch.randn(3, 7, 5)
    report = torch_hybrid_backend.export(layer, (x,), tmp_path / "lstm.hybrid")
    assert not report.needs_torch
    torch.testing.assert_close(torch_hybrid_backend.load(tmp_path / "lstm.hybrid")(x)[0], layer(x)[0].detach())
