"""Call sites of a model, found while the model runs."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.quantization.call_sites import CallSites, LayerCall, follow, layers_of


class Attention(nn.Module):
    """Products of activations beside layers, and a weight that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Parameter(torch.randn(8, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        mixed = torch.matmul(input=scores.softmax(-1), other=x)
        return torch.addmm(self.bias, mixed.reshape(-1, 8), self.out)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU())
        self.block = Attention()
        self.kernel = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(self.stem(x).transpose(1, 2))
        return functional.linear(functional.linear(y, weight=self.kernel), self.kernel)


SITES = [
    ("stem.0", "conv", 0),
    ("block.query", "linear", 0),
    ("block.key", "linear", 0),
    ("block", "matmul", None),
    ("block#2", "matmul", None),
    ("block#3", "linear", 1),
    ("", "linear", 0),
    ("#2", "linear", 0),
]


def _net() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    follow(net)
    return net


def _seen(net: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Facts that visitors are told of sites, by name."""
    found: dict[str, Any] = {}

    def visit(call: LayerCall) -> Any:
        found[call.site] = call.known
        return call.compute(*call.operands)

    with torch.no_grad(), CallSites(visit):
        net(x)
    return found


def _visited(net: nn.Module, x: torch.Tensor) -> tuple[list[tuple[str, str, int | None]], torch.Tensor]:
    found: list[tuple[str, str, int | None]] = []

    def visit(call: LayerCall) -> Any:
        found.append((call.site, call.kind, call.axis))
        return call.compute(*call.operands)

    with torch.no_grad(), CallSites(visit):
        return found, net(x)


def test_sites_are_named_after_modules() -> None:
    """Layers, functional calls and products of activations: named after the module in whose forward they are made, numbered from the second on.
    A parameter of two dimensions on the right of a product is a linear layer's weight. Results do not change."""
    net, x = _net(), torch.randn(3, 2, 9)
    found, y = _visited(net, x)
    assert found == SITES
    with torch.no_grad():
        assert torch.equal(y, net(x))
    assert sorted(layers_of(net)) == ["block.key", "block.query", "stem.0"]


def test_operands_may_be_replaced() -> None:
    """Arguments of `compute` stand in for the operands, by position or by keyword."""
    net, x = _net(), torch.randn(3, 2, 9)
    with torch.no_grad(), CallSites(lambda call: call.compute(call.operands[0] * 0, call.operands[1])):
        assert torch.equal(net(x), torch.zeros(21, 4))


def test_threads_and_errors_leave_no_trace() -> None:
    """Each thread has its own place in the model; a forward that raises does not shift the names of the next one."""
    net, x = _net(), torch.randn(3, 2, 9)
    with pytest.raises(RuntimeError):
        _visited(net, torch.randn(3, 5, 9))
    with ThreadPoolExecutor(4) as pool:
        for found, _ in pool.map(lambda _: _visited(net, x), range(24)):
            assert found == SITES


def test_dynamo_traces_through() -> None:
    """Dynamo makes one graph, with the visitor's operators in it."""
    net, x = _net(), torch.randn(3, 2, 9)

    def scaled(value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), CallSites(lambda call: call.compute(call.operands[0] * len(call.site), call.operands[1])):
            return net(value)

    expected = scaled(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(scaled, backend="eager", fullgraph=True)(x), expected)


def test_what_is_known_comes_with_the_visit() -> None:
    """Each site is visited with what `follow` was told of it, and with what it is told later; sites it was told nothing of, with None."""
    net, x = Net().eval(), torch.randn(3, 2, 9)
    follow(net, {"stem.0": ("a", 0.1, None), "block#2": ("b",), "#2": ((1.5, -2.0),)})
    nothing = {name: None for name, _, _ in SITES}
    assert _seen(net, x) == nothing | {"stem.0": ("a", 0.1, None), "block#2": ("b",), "#2": ((1.5, -2.0),)}
    follow(net, {"block": ("c",)})
    assert _seen(net, x) == nothing | {"block": ("c",)}


def test_additions_that_something_is_known_of() -> None:
    """Additions are numbered by themselves and leave other sites' numbers alone; one that writes to its first operand still does."""

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, z = x + x, x @ x
            alias = y
            y += z
            return torch.add(alias, torch.add(y, 1) + x @ z, alpha=2)

    net, x = Sums().eval(), torch.randn(3, 3)
    expected = net(x)
    follow(net, {"#add2": ("b",)})
    assert _seen(net, x) == {"#add2": ("b",), "": None, "#2": None}
    names: list[str] = []

    def visit(call: LayerCall) -> Any:
        names.append(call.site)
        return call.compute(*call.operands)

    with CallSites(visit, all_beside=True):
        assert torch.equal(net(x), expected)
    assert names == ["#add1", "", "#add2", "#2", "#add3"]


def test_followed_modules_are_what_they_were() -> None:
    """Types by name and by isinstance, results, state, copies and pickles: copies and pickles are of the module's own class."""
    net, x = _net(), torch.randn(3, 2, 9)
    plain = Net().eval()
    assert repr(net) == repr(plain)
    assert isinstance(net.stem[0], nn.Conv1d)
    plain.load_state_dict(net.state_dict())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other) is Net
        assert type(other.block.query) is nn.Linear
        assert torch.equal(other(x), plain(x))
        unnamed = [("" if k == 0 else f"#{k + 1}", kind, axis) for k, (_, kind, axis) in enumerate(SITES)]
        assert _visited(other, x)[0] == unnamed


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_forwards_of_instances_and_scripts() -> None:
    """A module whose forward was replaced on the instance is followed too, also where that is the one it had, as wrappers leave it behind; one
    that TorchScript runs is left alone."""
    net = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4).eval(), torch.randn(2, 4))).eval()
    old = net[0].forward
    net[0].forward = lambda x: old(x) + 1
    x = torch.randn(2, 4)
    expected = net(x)
    follow(net, {"0": ("known",)})
    assert torch.equal(net(x), expected)
    assert _seen(net, x) == {"0": ("known",)}
    net[0].forward = net[0].forward
    assert _seen(net, x) == {"0": ("known",)}
    follow(net, {"0": ("more",)})
    assert _seen(net, x) == {"0": ("more",)}
    assert torch.equal(net(x), expected)


def test_layers_of_encoders_are_seen() -> None:
    """PyTorch's encoder layer calls its layers, not the one operator that stands for all of them."""
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    follow(net)
    assert {"linear1", "linear2"} <= set(_seen(net, torch.randn(2, 3, 8)))
