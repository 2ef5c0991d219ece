"""Dtypes that operators compute in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.ao.quantization.fx import _decomposed  # noqa: F401  # registers the operators

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.graph.precision import computes, converted_to, is_cast, precision_of

quantized = torch.ops.quantized_decomposed


def _last(function: Callable[..., object], *inputs: torch.Tensor) -> torch.fx.Node:
    return [node for node in trace(function, *inputs).graph.nodes if node.op == "call_function"][-1]


@pytest.mark.parametrize(
    ("function", "cast", "computing"),
    [
        (lambda x: x.bfloat16(), True, False),
        (lambda x: torch.ops.prims.convert_element_type(x, torch.float16), True, False),
        (lambda x: quantized.quantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8), True, False),
        (lambda x: quantized.dequantize_per_tensor(x.to(torch.int8), 0.1, 0, -128, 127, torch.int8), False, False),
        (lambda x: x.long(), False, False),
        (lambda x: torch.ops.aten._to_copy(x, memory_format=torch.contiguous_format), False, True),
        (lambda x: x > 0, False, False),
        (lambda x: x.t(), False, False),
        (lambda x: x.max(0)[0], False, False),
        (lambda x: x.sin(), False, True),
        (lambda x: x.topk(2), False, True),
    ],
)
def test_casts_and_computing(function: Callable[..., object], cast: bool, computing: bool) -> None:
    """Casts between floating-point dtypes and quantizations change precision; views, casts and picking compute nothing."""
    node = next(n for n in reversed(trace(function, torch.rand(4, 4)).graph.nodes) if _is_wanted(n))
    assert (is_cast(node), computes(node)) == (cast, computing)


def _is_wanted(node: torch.fx.Node) -> bool:
    """Not what make_fx adds behind an operator of several results."""
    return node.op == "call_function" and not (node.name.startswith("getitem") and "topk" in node.args[0].name)


def test_precision() -> None:
    """The mark of a pass, else the dtype of the result."""
    node = _last(lambda x: x.bfloat16().sin(), torch.rand(4))
    assert precision_of(node) == "bfloat16"
    node.meta["precision"] = "int8"
    assert precision_of(node) == "int8"
    assert converted_to(_last(lambda x: x.bfloat16().sin(), torch.rand(4))) is None
    assert precision_of(_last(lambda x: x.double().sort(), torch.rand(4)).args[0]) == "float64"


def _by_operator(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return quantized.dequantize_per_channel(q, scales, None, 0, -128, 127, torch.int8).t()


def _written_out(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (q.float() * scales[:, None]).t()


@pytest.mark.parametrize("dequantized", [_by_operator, _written_out])
def test_layers_with_dequantized_weights(dequantized: Callable[..., torch.Tensor]) -> None:
    """Products compute in int8 however the graph writes the weight, also where views lie between."""
    weights = torch.ones(6, 4, dtype=torch.int8), torch.rand(6)
    node = _last(lambda x, q, scales: torch.mm(x, dequantized(q, scales)), torch.rand(3, 4), *weights)
    assert converted_to(node) == precision_of(node) == "int8"
