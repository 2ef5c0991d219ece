"""Operators that no engine has kernels for, as steps of the plan: eager's values, numbers and errors, without Python between kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.core.program import Callback, OperatorCall, Step
from torch_hybrid_backend.driver import stages
from torch_hybrid_backend.runtime import executor


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Step]]:
    """The steps of the plans that are built meanwhile; kernels run whatever is faster."""
    found: list[Step] = []
    build = executor.build_executor

    def built(*args: Any, **kwargs: Any) -> executor.Executor:
        made = build(*args, **kwargs)
        found.extend(planned.step for planned in made.layout.steps)
        return made

    monkeypatch.setattr(stages, "build_executor", built)
    monkeypatch.setenv("HYBRID_PREFER_KERNELS", "1")
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


def _called(steps: list[Step]) -> list[str]:
    return [step.name for step in steps if isinstance(step, OperatorCall)]


class Model(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(self.function(self.before(x).relu()).relu()).sigmoid()
        return result


def _spectrum(x: torch.Tensor) -> torch.Tensor:
    filtered = torch.fft.rfft(x, norm="ortho") * torch.complex(x[:, :17], x[:, 15:])
    result: torch.Tensor = torch.fft.irfft(filtered, n=32, norm="ortho")
    return result


def _sampled(x: torch.Tensor) -> torch.Tensor:
    grid = (x[:, :18] - 0.3).view(-1, 3, 3, 2)
    pixels = functional.grid_sample(x.view(-1, 2, 4, 4), grid, mode="bicubic", align_corners=False)
    return functional.pad(pixels.flatten(1), (0, 14))


FUNCTIONS = {
    "topk": lambda x: x.topk(32, sorted=True).values.cumprod(1),
    "sort": lambda x: torch.sort(x, dim=1, descending=True, stable=True).values,
    "median": lambda x: x.median(1, True).values + x.mode(1, True).values - x * x.kthvalue(3, 1, True).values,
    "searchsorted": lambda x: x + torch.searchsorted(x.cumsum(1), x),
    "masked_scatter": lambda x: x.masked_scatter(x > 0.5, x.flip(0)),
    "spectrum": _spectrum,
    "sampled": _sampled,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_between_kernels(name: str, steps: list[Step]) -> None:
    """The plan calls them itself, and the results are eager's; NaN and infinities too, of inputs with other strides."""
    model = Model(FUNCTIONS[name]).eval()
    fast = torch.compile(model, backend="hybrid")
    x = torch.randn(8, 32)
    special = x.clone()
    special[2, 3], special[4, 5] = torch.nan, torch.inf
    with torch.no_grad():
        for given in (x, x.t().contiguous().t(), special):
            torch.testing.assert_close(fast(given), model(given), equal_nan=True)
    assert _called(steps)
    assert not any(isinstance(step, Callback) for step in steps)


@pytest.mark.parametrize("training", [False, True])
def test_random_numbers_are_eagers_bit_by_bit(steps: list[Step], training: bool) -> None:
    """Several operators draw, in eager's order: the same numbers in each call, and the generator is left as eager leaves it."""

    def draw(x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x, 0.3, True) + torch.rand(8, 32)
        return functional.dropout(x * torch.bernoulli(x.sigmoid()) + torch.randn_like(x), 0.1, True)

    model = Model(draw)
    fast = torch.compile(model, backend="hybrid")
    x = torch.randn(8, 32)
    with torch.set_grad_enabled(training):
        for seed in range(3):
            results = []
            for function in (model, fast):
                torch.manual_seed(seed)
                results.append((function(x), torch.get_rng_state()))
            (expected, state), (found, left) = results
            torch.testing.assert_close(found, expected)
            assert torch.equal(left, state)
            if training:
                parameters = list(model.parameters())
                ours, eagers = (torch.autograd.grad(each.sum(), parameters) for each in (found, expected))
                torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)
    assert len(_called(steps)) >= 3


def test_errors_are_eagers(steps: list[Step]) -> None:
    """Values that an operator refuses raise PyTorch's own error, in each such call; other calls run as before."""

    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            y = torch.zeros(8, 32).scatter_reduce(1, index, self.before(x).relu(), "prod")
            result: torch.Tensor = self.after(y).tanh()
            return result

    model = Scattered().eval()
    fast = torch.compile(model, backend="hybrid")
    x, index = torch.randn(8, 32), torch.randint(0, 32, (8, 32))
    bad = index.clone()
    bad[3, 3] = 99
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x, index), model(x, index))
            with pytest.raises(RuntimeError, match="index 99 is out of bounds for dimension 1 with size 32") as raised:
                fast(x, bad)
            assert raised.type is RuntimeError
    assert _called(steps) == ["aten::scatter_reduce"]


def test_results_outlive_the_call(steps: list[Step]) -> None:
    """An operator's result that is a view of a kernel's keeps its memory when the next call is made."""
    model = Model(lambda x: x.sort(1).values)
    model.after = nn.Identity()  # type: ignore[assignment]
    fast = torch.compile(model.eval(), backend="hybrid")
    x, y = torch.randn(8, 32), torch.randn(8, 32)
    with torch.no_grad():
        first = fast(x)
        kept = first.clone()
        fast(y)
        assert torch.equal(first, kept)
    assert _called(steps) == ["aten::sort"]
