"""Models with control flow, each with calls that take other ways through it, for tests of files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops import while_loop

Calls = list[tuple[torch.Tensor, ...]]


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)


class Branches(_Layers):
    """A branch by the values of the input; its layers are in the branches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def if_true(x: torch.Tensor) -> torch.Tensor:
            return self.first(x).relu()

        def if_false(x: torch.Tensor) -> torch.Tensor:
            return self.second(x).sigmoid() * x.shape[0]

        result: torch.Tensor = torch.cond(x.sum() > 0, if_true, if_false, (x,)) * 2
        return result


class Nested(_Layers):
    """A branch within a branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.mean() > 1, self.first, self.second, (x,))  # type: ignore[no-any-return]

        return torch.cond(x.sum() > 0, inner, torch.sin, (x,)).relu()  # type: ignore[no-any-return]


class TwoCalls(_Layers):
    """Two branches of one predicate, beside each other."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = x.sum() > 0
        return torch.cond(p, self.first, self.second, (x,)), torch.cond(~p, torch.cos, self.first, (x,))


class Counted(_Layers):
    """A loop of as many iterations as an input says, with a branch in it."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def body(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.cond(i % 2 == 0, self.first, torch.cos, (x,))

        i, x = while_loop(lambda i, _: i < n, body, (torch.zeros((), dtype=torch.int64), x))
        return x * 2, i


class UntilSmall(nn.Module):
    """A loop that the values end. What it returns of a small input is that input's contents, in memory of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = while_loop(
            lambda y, _: y.abs().amax() > 1, lambda y, k: (y * 0.5, k + 1), (x, torch.zeros((), dtype=torch.int64))
        )
        return y.add_(1)  # type: ignore[no-any-return]


class Buffered(nn.Module):
    """A buffer that is changed after a branch, of which one side leaves it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.cond(x.sum() > 0, lambda total, x: total + x, lambda total, x: total.clone(), (self.total, x))
        self.total.copy_(new)
        return x * self.total, new


class Tables(nn.Module):
    """Branches that return a constant, and what they are given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(
            x.sum() > 0, lambda x: torch.arange(16.0).expand(4, 16).clone(), torch.clone, (x,)
        )
        return result


def _signs(rows: int = 4) -> Calls:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0)).abs()
    return [(x + 1,), (-x,), (x / 8,), (x * 100,)]


def _counts() -> Calls:
    (x,) = _signs()[0]
    return [(x, torch.tensor(n)) for n in (3, 0, 1, 6)]


# The first call is the one that is exported.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Calls]]] = {
    "branches": (Branches, _signs),
    "nested": (Nested, _signs),
    "two calls": (TwoCalls, _signs),
    "counted": (Counted, _counts),
    "until small": (UntilSmall, lambda: _signs()[::-1]),
    "buffered": (Buffered, _signs),
    "tables": (Tables, _signs),
}


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors that a model returned."""
    return list(value) if isinstance(value, tuple) else [value]
