"""Views against eager; the interpreter also checks that every claimed inverse is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from loops.check import EVERYTHING, check, sample
from loops.interpret import trace
from torch_hybrid_backend.loops.ir import Buffer, domain_vars
from torch_hybrid_backend.loops.lowering import Context, lower_node, supports

aten = torch.ops.aten

# name -> (shape, function)
CASES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], object]]] = {
    "view merges": ((2, 3, 4), lambda x: x.view(6, 4)),
    "view splits": ((6, 4), lambda x: x.view(2, 3, 2, -1)),
    "view regroups": ((4, 6), lambda x: x.view(3, 8)),
    "view to no dimensions": ((1, 1), lambda x: x.view(())),
    "view from no dimensions": ((), lambda x: x.view(1, 1)),
    "view with ones": ((1, 5, 1), lambda x: x.view(5, 1, 1, 1)),
    "unsafe view": ((2, 6), lambda x: aten._unsafe_view.default(x, [3, 4])),
    "reshape": ((2, 6), lambda x: aten.reshape.default(x, [3, 4])),
    "permute": ((2, 3, 4), lambda x: x.permute(2, 0, -2)),
    "transpose": ((2, 3, 4), lambda x: aten.transpose.int(x, -1, 0)),
    "transpose of a scalar": ((), lambda x: aten.transpose.int(x, 0, -1)),
    "t": ((2, 3), aten.t.default),
    "t of a vector": ((3,), aten.t.default),
    "squeeze": ((1, 3, 1), aten.squeeze.default),
    "squeeze dim": ((1, 3, 1), lambda x: aten.squeeze.dim(x, -1)),
    "squeeze dim that stays": ((1, 3, 1), lambda x: aten.squeeze.dim(x, 1)),
    "squeeze dims": ((1, 3, 1), lambda x: aten.squeeze.dims(x, [0, 2])),
    "unsqueeze": ((3, 4), lambda x: x.unsqueeze(-2)),
    "expand": ((3, 1), lambda x: x.expand(2, 3, 4)),
    "expand -1": ((3, 1), lambda x: x.expand(-1, 5)),
    "expand by ones": ((3, 4), lambda x: x.expand(1, 1, 3, 4)),
    "slice": ((5, 7), lambda x: aten.slice.Tensor(x, 1, 1, 6, 2)),
    "slice negative": ((5, 7), lambda x: aten.slice.Tensor(x, -1, -4, -1)),
    "slice beyond": ((5, 7), lambda x: aten.slice.Tensor(x, 0, 2, 9223372036854775807)),
    "select": ((3, 4, 5), lambda x: x.select(1, 2)),
    "select negative": ((3, 4, 5), lambda x: x.select(-1, -2)),
    "split": ((7, 3), lambda x: aten.split.Tensor(x, 3)),
    "split with sizes": ((3, 7), lambda x: aten.split_with_sizes.default(x, [1, 4, 2], -1)),
    "unbind": ((2, 3, 2), lambda x: aten.unbind.int(x, 1)),
    "flip": ((3, 4), lambda x: x.flip(0, -1)),
    "roll": ((3, 5), lambda x: aten.roll.default(x, [1, -7], [0, 1])),
    "roll flat": ((3, 5), lambda x: aten.roll.default(x, [4])),
    "roll twice": ((6,), lambda x: aten.roll.default(x, [1, 2], [0, 0])),
    "repeat": ((2, 3), lambda x: x.repeat(2, 1, 3)),
    "diagonal": ((4, 5), lambda x: aten.diagonal.default(x, 1)),
    "diagonal below": ((2, 5, 4), lambda x: aten.diagonal.default(x, -1, 2, 1)),
    "unfold": ((2, 9), lambda x: aten.unfold.default(x, 1, 3, 2)),
    "pixel shuffle": ((2, 8, 3, 2), lambda x: aten.pixel_shuffle.default(x, 2)),
    "pixel unshuffle": ((2, 2, 6, 4), lambda x: aten.pixel_unshuffle.default(x, 2)),
    "clone": ((2, 3), lambda x: x.clone()),
    "detach": ((2, 3), aten.detach.default),
    "alias": ((2, 3), aten.alias.default),
    "identity as_strided": ((2, 3), lambda x: aten.as_strided.default(x, [2, 3], [3, 1])),
    "as_strided": ((4, 3), lambda x: aten.as_strided.default(x, [2, 2], [3, 2], 1)),
    "as_strided of a transposed": ((4, 3), lambda x: aten.as_strided.default(x.t(), [3, 2, 1], [1, 6, 1])),
}


@pytest.mark.parametrize("name", CASES)
def test_views(name: str) -> None:
    """Each element lies where eager puts it."""
    shape, fn = CASES[name]
    check(fn, sample(*shape))


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_views_of_every_dtype(dtype: torch.dtype) -> None:
    """Views keep the dtype."""
    check(lambda x: x.permute(1, 0).reshape(2, 6).flip(1)[:, 1:], sample(4, 3, dtype=dtype))


@pytest.mark.parametrize(
    "name",
    ["view splits", "view regroups", "permute", "t", "squeeze", "unsqueeze", "expand by ones", "flip", "pixel shuffle"],
)
def test_bijections_have_inverses(name: str) -> None:
    """Views that lose nothing stay usable as epilogues: going there and back is the identity, as the index algebra sees it."""
    shape, fn = CASES[name]
    graph = trace(fn, [sample(*shape)]).graph
    buffer = Buffer(shape, "float32")
    values: dict[torch.fx.Node, object] = {}
    value: object = None
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = buffer
        elif node.op == "call_function":
            value = values[node] = lower_node(Context(lambda op: None), node, values)
    index = domain_vars(shape)
    load = value.at(value.inverse[buffer](index))
    assert load.index == index


@pytest.mark.parametrize(("strides", "size", "stride"), [((4, 1), [2, 2], [1, 1]), ((3, 1), [9], [2])])
def test_as_strided_of_gaps_is_refused(strides: tuple[int, ...], size: list[int], stride: list[int]) -> None:
    """Memory between or behind a tensor's elements is nothing its value knows."""
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    node = graph.call_function(aten.as_strided.default, (source, size, stride))
    source.meta["val"] = torch.empty_strided((4, 3), strides)
    node.meta["val"] = torch.empty(size)
    assert not supports(node)


@pytest.mark.parametrize(
    ("view", "is_taken"),
    [
        (
            lambda x: x.as_strided([x.shape[1], 1, x.shape[0]], [1, 7, x.shape[1]]),
            True,
        ),  # transposed, and a dimension more
        (lambda x: x.as_strided(x.shape, [x.shape[1], 1]), True),
        (lambda x: x.as_strided([x.shape[0]], [x.shape[1]]), False),
        (lambda x: x.as_strided([x.shape[1], x.shape[0]], [x.shape[0], 1]), False),
    ],
)
def test_as_strided_of_any_size(view: Callable[[torch.Tensor], torch.Tensor], is_taken: bool) -> None:
    """A view of the input's own dimensions is taken where sizes are known only at run time, and no other."""
    graph = make_fx(view, tracing_mode="symbolic")(torch.empty(5, 3)).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert bool(supports(node)) == is_taken
