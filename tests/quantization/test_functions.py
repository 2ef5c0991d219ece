"""`functions`: what names tell, and which functions Dynamo shows to modes."""

from __future__ import annotations

from types import BuiltinFunctionType

import pytest
import torch
from torch._dynamo.variables.torch import get_overridable_functions
from torch._higher_order_ops.cond import cond_op
from torch.nn import functional

import torch_hybrid_backend.graph.quantization  # its import defines `quantized_decomposed`  # noqa: F401
from torch_hybrid_backend.quantization.functions import (
    NEVER_NEGATIVE,
    Function,
    is_in_place,
    is_shown_by_dynamo,
    may_write,
    name_of,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.relu, "relu"),
        (torch.Tensor.relu, "relu"),
        (functional.relu, "relu"),
        (aten.relu, "relu"),
        (aten.relu.default, "relu"),
        (aten.neg_.default, "neg_"),
        (torch.relu_, "relu_"),
        (torch.Tensor.data.__set__, "__set__"),  # type: ignore[attr-defined]
        (torch.ops.quantized_decomposed.quantize_per_tensor, "quantized_decomposed::quantize_per_tensor"),
        (torch.neg_, ""),
        (functional.elu_, ""),
        (aten._native_batch_norm_legit.default, ""),
        (cond_op, ""),
        (pytest.approx, ""),
    ],
)
def test_names(function: Function, name: str) -> None:
    """A name serves all ways of calling an operator; none for what may write, and does not say so."""
    assert name_of(function) == name


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "writes"),
    [
        ("relu", (), {}, False),
        ("neg_", (), {}, True),
        ("", (), {}, True),
        ("sub", (), {"out": None}, True),
        ("__isub__", (), {}, True),
        ("isub", (), {}, True),
        ("__sub__", (), {}, False),
        ("mish", (), {}, True),
        ("hardswish", (None, True), {}, True),
        ("hardswish", (None,), {"inplace": True}, True),
        ("hardswish", (None, False), {}, False),
        ("_threshold", (None, 0, 0), {"inplace": False}, False),
    ],
)
def test_writes(name: str, args: tuple[object, ...], kwargs: dict[str, object], writes: bool) -> None:
    assert may_write(name, args, kwargs) is writes


def test_dynamo_shows_what_is_expected() -> None:
    """Dynamo shows the functions that matter here: those whose results are never negative, and those that write."""
    shown = get_overridable_functions()
    functions = [
        getattr(module, name)
        for module in (torch, torch.Tensor, functional, torch._C._nn)
        for name in dir(module)
        if (is_in_place(name) or name in NEVER_NEGATIVE) and not name.startswith("_")
    ]
    known = [f for f in functions if isinstance(f, BuiltinFunctionType) or f in shown or f is functional.hardsigmoid]
    assert functional.hardsigmoid in known
    assert torch.relu in known
    assert torch.relu_ in known
    assert {f for f in known if is_shown_by_dynamo(f)} == {f for f in known if f in shown}
