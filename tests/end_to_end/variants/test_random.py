"""Random operators: eager's very numbers where the draws are eager's, its distribution in any case, and the seed decides."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.end_to_end.variants.harness import assert_same_tensor, compiled, forced


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    "rand": lambda x: torch.rand(6, 8) * 2 + x,
    "randn_like": lambda x: torch.randn_like(x) + x.sin(),
    "two draws": lambda x: (torch.rand(6, 8) + x, torch.randn(3) * 2, torch.rand(6, 8) - x),
    "randint": lambda x: torch.randint(0, 10, (20,)) * 2 + x.sum().to(torch.int64),
    "randperm": lambda x: x[torch.randperm(6)] * 2,
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) * x,
    "multinomial": lambda x: torch.multinomial(torch.softmax(x, -1), 3) + 1,
    "normal": lambda x: torch.normal(x, torch.ones_like(x)) * 2,
    "in place": lambda x: x.clone().uniform_(-1, 1).exp() + x.clone().normal_(),
    "dropout": lambda x: F.dropout(x * 2, 0.3) + 1,
    "dropout twice": lambda x: F.dropout(F.dropout(x, 0.3).relu(), 0.5) + x,
    "feature dropout": lambda x: F.dropout1d(x, 0.5) * 2,
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3) + 1,
    "rrelu": lambda x: F.rrelu(x, training=True) + 1,
    "gumbel": lambda x: F.gumbel_softmax(x) * 2,
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_follow_the_seed(name: str) -> None:
    """From one seed, calls in turn give what eager's calls in turn give, and leave the generator where eager leaves it."""
    function, x = DRAWS[name], _numbers(6, 8)
    fast = compiled(function)
    with forced():
        fast.call(x)
        for _ in range(2):
            torch.manual_seed(3)
            wants = [function(x) for _ in range(3)]
            state = torch.get_rng_state()
            torch.manual_seed(3)
            for want in wants:
                got = fast.call(x)
                for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
                    assert_same_tensor(a, b)
            assert torch.equal(torch.get_rng_state(), state)
    assert fast.taken


def test_first_call_draws_once() -> None:
    """The first call, which runs regions more than once to compare and to time them, draws no more numbers than eager does."""
    x = _numbers(6, 8)
    function = DRAWS["two draws"]
    torch.manual_seed(5)
    want = function(x)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with forced():
        got = compiled(function).call(x)
    for a, b in zip(got, want, strict=True):  # type: ignore[call-overload]
        assert_same_tensor(a, b)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_with_dropout() -> None:
    """Training steps of a model with dropout from one seed: outputs, gradients and masks in backward are eager's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, 12), nn.Dropout(0.2))
    reference = copy.deepcopy(model)
    fast = compiled(model)
    x = _numbers(9, 12)
    with forced():
        for step in range(3):
            for module, call in ((model, fast.call), (reference, reference)):
                torch.manual_seed(10 + step)
                module.zero_grad()
                call(x).square().sum().backward()
            for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert fast.taken


def test_own_generator() -> None:
    """A generator given by the caller is drawn from, and not the global one."""

    def function(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(6, 8, generator=generator) + x.sin()

    x = _numbers(6, 8)
    want = function(x, torch.Generator().manual_seed(3))
    fast = compiled(function, strict=False)
    state = torch.get_rng_state()
    with forced():
        for _ in range(3):
            assert_same_tensor(fast.call(x, torch.Generator().manual_seed(3)), want)
    assert torch.equal(torch.get_rng_state(), state)


def test_distribution() -> None:
    """A large dropout keeps the share it should, and scales what it keeps."""
    fast = compiled(lambda x: F.dropout(x, 0.25) * 3)
    with forced():
        for _ in range(2):
            y = fast.call(torch.ones(200, 500))
            assert abs(float((y == 0).float().mean()) - 0.25) < 0.01
            torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 4.0))
    assert fast.taken
