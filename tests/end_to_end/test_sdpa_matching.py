"""Attention that a model writes out, on the processor: one kernel, with eager's results."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_hybrid_backend

_HEADS, _QUERIES, _KEYS, _DEPTH, _WIDTH = 3, 21, 37, 24, 20
_Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _WithBias(nn.Module):
    """A table of biases by relative position, as Swin's, and a mask for each of two groups of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(_QUERIES + _KEYS, _HEADS))
        self.register_buffer("distance", torch.arange(_QUERIES)[:, None] - torch.arange(_KEYS) + _KEYS - 1)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q / math.sqrt(_DEPTH)) @ k.transpose(-2, -1) + self.table[self.distance].permute(2, 0, 1)
        regions = torch.arange(2 * _KEYS).view(2, _KEYS) // 5 % 2
        mask = (regions[:, None, :_QUERIES].mT != regions[:, None]) * -100.0
        scores = scores.view(-1, 2, _HEADS, _QUERIES, _KEYS) + mask[:, None]
        return torch.softmax(scores.view(-1, _HEADS, _QUERIES, _KEYS), -1) @ v


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A mask that hides with minus infinity; the first row sees nothing, which makes it NaN."""
    scores = q @ k.transpose(-2, -1) * 0.2
    hidden = torch.ones(_QUERIES, _KEYS, dtype=torch.bool).triu()
    return functional.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(_DEPTH), -1) @ v


def _capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scores within -5 to 5, as Gemma 2 has them."""
    scores = torch.einsum("bhsd,bhtd->bhst", q, k)
    weights = torch.softmax(torch.tanh(scores / 5) * 5, -1, dtype=torch.float32).to(v.dtype)
    return torch.einsum("bhst,bhte->bshe", weights, v).flatten(2)


def _rotated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Queries and keys turned by their positions and scores capped, as Gemma 2 has them; each step is rounded to the operands' type."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[2])[:, None] * 10 ** (-torch.arange(_DEPTH // 2) / 3)
        cos, sin = (part.repeat(1, 2).to(x.dtype) for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    scores = torch.tanh(turned(q) @ turned(k).mT * 0.2 / 5) * 5
    hidden = torch.arange(_KEYS) > torch.arange(_QUERIES)[:, None] + 9
    weights = torch.softmax(scores.masked_fill(hidden, -1e9), -1, dtype=torch.float32).to(v.dtype)
    return weights @ v


def _shared_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All heads of queries read one of keys."""
    k, v = (x[:, :1].expand(-1, _HEADS, -1, -1) for x in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(_DEPTH), -1) @ v


def _operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (_QUERIES, _DEPTH), (_KEYS, _DEPTH), (_KEYS, _WIDTH)
    return [torch.randn(4, _HEADS, *shape).to(dtype) for shape in shapes]


def _check(fn: _Function, operands: list[torch.Tensor], tolerance: float, reference: _Function | None = None) -> None:
    """The second call against eager in float64; the first one returns what eager computed."""
    torch.compiler.reset()
    with torch.no_grad():
        (plan,) = torch_hybrid_backend.explain(fn, *operands, options={"placement": "estimate"}).plans
        compiled = torch.compile(fn, backend="hybrid", options={"placement": "estimate"})
        compiled(*operands)
        got = compiled(*operands)
        want = (reference or fn)(*(x.double() for x in operands))
    kernels = [kernel for region in plan.regions for kernel in region.kernels]
    assert sum("attention" in kernel for kernel in kernels) == 1, kernels
    assert not any("matmul" in kernel or "softmax" in kernel for kernel in kernels), kernels
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("fn", [_causal, _capped, _rotated, _shared_keys], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_kernel(fn: _Function, dtype: torch.dtype) -> None:
    """Sizes that are no multiples of vectors or tiles."""
    _check(fn, _operands(dtype), 1e-5 if dtype == torch.float32 else 3e-2)


def test_biases_that_are_looked_up() -> None:
    """The table's rows are gathered once, into memory; the weights stay live."""
    model = _WithBias().eval()
    operands = _operands()
    _check(model, operands, 1e-5, _WithBias.forward.__get__(_doubled(model)))
    compiled = torch.compile(model, backend="hybrid", options={"placement": "estimate"})
    with torch.no_grad():
        compiled(*operands)
        model.table.mul_(-2)
        torch.testing.assert_close(compiled(*operands), model(*operands), rtol=1e-5, atol=1e-5)


def _doubled(model: _WithBias) -> _WithBias:
    double = _WithBias().double()
    double.load_state_dict(model.state_dict())
    return double.eval()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    """Numbers that are not finite reach what they reach in eager: of a query its row, of a key every row of its head."""
    for position in (0, 1):
        operands = _operands()
        operands[position][1, 2, 7, 3] = value
        _check(_capped if position else _shared_keys, operands, 1e-5)


class _Codebook(nn.Module):
    """Soft look-up in learnt vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.randn(90, _DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ self.book.T, -1) @ self.book


@pytest.mark.parametrize(("queries", "kernels"), [(120, ["attention"]), (7, ["matmul", "matmul"])])
def test_learnt_keys(queries: int, kernels: list[str]) -> None:
    """Few queries have the keys packed ahead of calls, as weights of products; for many that does not pay."""
    torch.manual_seed(0)
    model, x = _Codebook().eval(), torch.randn(queries, _DEPTH)
    torch.compiler.reset()
    with torch.no_grad():
        (plan,) = torch_hybrid_backend.explain(model, x, options={"placement": "estimate"}).plans
        compiled = torch.compile(model, backend="hybrid", options={"placement": "estimate"})
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        model.book.mul_(0.5)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    found = [kernel for region in plan.regions for kernel in region.kernels]
    assert [name for kernel in found for name in ("attention", "matmul") if name in kernel] == kernels, found


@pytest.mark.parametrize("fn", [_plain, _capped], ids=lambda fn: fn.__name__)
def test_sizes_that_change(fn: _Function) -> None:
    """A plan serves every number of queries and keys."""
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="hybrid", dynamic=True, options={"placement": "estimate"})
    with torch.no_grad():
        for queries, keys in ((21, 37), (21, 37), (64, 64), (3, 130), (130, 5)):
            operands = [torch.randn(2, _HEADS, rows, 24) for rows in (queries, keys, keys)]
            want = fn(*(x.double() for x in operands))
            torch.testing.assert_close(compiled(*operands).double(), want, rtol=1e-5, atol=1e-5)
