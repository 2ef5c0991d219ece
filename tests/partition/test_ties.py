"""Masks and positions that rounding decides: which differences from eager pass, and which do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.partition.test_accuracy import _region
from torch_hybrid_backend.partition.accuracy import compare

Function = Callable[[torch.Tensor], torch.Tensor]


def _verdict(function: Function, x: torch.Tensor, result: torch.Tensor) -> str:
    return compare(_region(function, x), [x], [function(x)], [result]).why


MASKS: dict[str, Function] = {
    "comparison": lambda x: (x + 1) <= 1,
    "of two": lambda x: ((x + 1) <= 1) | (x >= 6),
    "view": lambda x: ((x + 1) <= 1).permute(1, 0).contiguous(),
    "not": lambda x: ((x + 1) > 1).logical_not().unsqueeze(0),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_may_differ_at_ties_alone(name: str) -> None:
    """A number beside the threshold may be on either side; one far from it may not, and not most of many."""
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    x[3, 5] = 1e-6
    expected = MASKS[name](x)
    flipped = MASKS[name](torch.where(x == x[3, 5], -1e-6, x))
    assert int((flipped != expected).sum()) == 1
    assert _verdict(MASKS[name], x, flipped) == ""
    x[3, 5] = 0.25  # no tie now
    assert "differs" in _verdict(MASKS[name], x, flipped)
    assert "differs" in _verdict(MASKS[name], torch.full((64, 64), 1e-6), ~MASKS[name](torch.full((64, 64), 1e-6)))


def _pool(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.max_pool2d(x.view(1, 1, *x.shape), 3, 2, 1, return_indices=True)[1]


POSITIONS: dict[str, Function] = {
    "pool": _pool,
    "max": lambda x: x.max(1).indices,
    "kept": lambda x: x.argmax(1, keepdim=True),
    "of all": lambda x: x.argmax(),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_may_differ_at_ties_alone(name: str) -> None:
    """The position of a number nearly as large passes; one of a smaller number does not."""
    x = torch.arange(256.0).reshape(16, 16)
    x[1, 14] = x[1, 15] = 1000
    function = POSITIONS[name]
    other = torch.where(torch.arange(256).view(16, 16) == 1 * 16 + 15, 1000.001, x)
    result = function(other)
    assert not torch.equal(result, function(x))
    assert _verdict(function, x, result) == ""
    x[1, 15] = 900
    assert "differs" in _verdict(function, x, result)


@pytest.mark.parametrize("values", [[0, 1, 1 << 40], [-1, 0, 0]])
def test_positions_that_do_not_exist_never_pass(values: Sequence[int]) -> None:
    """Positions outside of the tensor are not looked up."""
    x = torch.ones(3, 4)
    assert "differs" in _verdict(lambda x: x.argmax(1), x, torch.tensor(values))


def test_integers_of_no_comparison_are_exact() -> None:
    """A permutation that sorts says more than which numbers are equal."""
    x = torch.ones(2)
    assert "differs" in _verdict(lambda x: x.argsort(stable=True), x, torch.tensor([1, 0]))


@pytest.mark.parametrize("mask", [float("-inf"), -1e9, torch.finfo(torch.float32).min])
def test_huge_numbers_make_no_ties(mask: float) -> None:
    """Masked numbers do not widen what counts as nearly equal."""
    x = torch.arange(64.0).reshape(8, 8)
    x[:, ::4] = mask
    expected = x.argmax(1)
    assert "differs" in _verdict(POSITIONS["max"], x, expected - 1)
    assert _verdict(POSITIONS["max"], x, expected) == ""
