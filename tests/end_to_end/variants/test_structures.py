"""Arguments besides tensors, and results: numbers, strings, None, trees of them, subclasses of tensors."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import register_dataclass

from tests.end_to_end.variants.harness import assert_same_tensor, check, compiled, forced


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


register_dataclass(Output)


def test_arguments_that_are_no_tensors() -> None:
    """Numbers, strings, None, bools, lists, dicts, dtypes and slices as arguments; other values of them give other results."""

    def function(
        x: torch.Tensor,
        n: int,
        scale: float,
        mode: str,
        flag: bool,
        extra: list[Any] | None,
        options: dict[str, Any],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        y = x * n + scale
        y = torch.relu(y) if mode == "relu" else torch.tanh(y)
        if extra is not None:
            y = y + sum(extra)
        if flag:
            y = y[options["rows"]]
        return y.to(dtype) * options.get("factor", 1)

    rows = slice(1, 4)
    makers = [
        lambda: (_numbers(6, 8), 2, 0.5, "relu", True, [1, 2.5], {"rows": rows}, torch.float32),
        lambda: (_numbers(6, 8), 3, -1.5, "tanh", False, None, {"rows": rows, "factor": 4}, torch.float32),
        lambda: (_numbers(6, 8), 2, 0.25, "relu", True, [_numbers(8)], {"rows": rows, "factor": 2.5}, torch.bfloat16),
        lambda: (_numbers(6, 8), 7, float("inf"), "tanh", True, [], {"rows": slice(0, 6, 2)}, torch.float32),
    ]
    check(function, *makers, times=2, dynamic=None)


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_numbers_that_vary(dynamic: bool | None) -> None:
    """An int and a float that differ from call to call; Dynamo makes them symbolic when it sees them vary."""

    def function(x: torch.Tensor, n: int, s: float) -> tuple[torch.Tensor, int, float]:
        return torch.relu(x * n) + s, n + 1, s * 2

    makers = [lambda n=n: (_numbers(5, 6), n, n / 3) for n in range(5)]
    check(function, *makers, times=1, dynamic=dynamic)


def test_results_in_trees() -> None:
    """Results in lists, tuples, dicts, named tuples and data classes, with numbers, None and strings among them."""

    def function(x: torch.Tensor) -> dict[str, Any]:
        y = torch.relu(x) * 2
        return {
            "pair": Pair(y, None),
            "list": [y + 1, 3, "text", None, (y.sum(0),)],
            "output": Output(y * 3, (y, x)),
            "ordered": OrderedDict(b=y.T, a=2.5),
            "shape": y.shape,
            "flag": True,
        }

    check(function, lambda: (_numbers(5, 6),))


def test_arguments_in_trees() -> None:
    """Tensors inside dicts, named tuples and data classes; one that is None in some calls."""

    def function(batch: dict[str, torch.Tensor], pair: Pair, output: Output) -> torch.Tensor:
        y = batch["x"] @ batch["w"] + pair.first
        if pair.second is not None:
            y = y * pair.second
        return torch.softmax(y + output.logits, -1) + output.hidden[0]

    def make(with_second: bool) -> tuple[Any, ...]:
        batch = {"w": _numbers(6, 4), "x": _numbers(5, 6)}
        return (
            batch,
            Pair(_numbers(4), _numbers(5, 4) if with_second else None),
            Output(_numbers(5, 4), (_numbers(5, 1),)),
        )

    check(function, lambda: make(True), lambda: make(False), lambda: make(True))


class Scaled(nn.Parameter):
    """A parameter with a number of its own."""


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled(_numbers(8, 6))
        self.offset = nn.Buffer(_numbers(6))
        self.hidden = nn.Buffer(torch.ones(6), persistent=False)
        self.register_parameter("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.offset) * self.hidden


def test_subclasses_of_parameters() -> None:
    """nn.Buffer, a subclass of nn.Parameter, a parameter that is None: weights like any others, changes to them seen."""
    model = Normalised()
    fast = compiled(model)
    with forced():
        for k in range(4):
            got, want = fast.call(_numbers(5, 8)), model(_numbers(5, 8))
            assert_same_tensor(got, want)
            with torch.no_grad():
                model.weight.mul_(1.5)
                model.offset += k
        with torch.no_grad():
            for k in range(3):
                assert_same_tensor(fast.call(_numbers(5, 8)), model(_numbers(5, 8)))
                model.weight.mul_(1.5)
                model.hidden.fill_(k)
    assert fast.taken


class Logged(torch.Tensor):
    """A subclass that changes what one function does."""

    __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl  # AOTAutograd of torch 2.13 traces no other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.sin else result


def test_torch_function_subclass() -> None:
    """A subclass with __torch_function__: its type and its behaviour survive."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + torch.relu(x)

    def make() -> tuple[torch.Tensor]:
        return (_numbers(5, 6).as_subclass(Logged),)

    fast = compiled(function)
    with forced():
        for _ in range(3):
            got, want = fast.call(*make()), function(*make())
            assert type(got) is type(want) is Logged
            assert_same_tensor(got.as_subclass(torch.Tensor), want.as_subclass(torch.Tensor))
            assert not torch.allclose(want.as_subclass(torch.Tensor), function(_numbers(5, 6)))
    assert fast.taken


def test_torch_dispatch_subclass() -> None:
    """A traceable wrapper subclass: AOTAutograd unwraps it, the engine sees its parts."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w) * 3

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return TwoTensor(_numbers(5, 6), _numbers(5, 6) * 2), _numbers(6, 4)

    fast = compiled(function)
    with forced():
        for _ in range(3):
            got, want = fast.call(*make()), function(*make())
            assert type(got) is type(want) is TwoTensor
            assert_same_tensor(got.a, want.a)
            assert_same_tensor(got.b, want.b)
    assert fast.taken
