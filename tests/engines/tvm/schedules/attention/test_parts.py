"""What attention tasks share: packing, and panels of keys."""

from __future__ import annotations

import pytest
import torch

from tests.engines.tvm.schedule_runner import HOST, NARROW
from tests.engines.tvm.schedules.attention.attention_for_tests import check
from torch_hybrid_backend.engines.tvm.target import Target


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 49, 49, 32, 32),  # a last panel of two vectors, or of one
        (1, 2, 29, 69, 80, 20),  # of which the last holds five keys
        (1, 1, 7, 33, 37, 64),  # whole squares of a head's dimension, and a rest
        (1, 1, 5, 16, 64, 16),  # one vector of keys
        (1, 2, 9, 48, 16, 16),  # a last panel of one whole vector
    ],
)
def test_keys_transposed_in_registers(shape: tuple[int, ...], target: Target) -> None:
    """Heads of a vector and more, whose keys are packed by squares; ragged panels end with their last key's vector."""
    check(shape, target=target)  # type: ignore[arg-type]
    mask = torch.randn(1, shape[1], shape[2], shape[3])
    check(shape, mask=mask, heads_inside=True, target=target)  # type: ignore[arg-type]
