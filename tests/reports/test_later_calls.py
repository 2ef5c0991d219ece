"""Later calls run what was checked in the first one, and the first call returns what every later call returns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import torch_hybrid_backend
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.partition import whole_call

MEASURED = {"placement": "measure"}


@pytest.fixture
def eager_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole calls are eager's, whatever a call takes."""
    monkeypatch.setattr(whole_call, "cheapest", lambda costs: next(cost for cost in costs if cost.engine == EAGER))


def _same(actual: object, expected: object) -> None:
    for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda t: (-2) ** t,
        lambda t: (-2.5) ** t.floor(),
        lambda t: (-math.inf) ** t.floor(),
        lambda t: (t + 1) * (-3) ** (t * 0 + 2),
        lambda t: t * complex(math.inf, 1.0),
        lambda t: t + complex(1.0, math.nan),
        lambda t: (t * 0 + complex(-0.0, 0.0)).sqrt() + t,
        lambda t: torch.sqrt(torch.full_like(t, -4, dtype=torch.complex64) * complex(1.0, -0.0)),
    ],
)
@pytest.mark.usefixtures("eager_wins")
def test_numbers_that_the_text_of_a_graph_gets_wrong(function: Callable[..., Any]) -> None:
    """Later calls of a graph that eager serves have the signs of its numbers: torch.fx prints `(-2) ** t` as `-2 ** t`."""
    compiled = torch.compile(function, backend="hybrid", options=MEASURED)
    t = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for _ in range(3):
        _same(compiled(t), function(t))


def test_a_power_of_a_dynamic_number() -> None:
    """A power of a negative constant by a size known only at run time has its sign in every call."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (-2) ** x.shape[0]

    compiled = torch.compile(function, backend="hybrid", dynamic=True)
    for size in (3, 4, 5, 4):
        x = torch.randn(size)
        _same(compiled(x), function(x))


class _Printed(nn.Module):
    """A graph whose text is wrong in a way that nobody knows yet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sin() + 1


@pytest.mark.usefixtures("eager_wins")
def test_a_text_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager takes no calls of a graph whose text does not compute what the graph's nodes do; `explain` says why."""
    print_graph = torch.fx.graph.CodeGen._gen_python_code

    def wrong(*args: Any, **kwargs: Any) -> Any:
        code = print_graph(*args, **kwargs)
        code.src = code.src.replace(" + 1;", " + 2;").replace(" + 1\n", " + 2\n")
        return code

    monkeypatch.setattr(torch.fx.graph.CodeGen, "_gen_python_code", wrong)
    model, x = _Printed(), torch.randn(16, 16)
    expected = model(x)
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", options=MEASURED)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected)
        text = str(torch_hybrid_backend.explain(model, x, options=MEASURED))
    assert "the text of Dynamo's graph does not compute what its nodes do" in text


class _Layers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1, dtype=dtype)
        self.norm = nn.BatchNorm2d(16, dtype=dtype)
        self.linear = nn.Linear(16, 32, dtype=dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.convolution(x)).relu()
        pooled = x.mean((2, 3))
        return self.linear(pooled).softmax(-1), x.logical_xor(x[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("verify", ["first", "off", "always"])
def test_the_first_call_returns_what_later_calls_return(dtype: torch.dtype, verify: str) -> None:
    """To the bit and with the same strides, in inference and in training."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9, dtype=dtype)
    model = _Layers(dtype)
    for training in (False, True):
        model.train(training)
        compiled = torch.compile(model, backend="hybrid", options={"verify": verify})
        calls = []
        for _ in range(3):
            torch.manual_seed(1)
            model.zero_grad()
            outputs = compiled(x)
            if training:
                outputs[0].square().sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            calls.append([*(value.detach().clone() for value in outputs), *gradients])
        _same(calls[0], calls[1])
        _same(calls[1], calls[2])


def test_a_cache_that_is_written_in_place() -> None:
    """The first call of a graph that cannot be repeated returns the results of the engine that runs later calls, too."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64)

    def step(cache: torch.Tensor, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, x @ weight)
        return (cache @ weight).softmax(-1)

    compiled = torch.compile(step, backend="hybrid")
    x, position = torch.randn(1, 64), torch.tensor([3])
    results = []
    for _ in range(3):
        cache = torch.ones(8, 64)
        with torch.no_grad():
            results.append((compiled(cache, x, position), cache))
    _same(results[0], results[1])
    _same(results[1], results[2])


@pytest.mark.parametrize("options", [{}, {"engines": "eager"}, {"placement": "measure"}])
@pytest.mark.parametrize("trains", [False, True])
def test_outputs_that_share_memory_with_inputs(options: dict[str, object], trains: bool) -> None:
    """No call warns of views of inputs among the outputs, the first one included, which AOTAutograd looks at."""
    w = torch.randn(4, 4, requires_grad=trains)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ w, x.t(), w, x.view(-1), x.sort(0)[0]

    compiled = torch.compile(function, backend="hybrid", options=options)
    x = torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            torch.testing.assert_close(compiled(x), function(x))
            assert compiled(x)[1].data_ptr() == x.data_ptr()
