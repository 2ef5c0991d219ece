"""Forms of quantized values in a graph: each that is recognized, and values that only look alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.ao.quantization.fx import _decomposed  # noqa: F401  # registers the operators

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.graph.quantized import (
    computes_with_dequantized,
    depths_of,
    is_codebook_weight,
    is_dequantize_operator,
    is_dequantized,
    is_quantize_operator,
    is_quantized,
    is_widened_scale,
    keeps_nothing,
    operator_name,
)
from torch_hybrid_backend.graph.values import output_nodes

aten, quantized = torch.ops.aten, torch.ops.quantized_decomposed
Function = Callable[..., torch.Tensor]

BYTES, INTS = torch.randint(-128, 128, (8, 6), dtype=torch.int8), torch.randint(-9, 9, (8, 6), dtype=torch.int32)
FLOATS, X, SCALES = torch.rand(8, 6), torch.rand(4, 8), torch.rand(6)
TABLE, INDICES = torch.rand(16), torch.randint(0, 16, (48,), dtype=torch.uint8)
BOUNDS = (-128, 127, torch.int8)


def nodes_of(function: Function, *inputs: torch.Tensor) -> list[torch.fx.Node]:
    return [node for node in trace(function, *inputs).graph.nodes if node.op == "call_function"]


def last_of(function: Function, *inputs: torch.Tensor) -> torch.fx.Node:
    (node,) = output_nodes(trace(function, *inputs))
    return node


def by_tensor(q: torch.Tensor) -> torch.Tensor:
    return quantized.dequantize_per_tensor(q, 0.5, 0, *BOUNDS)


def by_channel(q: torch.Tensor) -> torch.Tensor:
    return quantized.dequantize_per_channel(q, SCALES, None, 1, *BOUNDS)


def by_group(q: torch.Tensor) -> torch.Tensor:
    return quantized.dequantize_per_channel_group(q, torch.rand(8, 2), None, *BOUNDS, 3, torch.float32)


def by_token(q: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(8, 1, dtype=torch.int64)
    return quantized.dequantize_per_token(q, torch.rand(8, 1), zeros, *BOUNDS, torch.float32)


@pytest.mark.parametrize("function", [by_tensor, by_channel, by_group, by_token])
def test_operators_that_dequantize(function: Function) -> None:
    """Operators of torch.ao are recognized by their names."""
    node = last_of(function, BYTES)
    assert is_dequantized(node)
    assert is_dequantize_operator(node)
    assert not is_quantize_operator(node)
    assert not is_quantized(node)


def test_names_of_operators() -> None:
    """The overload is part of the name where there are several; other operators have none."""
    by_literal = last_of(lambda x: quantized.quantize_per_tensor(x, 0.5, 0, *BOUNDS), FLOATS)
    by_value = last_of(lambda x: quantized.quantize_per_tensor(x, x.max(), torch.tensor(0), *BOUNDS), FLOATS)
    assert (operator_name(by_literal), operator_name(by_value)) == ("quantize_per_tensor", "quantize_per_tensor.tensor")
    assert is_quantize_operator(by_literal)
    assert is_quantized(by_value)
    assert not is_dequantized(by_literal)
    assert operator_name(last_of(torch.sin, FLOATS)) is None


@pytest.mark.parametrize(
    ("function", "q", "expected"),
    [
        (lambda q: q.float(), BYTES, True),
        (lambda q: q.float(), BYTES.view(torch.uint8), True),
        (lambda q: torch.ops.prims.convert_element_type(q, torch.bfloat16), BYTES, True),
        (lambda q: q.to(torch.int32) - 3, BYTES, True),  # computed with: a zero point is taken off
        (lambda q: q.to(torch.int32).float(), BYTES, True),
        (lambda q: aten._int_mm(q.to(torch.int32).to(torch.int8), BYTES.t()), BYTES, True),
        (lambda q: q.to(torch.int32) > 0, BYTES, False),  # nobody computes with it
        (lambda q: q.to(torch.int64), BYTES, False),
        (lambda q: q.bool(), BYTES, False),
        (lambda q: q.view(torch.uint8).to(torch.int8), BYTES, False),
        (lambda q: q.float(), INTS, False),
        (lambda q: q.double(), FLOATS, False),
    ],
)
def test_casts_of_bytes(function: Function, q: torch.Tensor, expected: bool) -> None:
    """Integers of 8 bits are dequantized by a cast to floats, and by one to wider integers if graphs compute with the result."""
    cast = next(
        node for node in nodes_of(function, q) if "to_copy" in str(node.target) or "convert" in str(node.target)
    )
    assert is_dequantized(cast) == expected


def weight(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, indices.int()).view(8, 6)


@pytest.mark.parametrize(
    ("function", "indices", "depth"),
    [
        (lambda x, table, q: x @ weight(table, q), INDICES, 8),
        (lambda x, table, q: x @ weight(table, q.long()), INDICES.view(torch.int8), 8),
        (lambda x, table, q: torch.addmm(SCALES, x, weight(table, q)), INDICES, 8),
        (lambda x, table, q: aten.linear(x[:, :6], weight(table, q)), INDICES, 6),
        (lambda x, table, q: x @ weight(table, q), INDICES.long(), None),
        (lambda x, table, q: x @ (weight(table, q) * 2), INDICES, None),
        (lambda x, table, q: weight(table, q) @ x[:, :6].t(), INDICES, None),  # rows, not a weight
        (lambda x, table, q: weight(table, q), INDICES, None),
        (lambda x, table, q: x[None] @ weight(table, q)[None], INDICES, None),
        (
            lambda x, table, q: x @ table.view(8, 2).index_select(1, q[:6].int()),
            INDICES & 1,
            None,
        ),  # no table of numbers
    ],
)
def test_weights_from_a_codebook(function: Function, indices: torch.Tensor, depth: int | None) -> None:
    """Look-ups are recognized where products, and nothing else, read them as weights; an engine says which are kept packed."""
    nodes = nodes_of(function, X, TABLE, indices)
    (node,) = (node for node in nodes if node.target is aten.index_select.default)
    assert is_codebook_weight(node) == (depth is not None)
    assert not is_dequantized(node, keeps_nothing)
    casts = [each for each in nodes if each.target is aten._to_copy.default][:1]
    for kept in (node, *casts):  # the indices are not made ahead either, in 32 bits where kernels read 8
        assert is_dequantized(kept, lambda weights: True) == (depth is not None)
    if depth is not None:
        assert depths_of(node) == [depth]


def conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return aten.convolution(x.view(1, 4, 8, 1), w.reshape(12, 4, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, q: x @ by_channel(q), True),
        (lambda x, q: x @ by_tensor(q.view(6, 8)).t(), True),
        (lambda x, q: by_channel(q).relu(), True),
        (lambda x, q: x @ q.float(), True),
        (lambda x, q: x @ (q.float() * SCALES), True),
        (lambda x, q: x @ (SCALES * (q.float() - 3)), True),
        (lambda x, q: x @ ((q.to(torch.int32) - 3).float() * SCALES), True),
        (lambda x, q: x @ ((q.float().view(4, 2, 6) * torch.rand(4, 1, 6)).view(8, 6)), True),  # groups
        (lambda x, q: x.bfloat16() @ (q.float() * SCALES).bfloat16(), True),
        (lambda x, q: x[:, :6] @ (q.float() * 0.5).t(), True),
        (lambda x, q: aten.linear(x[:, :6], (q.float() * 0.5)), True),
        (lambda x, q: torch.addmm(SCALES, x, q.float() * SCALES), True),
        (lambda x, q: torch.bmm(x[None], (q.float() * SCALES)[None]), True),
        (lambda x, q: conv(x, q.float() * SCALES), True),
        (lambda x, q: x @ (q.float() * FLOATS), False),  # a mask of a weight
        (lambda x, q: x @ (FLOATS - q.float()), False),
        (lambda x, q: x @ (q.float() + 1), False),
        (lambda x, q: q.float() @ x[:, :6].t(), False),  # rows, say an image
        (lambda x, q: q.float() * 0.5, False),
        (lambda x, q: x @ FLOATS, False),
        (lambda x, q: x @ weight(TABLE, INDICES), False),  # a product of floats
    ],
)
def test_operators_that_compute_with_quantized_values(function: Function, expected: bool) -> None:
    """Operators that read those that dequantize, and layers whose weight is written out as integers, zero point and scale."""
    assert computes_with_dequantized(last_of(function, X, BYTES)) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: quantized.quantize_per_tensor(x, 0.5, 0, *BOUNDS), True),
        (lambda x: (x * 2).round().clamp(-128, 127).to(torch.int8), True),
        (lambda x: ((x * 2).round() + 3).to(torch.uint8), True),
        (lambda x: quantized.quantize_per_tensor(x, 0.5, 0, *BOUNDS).view(6, 8).t().clone(), True),
        (lambda x: torch.cat([quantized.quantize_per_tensor(x, 0.5, 0, *BOUNDS)] * 2).relu(), True),
        (lambda x: (x * 2).to(torch.int8), False),
        (lambda x: x > 0, False),
        (lambda x: quantized.quantize_per_tensor(x, 0.5, 0, *BOUNDS).abs(), False),
    ],
)
def test_integers_that_floats_were_quantized_to(function: Function, expected: bool) -> None:
    """Integers are rounded, by an operator or written out, and at most moved or chosen among since."""
    assert is_quantized(last_of(function, FLOATS)) == expected


def test_scales_that_are_widened_where_they_are_read() -> None:
    """Scales in a half type that operators which dequantize read, and nobody else."""

    def weights(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return quantized.dequantize_per_channel(q, scales.float(), None, 1, *BOUNDS)

    def cast(function: Function, scales: torch.Tensor) -> torch.fx.Node:
        return next(node for node in nodes_of(function, BYTES, scales) if node.target is aten._to_copy.default)

    assert is_widened_scale(cast(weights, SCALES.bfloat16()))
    assert is_widened_scale(cast(weights, SCALES.half()))
    assert not is_widened_scale(cast(weights, SCALES.double()))
    assert not is_widened_scale(cast(lambda q, s: q.float() * s.float(), SCALES.bfloat16()))
