"""Updates and results of a call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.artifact.test_manifest import _ENTRY
from torch_hybrid_backend.artifact.calls import bits_in_words, finish, finisher
from torch_hybrid_backend.artifact.manifest import (
    CopyUpdate,
    Entry,
    LiteralResult,
    Origin,
    Result,
    RowsUpdate,
    ViewResult,
)
from torch_hybrid_backend.core.lazy_bits import LazyBits


def _entry(updates: tuple[Any, ...], results: tuple[Any, ...]) -> Entry:
    return dataclasses.replace(_ENTRY, updates=updates, results=results)


def test_updates_come_before_results() -> None:
    """A result that is a view of a state sees its new contents; rows may be counted from the end."""
    tensors: dict[Origin, torch.Tensor] = {
        ("state", 0): torch.zeros(3, 2),
        ("state", 1): torch.zeros(2),
        ("output", 0): torch.ones(2),
        ("output", 1): torch.tensor([0, -1]),
        ("output", 2): torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    }
    updates = (CopyUpdate(("state", 1), 0), RowsUpdate(("state", 0), 0, ("output", 1), ("output", 2)))
    results = (ViewResult(("state", 0), (2,), (2,), 1, ""), Result(("state", 1)), LiteralResult(None))
    column, state, nothing = finish(_entry(updates, results), tensors.__getitem__)
    assert column.tolist() == [2.0, 0.0]
    assert state is tensors["state", 1]
    assert state.tolist() == [1.0, 1.0]
    assert nothing is None
    assert tensors["state", 0].tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]


def test_a_position_outside_is_an_error() -> None:
    tensors: dict[Origin, torch.Tensor] = {
        ("state", 0): torch.zeros(3),
        ("output", 0): torch.tensor([3]),
        ("output", 1): torch.ones(1),
    }
    with pytest.raises(IndexError):
        finish(_entry((RowsUpdate(("state", 0), 0, ("output", 0), ("output", 1)),), ()), tensors.__getitem__)


def test_constants_are_copied() -> None:
    """The caller may write to a result; a file's constants stay."""
    constant = torch.ones(2)
    (result,) = finish(_entry((), (Result(("constant", 0)),)), lambda _: constant)
    assert result is not constant
    assert torch.equal(result, constant)


@pytest.mark.parametrize("bits", [LazyBits(), LazyBits(conjugate=True), LazyBits(negative=True), LazyBits(True, True)])
def test_bits_come_back(bits: LazyBits) -> None:
    value = torch.tensor([1 + 2j])
    (found,) = finish(_entry((), (ViewResult(("input", 0), (1,), (1,), 0, bits_in_words(bits)),)), lambda _: value)
    assert LazyBits.of(found) == bits


def test_a_view_of_an_input_with_other_strides() -> None:
    """The view shows the values that it would of the input as it was exported: row 1 of a (2, 3) input, here of a transposed one."""
    given = torch.arange(6.0).view(3, 2).t()
    (row,) = finish(_entry((), (ViewResult(("input", 0), (3,), (1,), 3, ""),)), lambda _: given)
    assert row.tolist() == given[1].tolist()


def test_a_view_of_a_constant_is_one_of_a_copy() -> None:
    constant = torch.zeros(2)
    (view,) = finish(_entry((), (ViewResult(("constant", 0), (1,), (1,), 1, ""),)), lambda _: constant)
    view.fill_(7)
    assert constant.tolist() == [0, 0]


def test_outputs_of_the_plan_need_no_work() -> None:
    """Nothing is done after the plan if results are its outputs, in order."""
    assert finisher(_entry((), (Result(("output", 0)), Result(("output", 1))))) is None
    assert finisher(_entry((), (Result(("output", 1)), Result(("output", 0))))) is not None
    assert finisher(_entry((), (Result(("output", 0)), LiteralResult(1)))) is not None
