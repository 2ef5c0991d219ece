"""Reading sizes from the inputs of a call."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.size_reader import SizeReader
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.sizes.size import symbol

S, T = symbol("s0"), symbol("s1")


def test_sizes_are_read_from_numbers_and_dimensions() -> None:
    """A size among the inputs, a dimension, and a dimension that is a multiple or a sum all tell their symbol."""
    spec = TensorSpec((4, T * 3 + 1), "float32", (T * 3 + 1, 1), CPU)
    reader = SizeReader([S, None, spec], ["s1", "s0"])
    assert reader.read([7, None, torch.empty(4, 31)]) == (10, 7)
    assert reader.values([0, None, torch.empty(4, 1)]) == {"s1": 0, "s0": 0}


def test_sizes_that_no_input_tells_are_one_clear_error() -> None:
    """A product of two symbols tells neither."""
    with pytest.raises(HybridError, match="s0, s1 cannot be told"):
        SizeReader([TensorSpec((S * T,), "float32", (1,), CPU)], ["s0", "s1"])
