"""HoistedInputs, read as the executors read them."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.core.hoisted_inputs import CallInput, FoldedValue, HoistedInputs
from torch_hybrid_backend.runtime.constants import main_inputs, run_fold


@pytest.mark.parametrize("count", [0, 1, 3])
def test_identity_hands_each_input_on(count: int) -> None:
    """The main graph gets the call's inputs in their order where nothing was split off, and nothing is folded."""
    inputs = [torch.full((1,), float(k)) for k in range(count)]
    hoisted = HoistedInputs.identity(count)
    given = main_inputs(hoisted, run_fold(hoisted, None, inputs), inputs)
    assert all(a is b for a, b in zip(given, inputs, strict=True))
    assert hoisted == HoistedInputs.identity(count) != HoistedInputs.identity(count + 1)


def test_positions_are_those_of_the_unhoisted_graph() -> None:
    """`fold` and `main` count the same inputs: a weight may come before the input, and go to both."""
    weight, other, x = torch.tensor([2.0]), torch.tensor([5.0]), torch.tensor([1.0])
    hoisted = HoistedInputs((CallInput(2), FoldedValue(1), CallInput(0), FoldedValue(0)), (1, 0))
    folded = run_fold(hoisted, lambda raw: [raw[0] * 10, raw[1] * 100], [weight, other, x])
    assert [t.item() for t in main_inputs(hoisted, folded, [weight, other, x])] == [1, 200, 2, 50]
