"""Writes in place: to arguments, their views, buffers and caches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.end_to_end.variants.harness import assert_same_tensor, check, compiled, forced


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _indexed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[torch.tensor([1, 3])] = y[:2] * 2
    x[:, 0] += 1
    return x.sum(0)


def _through_a_view(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = x.T[3:7]
    before = x * 1
    rows.mul_(y.T[:4])
    return before, x * 2, rows + 1


def _swapped(x: torch.Tensor, y: torch.Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def _half_way(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.relu((x * 2) @ y.T)
    x.sub_(z.mean())
    z2 = torch.relu(x + 1)
    x.mul_(2)
    return z.sum() + z2 * x


def _without_result(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y, alpha=2).clamp_(-1, 1)


def _intermediate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(x)
    z[1:] = x[:-1]
    z.t()[2].copy_(y[:, 0])
    z.diagonal().fill_(5)
    return z * 2 + y


def _out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.empty_like(x)
    torch.add(x, y, out=z)
    torch.exp(y, out=x)
    return z


def _scattered(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.scatter_(0, torch.zeros(1, 8, dtype=torch.int64), y)
    x.index_add_(1, torch.tensor([0, 0]), y[:, :2])
    x.masked_fill_(y > 0.5, 0.25)
    return x.sum(0) + 1  # AOTAutograd's x + 1 has other strides than eager's where x is transposed


def _set_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.zero_()
    x.add_(y)
    x.zero_()
    return x + y


WRITES: dict[str, Callable[..., object]] = {
    "x.add_": lambda x, y: x.add_(y).sum(),
    "+=": lambda x, y: x.__iadd__(y) * 2,
    "indexed": _indexed,
    "through a view": _through_a_view,
    "swapped": _swapped,
    "half way": _half_way,
    "without a result": _without_result,
    "an intermediate value": _intermediate,
    "out=": _out,
    "scattered": _scattered,
    "set twice": _set_twice,
    "inplace modules": lambda x, y: nn.functional.relu(x, inplace=True) + nn.functional.silu(y, inplace=True),
    "transposed": lambda x, y: x.T.mul_(y.T).sum(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str) -> None:
    """The function's results, and its changes of its arguments, are eager's, for several arrangements of the arguments."""
    makers = [
        lambda: (_numbers(6, 8), _numbers(6, 8) + 1),
        lambda: (_numbers(8, 6).T, _numbers(6, 8)),
        lambda: (_numbers(70)[5:53].view(6, 8), _numbers(12, 8)[::2]),
    ]
    check(WRITES[name], *makers, times=2)


@pytest.mark.parametrize("name", ["half way", "an intermediate value", "through a view", "+="])
def test_gradients_through_writes(name: str) -> None:
    """Gradients pass through writes to non-leaves as in eager."""

    def function(x: torch.Tensor, y: torch.Tensor) -> object:
        return WRITES[name](x * 1, y * 1)

    check(function, lambda: (_numbers(6, 8).requires_grad_(), _numbers(6, 8).requires_grad_()), backward=True)


def _assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert_same_tensor(a, b, name)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_statistics(momentum: float | None) -> None:
    """Statistics of batch norms in training follow eager's call by call; then evaluation uses them."""
    # With one draw of weights in two hundred, a feature hardly varies over the four rows: dividing by that makes any rounding large.
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, momentum=momentum), nn.ReLU(), nn.Flatten(1), nn.LazyBatchNorm1d()
    )
    model(_numbers(4, 3, 6, 6))
    reference = copy.deepcopy(model)
    fast = compiled(model)
    with forced():
        for k in range(4):
            x = _numbers(4, 3, 6, 6) * (k + 1)
            assert_same_tensor(fast.call(x), reference(x))
            _assert_same_state(model, reference)
        model.eval(), reference.eval()
        with torch.no_grad():
            for _ in range(2):
                assert_same_tensor(fast.call(x), reference(x))
    assert fast.taken


class Cache(nn.Module):
    """Keys and values of earlier calls in buffers, as decoders keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.register_buffer("keys", torch.zeros(2, 12, 16))
        self.register_buffer("values", torch.zeros(2, 12, 16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        self.keys.index_copy_(1, position, k)
        self.values.index_copy_(1, position, v)
        self.seen += position.numel()
        mask = torch.arange(12) <= position[:, None]
        scores = (q @ self.keys.mT * 0.25).masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, -1) @ self.values


def test_caches_of_a_decoder() -> None:
    """A key-value cache in buffers: every step reads what the earlier ones wrote; resetting it from outside is seen."""
    torch.manual_seed(0)
    model = Cache().eval()
    reference = copy.deepcopy(model)
    fast = compiled(model)
    x = _numbers(2, 1, 16)
    with forced(), torch.no_grad():
        for step in (0, 1, 2, 3, 4, 0, 1):
            if step == 0:
                for each in (model, reference):
                    each.keys.zero_(), each.values.zero_()
            position = torch.tensor([step])
            assert_same_tensor(fast.call(x + step, position), reference(x + step, position))
            _assert_same_state(model, reference)
    assert fast.taken
    assert len(fast.plans) == 1


def test_a_counter_in_python() -> None:
    """A module that counts its calls in a buffer and in a Python number, and that replaces a buffer."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(8))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average = self.average * 0.5 + x.mean(0) * 0.5
            self.calls += 1
            return x - self.average

    model = Counting()
    reference = copy.deepcopy(model)
    fast = compiled(model, dynamic=None)
    with forced():
        for k in range(4):
            x = _numbers(6, 8) + k
            assert_same_tensor(fast.call(x), reference(x))
            _assert_same_state(model, reference)
            assert model.calls == reference.calls
    assert fast.taken


def test_versions_count() -> None:
    """A write in place bumps the argument's version, so that autograd notices a saved tensor that was overwritten."""
    fast = compiled(lambda x: x.mul_(2).sum())
    x = _numbers(4, 4)
    weight = torch.ones(4, 4, requires_grad=True)
    with forced():
        for _ in range(3):
            product = x * weight
            fast.call(x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
