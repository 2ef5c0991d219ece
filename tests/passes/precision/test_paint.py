"""Operators that compute in half precision: each rule on a graph small enough to read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.passes.precision.paint import paint

aten = torch.ops.aten
_X, _W = torch.randn(6, 6), torch.randn(6, 6)


def _painted(
    function: Callable[..., object],
    *inputs: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    denied: tuple[str, ...] = (),
    fixed: tuple[str, ...] = (),
) -> list[str]:
    """Names of the operators that are painted, in order."""
    gm = trace(function, *(inputs or (_X, _W)))
    nodes = gm.graph.nodes

    def is_free(node: torch.fx.Node) -> bool:
        return node.op == "call_function" and node.name not in fixed

    found = paint(gm.graph, dtype, is_free, {node for node in nodes if node.name in denied})
    return [node.name for node in nodes if node in found]


def _residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w) + x).relu() @ w


@pytest.mark.parametrize(
    ("function", "painted"),
    [
        (_residual, ["mm", "add", "relu", "mm_1"]),  # between two products
        (lambda x, w: (x + 1) @ w, ["mm"]),  # what infers is not in front of the first ...
        (lambda x, w: (x @ w) + 1, ["mm"]),  # ... nor behind the last
        (lambda x, w: x + w, []),  # without a product nothing gains
        (lambda x, w: x.relu() @ w, ["relu", "mm"]),  # what is clear joins a product on either side
        (lambda x, w: (x @ w).relu(), ["mm", "relu"]),
        (lambda x, w: x[:2] @ w, ["mm"]),  # but where the cast is of less behind it
        (lambda x, w: (x @ w)[:2], ["mm", "slice_1"]),
        (lambda x, w: [f(x.relu()) for f in [lambda y: (y @ w, y.sin())]], ["mm"]),  # nor where others read it
        (lambda x, w: (x @ w).mean(0, keepdim=True) @ w, ["mm", "mean", "mm_1"]),
        (lambda x, w: torch.softmax(x @ w, -1) @ w, ["mm", "_softmax", "mm_1"]),
    ],
)
def test_colours(function: Callable[..., object], painted: list[str]) -> None:
    """ALLOW operators, what lies between them, and CLEAR ones next to them."""
    assert _painted(function) == painted


@pytest.mark.parametrize(
    ("function", "painted"),
    [
        # exp, and what infers behind it up to the next product
        (lambda x, w: ((x @ w).exp() + 1) @ w, ["mm", "mm_1"]),
        # also through what is clear, where that leads to what infers; what only feeds the product is painted
        (lambda x, w: ((x @ w).exp().relu() + 1) @ w, ["mm", "mm_1"]),
        (lambda x, w: (x @ w).exp().relu() @ w, ["mm", "relu", "mm_1"]),
        # a branch beside it is not behind it
        (lambda x, w: ((x @ w) * 2 @ w) + (x @ w).exp(), ["mm", "mul", "mm_1", "mm_2"]),
    ],
)
def test_denied(function: Callable[..., object], painted: list[str]) -> None:
    """DENY operators are not painted, nor what their errors would grow in."""
    assert _painted(function) == painted


def test_float16_has_less_range() -> None:
    """Powers, a square written as a product among them, and sums compute in float32, as their results leave float16's range."""

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return y * torch.rsqrt((y * y).mean(-1, keepdim=True)) @ w

    assert _painted(norm) == ["mm", "mul", "mean", "rsqrt", "mul_1", "mm_1"]
    assert _painted(norm, dtype=torch.float16) == ["mm", "mm_1"]


def test_a_layer_that_is_denied_takes_what_infers_behind_it_along() -> None:
    """A layer that returned to float32 for its accuracy keeps it up to the next one; what only fed it is as written too."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (((x @ w) + 1) @ w + 2) @ w

    assert _painted(function) == ["mm", "add", "mm_1", "add_1", "mm_2"]
    assert _painted(function, denied=("mm_1",)) == ["mm", "mm_2"]
    assert _painted(function, denied=("mm", "mm_1", "mm_2")) == []


def test_what_is_not_free_is_not_painted_nor_joins() -> None:
    """An operator that cannot be converted parts what is around it."""
    assert _painted(_residual, fixed=("add",)) == ["mm", "relu", "mm_1"]
    assert _painted(_residual, fixed=("mm",)) == ["relu", "mm_1"]


def test_items_go_with_their_operator() -> None:
    """An operator that picks one of several results has the colour of what makes them."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first, second = (x @ w).split(3, 1)
        return (first * second) @ w[:3]

    assert _painted(function) == ["mm", "split", "getitem", "getitem_1", "mul", "mm_1"]
    top = _painted(lambda x, w: x.topk(6)[0] @ w)
    assert top == ["mm"]


def test_masks_are_no_way_to_attention() -> None:
    """Attention reads its mask as it is: what makes it is not converted, for -3e38 is infinite in bfloat16."""
    q, mask = torch.randn(1, 2, 6, 6), torch.ones(6, 6, dtype=torch.bool)

    def function(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=additive)[0]

    painted = _painted(function, q, mask)
    assert "where" not in painted
    assert "_scaled_dot_product_flash_attention_for_cpu" in painted
