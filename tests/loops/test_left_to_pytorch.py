"""Operators that are left to PyTorch, by reasons that users read."""

from __future__ import annotations

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.left_to_pytorch import _by_name, left_to_pytorch
from torch_hybrid_backend.loops.lowering import table


def test_each_is_an_operator_without_a_lowering() -> None:
    """A name that PyTorch does not know, or an operator that has a lowering by now, is a mistake in the list."""
    lowered = {target._opname for target in table() if target.namespace == "aten"}
    for name in _by_name():
        assert hasattr(torch.ops.aten, name), name
        assert name not in lowered, name


def test_codes() -> None:
    """A library's operator, one whose result is sized by data, one that draws; nothing is known of others."""
    reasons = {name: left_to_pytorch(name) for name in ("sort", "nonzero", "randperm", "lgamma")}
    codes = {name: None if refused is None else refused.code for name, refused in reasons.items()}
    assert codes == {
        "sort": Reason.LIBRARY,
        "nonzero": Reason.DATA_DEPENDENT,
        "randperm": Reason.RANDOM,
        "lgamma": None,
    }
