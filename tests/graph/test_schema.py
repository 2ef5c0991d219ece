"""Effects of operators beside computing a value, read off their schemas; and what no schema tells."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed
from torch.fx import Graph, Node

from torch_hybrid_backend.graph.schema import (
    draws,
    draws_numbers,
    has_effects,
    is_collective,
    is_in_flight,
    is_mutating,
    is_pure,
    is_view,
    only_draws,
    shared_arguments,
    written_arguments,
)

aten = torch.ops.aten

if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

c10d = torch.ops._c10d_functional


def _operators(*namespaces: str) -> list[torch._ops.OpOverload]:
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return [
        getattr(getattr(torch.ops, namespace), name).default for namespace, name in names if namespace in namespaces
    ]


def _call(graph: Graph, target: object, *args: object, **kwargs: object) -> Node:
    return graph.call_function(target, args, kwargs)  # type: ignore[arg-type]


@pytest.fixture
def x() -> Node:
    return Graph().placeholder("x")


@pytest.mark.parametrize(
    "target", _operators("_c10d_functional", "_c10d_functional_autograd", "c10d_functional"), ids=str
)
def test_every_collective_is_an_effect(target: torch._ops.OpOverload, x: Node) -> None:
    """Whatever torch registers as a functional collective keeps its place, and is neither merged, moved nor dropped."""
    node = _call(x.graph, target, x)
    assert is_collective(node)
    assert has_effects(node)
    assert not is_pure(node)
    assert not is_view(node)


def test_collectives_of_other_libraries_are_effects(x: Node) -> None:
    """An operator that is given a process group works with other processes, whoever wrote it. It is done when it returns."""
    with torch.library._scoped_library("hybrid_test_schema", "DEF") as library:
        library.define("sum_of_ranks(Tensor x, str group_name) -> Tensor")
        node = _call(x.graph, torch.ops.hybrid_test_schema.sum_of_ranks.default, x, "0")
        assert is_collective(node)
        assert not is_pure(node)
        assert not is_in_flight(node)


def test_collectives_inside_higher_order_operators(x: Node) -> None:
    """`auto_functionalized` calls the operator it is given: a collective there is one, and what it returns is not complete."""
    functionalized = torch.ops.higher_order.auto_functionalized_v2
    node = _call(
        x.graph, functionalized, c10d.all_gather_into_tensor_out.default, input=x, group_size=2, group_name="0"
    )
    assert is_collective(node)
    assert is_in_flight(node)
    assert not is_collective(_call(x.graph, functionalized, aten.add_.Tensor, x, x))


@pytest.mark.parametrize(
    "target", [aten.view.default, aten._unsafe_view.default, aten.split.Tensor, aten.detach.default]
)
def test_views(target: torch._ops.OpOverload, x: Node) -> None:
    """A view shares its argument's memory: by its schema, and `_unsafe_view` though its schema hides it."""
    node = _call(x.graph, target, x, [4])
    assert is_view(node)
    assert shared_arguments(node) == [x]
    assert is_pure(node)


@pytest.mark.parametrize("target", [aten.add.Tensor, aten.add_.Tensor, aten.copy_.default, aten.clone.default])
def test_what_is_no_view(target: torch._ops.OpOverload, x: Node) -> None:
    """An operator that computes or writes is no view, though it may return an argument's memory."""
    assert not is_view(_call(x.graph, target, x, x))


def test_writes(x: Node) -> None:
    """An in-place operator writes to its argument and returns it; it mutates."""
    node = _call(x.graph, aten.add_.Tensor, x, 1)
    assert (written_arguments(node), shared_arguments(node)) == ([x], [x])
    assert is_mutating(node)
    assert has_effects(node)


def test_an_argument_by_name(x: Node) -> None:
    """`out=` is written to and returned."""
    node = _call(x.graph, aten.add.out, x, 1, out=x)
    assert (written_arguments(node), shared_arguments(node)) == ([x], [x])


def test_a_wait_completes_its_argument(x: Node) -> None:
    """Waiting orders what reads the memory, but changes no value that may be read before: the graph's expressions stay true."""
    started = _call(x.graph, c10d.all_reduce.default, x, "sum", "0")
    wait = _call(x.graph, c10d.wait_tensor.default, started)
    assert (written_arguments(wait), shared_arguments(wait)) == ([started], [started])
    assert not is_mutating(wait)


def test_a_receive_writes_to_its_argument(x: Node) -> None:
    """`irecv` and its like fill the tensors that they are given, which their schemas hide."""
    assert is_mutating(_call(x.graph, c10d.irecv.default, x, 0, 0, "0"))


def test_in_flight(x: Node) -> None:
    """The results of a collective, its members and views of it are in flight until the wait."""
    reduced = _call(x.graph, c10d.all_reduce.default, x, "sum", "0")
    view = _call(x.graph, aten.view.default, reduced, [-1])
    several = _call(x.graph, c10d.all_reduce_coalesced.default, [x, x], "sum", "0")
    member = _call(x.graph, operator.getitem, several, 1)
    assert all(map(is_in_flight, (reduced, view, several, member)))
    wait = _call(x.graph, c10d.wait_tensor.default, view)
    after = _call(x.graph, aten.view.default, wait, [2, 2])
    copy = _call(x.graph, aten.clone.default, after)
    assert not any(map(is_in_flight, (x, wait, after, copy)))


@pytest.mark.parametrize(("dropout", "train", "effects"), [(0.0, True, False), (0.5, False, False), (0.5, True, True)])
def test_recurrent_layers_are_random_by_their_dropout_alone(
    dropout: float, train: bool, effects: bool, x: Node
) -> None:
    """Recurrent layers without dropout, or in evaluation, are functions of their inputs."""
    node = _call(x.graph, aten.gru.input, x, x, [x], True, 2, dropout, train, False, False)
    assert (has_effects(node), draws(node)) == (effects, effects)


@pytest.mark.parametrize(("dropout", "effects"), [((), False), ((0.0,), False), ((0.5,), True)])
def test_attention_is_random_by_its_dropout_alone(dropout: tuple[float, ...], effects: bool, x: Node) -> None:
    """Attention without dropout is a function of its inputs."""
    node = _call(x.graph, aten._scaled_dot_product_flash_attention_for_cpu.default, x, x, x, *dropout)
    assert has_effects(node) is effects
    assert is_pure(node) is not effects


@pytest.mark.parametrize("target", [aten.bernoulli.default, aten._assert_async.msg, aten.copy_.default])
def test_effects(target: torch._ops.OpOverload, x: Node) -> None:
    """Random numbers, assertions and writes are effects."""
    assert has_effects(_call(x.graph, target, x))


def test_an_effect_that_a_program_declares(x: Node) -> None:
    """An effect that `torch.fx.node.has_side_effect` was told of is an effect."""
    with torch.library._scoped_library("hybrid_test_declared", "DEF") as library:
        library.define("log(Tensor x) -> Tensor")
        target = torch.ops.hybrid_test_declared.log.default
        assert not has_effects(_call(x.graph, target, x))
        torch.fx.node.has_side_effect(target)
        assert has_effects(_call(x.graph, target, x))


def test_arithmetic_on_sizes_is_pure(x: Node) -> None:
    """Python's functions of sizes have no effects; a Python function that makes something else may have any."""
    size = _call(x.graph, operator.mul, 2, 3)
    size.meta["val"] = 6
    assert is_pure(size)
    assert has_effects(_call(x.graph, print, x))


def test_what_only_draws_random_numbers(x: Node) -> None:
    """Not what writes to an argument too, nor what draws nothing; a graph draws where one of its operators does."""
    assert only_draws(_call(x.graph, aten.rand_like.default, x))
    assert only_draws(_call(x.graph, aten.native_dropout.default, x, 0.5, True))
    assert draws_numbers(torch.fx.GraphModule({}, x.graph))
    graph = Graph()
    y = graph.placeholder("y")
    for target in (aten.bernoulli_.float, aten.sin.default, operator.neg, torch.ops.higher_order.cond):
        assert not only_draws(_call(graph, target, y))
    attention = _call(graph, aten._scaled_dot_product_flash_attention.default, y, y, y)
    assert only_draws(attention)
    assert not has_effects(attention)
    assert not draws(attention)
    assert not draws_numbers(torch.fx.GraphModule({}, graph))
