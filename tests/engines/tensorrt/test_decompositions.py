"""Our part of lowering computes what the operators do, in operators that there are converters for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.engines.tensorrt.regions_for_tests import built, region
from torch_hybrid_backend.engines.tensorrt.decompositions import DECOMPOSITIONS, name_resizes

F = torch.nn.functional
aten = torch.ops.aten
BIG = torch.tensor([[1 << 40, -3, 5, 1 << 33, 7], [2, 3, -(1 << 50), 9, 1]])


def decomposed(function: Callable[..., Any], x: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, decomposition_table=dict(DECOMPOSITIONS))(x)


def targets(graph: torch.fx.GraphModule) -> set[object]:
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("x", [BIG, BIG > 2, BIG[:, :1], BIG.to(torch.int32)], ids=["int64", "bool", "one", "int32"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_running_sums_of_whole_numbers_are_exact(x: torch.Tensor, dim: int) -> None:
    """In 64 bits, along any dimension, in operators that move and add."""
    graph = decomposed(lambda x: x.cumsum(dim), x)
    assert torch.equal(graph(x), x.cumsum(dim))
    assert targets(graph) <= {aten._to_copy.default, aten.slice.Tensor, aten.add.Tensor, aten.cat.default}


def test_other_running_sums_stay_what_they_are() -> None:
    """Of floats, into another type, and of a tensor without dimensions."""
    for function, x in (
        (lambda x: x.cumsum(0), torch.ones(3)),
        (lambda x: x.cumsum(0, dtype=torch.int32), BIG),
        (lambda x: x.cumsum(0), torch.tensor(3)),
    ):
        assert aten.cumsum.default in targets(decomposed(function, x))


RESIZES = [("linear", (2, 3, 8)), ("bilinear", (2, 3, 8, 6)), ("bicubic", (2, 3, 8, 6)), ("trilinear", (1, 2, 4, 6, 4))]


def resized(x: torch.Tensor, mode: str, corners: bool, **how: Any) -> tuple[torch.fx.GraphModule, bool]:
    """The graph of a resizing, and whether it is called by the overload that converters know."""
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    operator = getattr(aten, f"upsample_{mode}{x.dim() - 2}d")
    (placeholder,) = graph.graph.find_nodes(op="placeholder")
    factors = how.get("factors", ())
    sizes = list(how["sizes"])
    with graph.graph.inserting_after(placeholder):
        call = graph.graph.call_function(operator.default, (placeholder, sizes, corners, *factors))
    placeholder.meta["val"], call.meta["val"] = x, operator.default(x, sizes, corners, *factors)
    graph.graph.output_node().args = (call,)
    name_resizes(graph)
    return graph, operator.vec in targets(graph)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize(("mode", "shape"), RESIZES)
def test_resizes_by_sizes_are_called_by_the_overload_that_converters_know(
    mode: str, shape: tuple[int, ...], corners: bool
) -> None:
    """With factors that say no more than the sizes, or without; the result is the same."""
    x = torch.rand(shape)
    sizes = [2 * n for n in shape[2:]]
    for factors in ((), [2.0] * len(sizes), [None] * len(sizes)):
        graph, is_renamed = resized(x, mode, corners, sizes=sizes, factors=factors)
        assert is_renamed
        operator = getattr(aten, f"upsample_{mode}{x.dim() - 2}d").default
        torch.testing.assert_close(graph(x), operator(x, sizes, corners, *factors), rtol=0, atol=0)


def test_resizes_by_other_factors_stay_what_they_are() -> None:
    """Eager reads at places that the factor tells, not the sizes."""
    _, is_renamed = resized(torch.rand(2, 3, 8, 8), "bilinear", False, sizes=[10, 10], factors=[1.3, 1.3])
    assert not is_renamed


@pytest.mark.tensorrt
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: (x != 1).cumsum(-1) * 2, BIG),
        (lambda x: x.cumsum(0) * 2, BIG),
        (lambda x: x[torch.arange(2).view(2, 1, 1), torch.arange(5).view(1, 5, 1)] * 2, BIG),
        (lambda x: x.index_select(1, torch.arange(3)) * 2, BIG),
        (lambda x: x.gather(1, torch.ones(2, 3, dtype=torch.int64)) * 2, BIG),
        (lambda x: F.interpolate(x, size=(9, 9), mode="bilinear") + 1, torch.ones(2, 3, 8, 8)),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True) + 1, torch.ones(2, 3, 8, 8)),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic") + 1, torch.ones(2, 3, 8, 8).half()),
        (lambda x: F.interpolate(x, scale_factor=2, mode="linear") + 1, torch.ones(2, 3, 8)),
        (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear") + 1, torch.ones(1, 2, 4, 4, 4)),
    ],
)
def test_they_are_taken_and_built(function: Callable[..., Any], x: torch.Tensor) -> None:
    """One region of all operators; a network that cuts whole numbers to 32 bits has no engine."""
    assert built(region(function, x)).layers


@pytest.mark.tensorrt
def test_a_resize_by_other_factors_is_left_to_others() -> None:
    """TensorRT would read elsewhere."""
    made = region(
        lambda x: (F.interpolate(x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=False), x + 1),
        torch.ones(2, 3, 8, 8),
    )
    assert not any("upsample" in name for name in made.node_names)
