"""This package's decompositions compute what the operators do, in operators that have converters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.engines.tensorrt.networks_for_tests import network_of
from tests.engines.tensorrt.regions_for_tests import built, region
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tensorrt.decompositions import DECOMPOSITIONS, use_vec_overloads
from torch_hybrid_backend.engines.tensorrt.fakes import Fakes
from torch_hybrid_backend.sizes.size import symbol

F = torch.nn.functional
aten = torch.ops.aten
EXACT = {
    aten._to_copy.default,
    aten.slice.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.expand.default,
    aten.cat.default,
}
BIG = torch.tensor([[1 << 40, -3, 5, 1 << 33, 7], [2, 3, -(1 << 50), 9, 1]])


def decomposed(function: Callable[..., Any], x: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, decomposition_table=dict(DECOMPOSITIONS))(x)


def targets(graph: torch.fx.GraphModule) -> set[object]:
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("x", [BIG, BIG > 2, BIG[:, :1], BIG.to(torch.int32)], ids=["int64", "bool", "one", "int32"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_running_sums_of_whole_numbers_are_exact(x: torch.Tensor, dim: int) -> None:
    """Sums in int64, along any dimension, by operators that move, add and subtract."""
    graph = decomposed(lambda x: x.cumsum(dim), x)
    assert torch.equal(graph(x), x.cumsum(dim))
    assert targets(graph) <= EXACT


@pytest.mark.parametrize("dim", [0, 1])
def test_running_sums_along_a_size_known_only_at_run_time(dim: int) -> None:
    """A single graph serves all lengths up to the upper bound of the size, with no more steps than that needs."""
    fakes = Fakes({"s": 5, "t": 5}, {"s": 64, "t": 64})
    given = fakes.tensor(TensorSpec((symbol("s"), symbol("t")), "int64", (symbol("t"), 1), CPU))
    graph = fakes.traced(lambda x: x.cumsum(dim), [given], DECOMPOSITIONS)
    assert not fakes.assumptions()
    assert targets(graph) <= EXACT | {aten.sym_size.int}
    assert len(graph.graph.find_nodes(op="call_function", target=aten.cat.default)) == 6
    for length in (1, 2, 3, 7, 8, 9, 33, 63, 64):
        x = torch.randint(-(1 << 55), 1 << 55, (length, length))
        assert torch.equal(graph(x), x.cumsum(dim))


COUNTS: list[Callable[[Any], torch.Tensor]] = [
    lambda n: torch.arange(0, n),
    lambda n: torch.arange(3, n + 3),
    lambda n: torch.arange(0, 2 * n, 2),
    lambda n: torch.arange(1, 3 * n, 3),
    lambda n: torch.arange(n, 0, -1),
    lambda n: torch.arange(n, dtype=torch.float32),
    lambda n: torch.arange(n, 3 * n, dtype=torch.int32),
]


@pytest.mark.parametrize("function", COUNTS)
def test_counted_numbers_are_of_64_bits(function: Callable[[Any], torch.Tensor]) -> None:
    """Every arange over a size is computed from arange(0, count)."""
    fakes = Fakes({"s": 5})
    given = fakes.tensor(TensorSpec((symbol("s"),), "float32", (1,), CPU))
    graph = fakes.traced(lambda x: function(x.shape[0]), [given], DECOMPOSITIONS)
    assert not fakes.assumptions()
    for node in graph.graph.find_nodes(op="call_function", target=aten.arange.start_step):
        assert (node.args[0], *node.args[2:]) in ((0,), (0, 1))
        assert node.meta["val"].dtype is torch.int64
    for length in (1, 2, 3, 7, 8):
        result, expected = graph(torch.ones(length)), function(length)
        assert result.dtype is expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_places_from_the_end_are_counted_from_the_beginning(dynamic: bool) -> None:
    """TensorRT defines no negative indices."""
    fakes = Fakes({"s": 5})
    size = symbol("s") if dynamic else 5
    graph = fakes.traced(
        lambda x: x.select(1, -2), [fakes.tensor(TensorSpec((3, size), "float32", (size, 1), CPU))], DECOMPOSITIONS
    )
    selected = graph.graph.find_nodes(op="call_function", target=aten.select.int)
    assert [node.args[2] for node in selected] == [0 if dynamic else 3]
    for length in (2, 5, 9) if dynamic else (5,):
        x = torch.rand(3, length)
        assert torch.equal(graph(x), x[:, -2])


def test_indices_below_0_are_counted_from_the_beginning() -> None:
    """Negative indices that only data tell, in each dimension by its own size. Masks are not changed."""
    fakes = Fakes({"s": 5})
    x = fakes.tensor(TensorSpec((symbol("s"), 3, 4), "float32", (12, 4, 1), CPU))
    i = fakes.tensor(TensorSpec((2,), "int64", (1,), CPU))
    graph = fakes.traced(lambda x, i: x[i, :, i], [x, i], DECOMPOSITIONS)
    (call,) = graph.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    for rows in (4, 5, 9):
        given, places = torch.rand(rows, 3, 4), torch.tensor([-1, 2])
        for index, size in ((call.args[1][0], rows), (call.args[1][2], 4)):
            graph.graph.output_node().args = (index,)
            graph.recompile()
            assert graph(given, places).tolist() == [size - 1, 2]
        graph.graph.output_node().args = (call,)
        graph.recompile()
        assert torch.equal(graph(given, places), given[places, :, places])
    masked = decomposed(lambda x: x[BIG > 2], BIG)
    assert targets(masked) <= {aten.index.Tensor, aten.gt.Scalar}


def test_kept_dimensions_are_added_and_not_expanded() -> None:
    """Dimensions are kept for sizes known only at run time too, as norms keep them."""
    fakes = Fakes({"s": 5})
    x = fakes.tensor(TensorSpec((symbol("s"), 4), "float32", (4, 1), CPU))

    def kept(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.prims.broadcast_in_dim(x.amax(1), [x.shape[0], 1], [0])

    graph = fakes.traced(kept, [x], DECOMPOSITIONS)
    assert targets(graph) == {aten.amax.default, aten.unsqueeze.default}
    given = torch.rand(3, 4)
    assert torch.equal(graph(given), given.amax(1, keepdim=True))
    wider = decomposed(lambda x: torch.ops.prims.broadcast_in_dim(x, [2, 3, 5], [2]), torch.rand(5))
    assert torch.equal(wider(given[0, :1].expand(5)), given[0, :1].expand(2, 3, 5))


def test_other_running_sums_stay_what_they_are() -> None:
    """cumsum of floats, into another dtype, and of a scalar tensor."""
    for function, x in (
        (lambda x: x.cumsum(0), torch.ones(3)),
        (lambda x: x.cumsum(0, dtype=torch.int32), BIG),
        (lambda x: x.cumsum(0), torch.tensor(3)),
    ):
        assert aten.cumsum.default in targets(decomposed(function, x))


RESIZES = [("linear", (2, 3, 8)), ("bilinear", (2, 3, 8, 6)), ("bicubic", (2, 3, 8, 6)), ("trilinear", (1, 2, 4, 6, 4))]


def resized(x: torch.Tensor, mode: str, corners: bool, **how: Any) -> tuple[torch.fx.GraphModule, bool]:
    """The graph of a resize operator, and true if the operator was replaced by its .vec overload."""
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    operator = getattr(aten, f"upsample_{mode}{x.dim() - 2}d")
    (placeholder,) = graph.graph.find_nodes(op="placeholder")
    factors = how.get("factors", ())
    sizes = list(how["sizes"])
    with graph.graph.inserting_after(placeholder):
        call = graph.graph.call_function(operator.default, (placeholder, sizes, corners, *factors))
    placeholder.meta["val"], call.meta["val"] = x, operator.default(x, sizes, corners, *factors)
    graph.graph.output_node().args = (call,)
    use_vec_overloads(graph)
    return graph, operator.vec in targets(graph)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize(("mode", "shape"), RESIZES)
def test_resizes_by_sizes_are_called_by_the_overload_that_converters_know(
    mode: str, shape: tuple[int, ...], corners: bool
) -> None:
    """With factors that equal the ratios of sizes, or without factors; the result is the same."""
    x = torch.rand(shape)
    sizes = [2 * n for n in shape[2:]]
    for factors in ((), [2.0] * len(sizes), [None] * len(sizes)):
        graph, is_renamed = resized(x, mode, corners, sizes=sizes, factors=factors)
        assert is_renamed
        operator = getattr(aten, f"upsample_{mode}{x.dim() - 2}d").default
        torch.testing.assert_close(graph(x), operator(x, sizes, corners, *factors), rtol=0, atol=0)


def test_resizes_by_other_factors_stay_what_they_are() -> None:
    """Eager interpolates by the factor, not by the sizes."""
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
    """All operators are in one region; a network that cuts int64 to int32 has no engine."""
    assert built(region(function, x)).layers


@pytest.mark.tensorrt
def test_a_resize_by_other_factors_is_left_to_others() -> None:
    """TensorRT would read at other positions."""
    made = region(
        lambda x: (F.interpolate(x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=False), x + 1),
        torch.ones(2, 3, 8, 8),
    )
    assert not any("upsample" in name for name in made.node_names)


X = torch.ones(5, 7)


@pytest.mark.tensorrt
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x.cumsum(1) * 2, BIG),
        (lambda x: (x > 0).cumsum(0) * 2, BIG),
        (lambda x: torch.arange(x.shape[1]) + x, BIG),
        (lambda x: torch.arange(x.shape[1], dtype=torch.float32) + x, X),
        (lambda x: x[:, -1] + 1, X),
        (lambda x: x[:, torch.tensor([-1, 0])] + 1, X),
        (lambda x: x[torch.tensor([0, -1]), torch.tensor([-1, 0])] + 1, X),
        (lambda x: x.gather(-1, torch.zeros(1, 1, dtype=torch.int64)) + x.gather(0, (x[:1] > 9).long()), X),
        (lambda x: x.half(), X),
        (lambda x: x.clone(), X),
    ],
)
def test_networks_of_any_length_compute_what_the_graph_does(function: Callable[..., Any], x: torch.Tensor) -> None:
    """Networks compute what the graph computes, compared layer by layer with eager, at lengths from 1 on."""
    network = network_of(region(function, x, dynamic=True))
    first, second = network.request.ranges
    for rows, columns in ((1, 1), (1, 8), (2, 2), (3, 4), (5, 7), (9, 2), (13, 16)):
        network.check({first: rows, second: columns}, below=1 << 55)
