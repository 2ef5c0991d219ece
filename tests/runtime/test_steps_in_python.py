"""Steps as functions of Python. All kinds of operators are called so in `test_program_runner.py`, beside the C++ plan."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from torch_hybrid_backend.core.program import Copy, ExternalCall, OperatorCall, TensorArgument
from torch_hybrid_backend.runtime.steps_in_python import in_python

T = TensorArgument


def test_an_operator_takes_tensors_in_order_and_returns_what_is_read() -> None:
    """Lists and arguments by keyword are filled in; results that nobody reads are dropped."""
    x, y = torch.randn(3), torch.randn(3)
    (added,) = in_python(OperatorCall("aten::add", (T(0), T(1), 2), (2,), "", "Tensor"))([x, y])
    assert torch.equal(added, x + 2 * y)
    (joined,) = in_python(OperatorCall("aten::cat", ((T(0), T(1)), 0), (2,), ""))([x, y])
    assert torch.equal(joined, torch.cat([x, y]))
    (order,) = in_python(OperatorCall("aten::sort", (T(0), -1, True), (None, 1), ""))([x])
    assert torch.equal(order, x.sort(descending=True).indices)
    (second,) = in_python(OperatorCall("aten::split", (T(0), 2, 0), ((None, 1),), "", "Tensor"))([x])
    assert torch.equal(second, x[2:])


def test_a_runner_without_a_c_function_is_called() -> None:
    """The runner fills the tensors that it writes, and returns nothing."""

    class Doubling:
        native = None

        def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
            torch.mul(tensors[0], 2, out=tensors[1])

    step = ExternalCall(Doubling(), (0, 1), 1, "doubling")
    x, out = torch.ones(2), torch.empty(2)
    assert step.runs_in_python
    assert in_python(step)([x, out]) == []
    assert torch.equal(out, 2 * x)


def test_other_steps_have_no_function() -> None:
    """The C++ plan runs them."""
    step = Copy(0, 1)
    assert not step.runs_in_python
    with pytest.raises(AssertionError):
        in_python(step)
