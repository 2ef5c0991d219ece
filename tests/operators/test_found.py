"""Faults that PyTorch's tables brought to light, each as a small program on the forced engine: none may come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.operators.execution import Bench, Sample, Subject

aten = torch.ops.aten


def _numbers(*shape: int) -> torch.Tensor:
    return torch.linspace(-3, 4, torch.Size(shape).numel()).reshape(shape)


def _with_sum(y: torch.Tensor, *axes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return y, y.sum(axes)


def _before_the_largest(x: torch.Tensor) -> torch.Tensor:
    best = x.relu().argmax(0, True).clamp(1)
    return x.gather(0, best - 1).masked_fill(best == 0, 1.0)


_BITS = (torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False]))

# What went wrong -> a program that showed it.
FOUND: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a fold graph made of lifted tensors alone, without inputs": (
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]).exp(),
        (_numbers(3),),
    ),
    "an operator that checks and returns nothing: effect tokens are None when called": (
        lambda x: torch.linalg.cholesky(x) * 2,
        (torch.eye(3) * 4,),
    ),
    "the flops of addmv with a scalar to add": (torch.addmv, (torch.tensor(2.0), _numbers(3, 4), _numbers(4))),
    "an empty second result that the graph returns": (
        lambda x, mean, variance: aten.native_batch_norm(x, None, None, mean, variance, False, 0.1, 1e-5),
        (_numbers(2, 3, 4), torch.zeros(3), torch.ones(3)),
    ),
    "one of several results is empty": (lambda x: torch.split_with_sizes_copy(x, [2, 0, 3]), (_numbers(5),)),
    "nearest upsampling while AOTAutograd's fake mode is on": (
        lambda x: torch.nn.functional.interpolate(x, size=7, mode="nearest"),
        (_numbers(1, 2, 5),),
    ),
    "comparisons of bool": (lambda x, y: [op(x, y) for op in (torch.eq, torch.ne, torch.lt, torch.ge)], _BITS),
    "exclusive or of bool": (torch.logical_xor, _BITS),
    "the remainder of floats compares signs": (torch.remainder, (_numbers(6), _numbers(6).flip(0))),
    "a product with a literal zero": (lambda x: torch.addr(x, x, x, beta=0.0, alpha=0.0), (_numbers(3),)),
    "a value returned after a reduction has read it: the kernels' order": (
        lambda x: _with_sum(torch.zeros_like(x), 0, 1),
        (_numbers(4, 5),),
    ),
    "a cast returned after a reduction has read it": (
        lambda x: _with_sum(x.double(), 1),
        (_numbers(4, 5),),
    ),
    "an argmax read both as a value and as an index": (
        _before_the_largest,
        (_numbers(5, 4).sin(),),
    ),
    "a one-dimensional result over a domain of two": (lambda w, x: (w @ x).tanh() * 2, (_numbers(10, 5), _numbers(5))),
    "clamping bool": (torch.clamp_max, _BITS),
    "an expanded result whose stride of a dimension of one element is not the traced one": (
        lambda x: x.expand(1, 3, 2),
        (torch.tensor(2.0),),
    ),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("kernels"), compilers=1)


@pytest.mark.parametrize("name", FOUND)
def test_stays_mended(name: str, bench: Bench) -> None:
    """The engine, forced, and the default backend give eager's results, in the first call and in the plan's."""
    function, arguments = FOUND[name]
    (outcomes,) = bench.run([Sample(Subject.of_function(function), arguments, direct=False)])
    assert {mode: (o.status, o.why) for mode, o in outcomes.items()} == dict.fromkeys(bench.modes, ("passed", ""))
