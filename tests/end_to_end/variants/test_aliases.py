"""Arguments and results that share memory: what a caller sees through the others is what eager shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.end_to_end.variants.harness import Make, check, compiled, forced


def _numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale


def _same_twice(scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    x = _numbers(6, 8, scale=scale)
    return x, x


def _apart(scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    return _numbers(6, 8, scale=scale), _numbers(6, 8, scale=scale) + 1


def _overlapping() -> tuple[torch.Tensor, ...]:
    room = _numbers(60)
    return room[:48].view(6, 8), room[5:53].view(6, 8)


def _base_and_view() -> tuple[torch.Tensor, ...]:
    room = _numbers(6, 8)
    return room, room.view(48).view(6, 8)


ARGUMENTS: dict[str, list[Make]] = {
    "the same tensor twice": [_same_twice, lambda: _same_twice(-2.0)],
    "overlapping views": [_overlapping],
    "a tensor and a view of it": [_base_and_view],
    "twice, then apart": [_same_twice, _apart, _same_twice],
    "overlapping, then apart": [_overlapping, _apart, _base_and_view, _same_twice],
    "apart, then overlapping": [_apart, _overlapping, _base_and_view, _apart],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_read(name: str) -> None:
    """Arguments that share memory and are only read."""
    check(lambda x, y: (torch.relu(x) @ y.T + 1, x * y), *ARGUMENTS[name], times=2)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_written(name: str) -> None:
    """A write to one argument is seen through the other, by the function and by its caller."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        z = y.sin() + x
        y.add_(z)
        return x * y

    check(function, *ARGUMENTS[name], times=2)


def _of(value: torch.Tensor, results: Callable[[torch.Tensor], object]) -> object:
    return results(value)


RESULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "an input": lambda x: (x, x * 2),
    "an input twice": lambda x: (x, x, x + 1),
    "views of an input": lambda x: (x[1:], x.T, x.view(-1), x * 3, x[2:, ::2]),
    "an input written to": lambda x: (x.mul_(3), x, x.sin()),
    "a view of an input written to": lambda x: (x[1:].add_(1), x.cos()),
    "a view of a result": lambda x: _with_views(x * 2),
    "views of what is not returned": lambda x: _with_views(x * 2)[1:],
    "the same result twice": lambda x: _of(x.exp(), lambda y: (y, y, y.sum())),
    "a detached result": lambda x: _of(x.exp(), lambda y: (y, y.detach())),
    "results of equal computations": lambda x: (x.sin() + 1, x.sin() + 1),
    "a result and its copy": lambda x: _of(x.sin() + 1, lambda y: (y, y.clone(), y.contiguous())),
    "pieces": lambda x: (*torch.split(x.relu() + 1, 2), *torch.unbind(x * 2)),
    "expanded": lambda x: _of(x * 2, lambda y: (y.expand(4, 6, 8), y)),
    "a view of a constant": lambda x: (torch.arange(6)[1:] + 1, torch.ones(3), x * 2),
    "nothing but views": lambda x: (x.T, x[0], (x + 0).T),
    "a view through reshape": lambda x: _of(x * 2, lambda y: (y.reshape(8, 6), y.T.reshape(-1), y)),
    "a slice of a result in a list": lambda x: [(x * 2)[:, 1:], {"a": (x * 3).T}],
    "real and imaginary parts": lambda x: _of(torch.complex(x * 2, x), lambda y: (y.real * 2, y.imag)),
}


def _with_views(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y, y[1:], y.T, y.view(-1)[3:], y.flatten(), y.narrow(1, 0, 2)


@pytest.mark.parametrize("name", RESULTS)
def test_results_share_memory_as_in_eager(name: str) -> None:
    """Results that are inputs, views of inputs or views of each other are so when compiled, at the same offsets; others are apart."""
    check(RESULTS[name], lambda: (_numbers(6, 8),), lambda: (_numbers(6, 8, scale=3),))


_FAST = ("an input", "views of an input", "a view of a result", "a detached result", "pieces")


@pytest.mark.parametrize(
    "name", [name if name in _FAST else pytest.param(name, marks=pytest.mark.full) for name in RESULTS]
)
def test_results_share_memory_under_autograd(name: str) -> None:
    """The same where gradients are recorded: and gradients are eager's."""

    def make() -> tuple[torch.Tensor, ...]:
        return (_numbers(6, 8).requires_grad_(),)

    function = RESULTS[name]
    if "written" in name:  # a leaf that requires grad cannot be written to
        check(lambda x: function(x * 1), make, backward=True)
    else:
        check(function, make, backward=True)


def test_later_calls_leave_earlier_results_alone() -> None:
    """A result belongs to its caller: neither another call nor a write to another call's result changes it."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.softmax(x, -1)
        return y, y.T, (x * 2).sum(0)

    fast = compiled(function)
    inputs = [_numbers(6, 8, scale=s) for s in (1.0, 2.0, 3.0, 4.0)]
    with forced():
        results = [fast.call(x) for x in inputs]
        results[3][0].zero_()
        for x, result in zip(inputs[:3], results, strict=False):
            torch.testing.assert_close(result, function(x))
    assert fast.taken


def test_a_result_may_be_written_to() -> None:
    """Writing to a result that came from folded parameters, from constants or from the arena spoils no later call."""
    weight = torch.nn.Parameter(_numbers(6, 8), requires_grad=False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (
                self.weight.T * 2,
                self.weight.exp().sum(0),
                torch.tensor([1.0, 2.0]) * 3,
                x * self.weight.exp(),
                torch.ones(2),
            )

    model = Model()
    fast = compiled(model)
    x = _numbers(6, 8)
    with forced(), torch.no_grad():
        for _ in range(4):
            results = fast.call(x)
            torch.testing.assert_close(results, model(x))
            for result in results:
                result.fill_(77)
    assert fast.taken
