"""Nodes that rewriting inserts and replaces: their metadata is true, and no replacement is one that a user could notice."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.partition.engines_for_tests import trace
from tests.passes.values import verify_values
from torch_hybrid_backend.passes.rewrite import (
    follows_from_inputs,
    insert,
    may_replace,
    replace,
    replace_by_new,
    same_dim,
    same_spec,
    size_argument,
)
from torch_hybrid_backend.passes.verify import Contract, verify

aten = torch.ops.aten


def _operators(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def test_inserted_operators_know_what_they_yield() -> None:
    """Dtype, shape and strides are the operator's own; the source line is that of what they stand for, no other metadata is."""
    gm = trace(lambda x: (x.t() + 1).sin(), torch.ones(3, 2))
    transposed, added, sine = _operators(gm)
    for node in (transposed, added, sine):
        node.meta |= {"stack_trace": f"line of {node.name}", "other": 1}
    first = insert(sine, aten.cat.default, [added, transposed], 1)
    second = insert(sine, aten.mean.dim, first, [0], keepdim=True, origin=added)
    assert [node.name for node in (first, second, sine)] == [node.name for node in list(gm.graph.nodes)[3:6]]
    assert (first.meta["stack_trace"], second.meta["stack_trace"]) == ("line of sin", "line of add")
    assert "other" not in first.meta
    x = torch.randn(3, 2)
    expected = torch.cat([x.t() + 1, x.t()], 1)
    assert same_spec(first.meta["val"], expected)
    assert same_spec(second.meta["val"], expected.mean(0, keepdim=True))
    verify_values(gm)


def test_sizes_are_compared_without_a_guard() -> None:
    """Symbols are equal to themselves, in other forms too; whether two of them are is not asked of the example inputs."""
    gm = make_fx(lambda x, y: (x, y), tracing_mode="symbolic")(torch.ones(4, 6), torch.ones(4, 7))
    x, y = (node.meta["val"] for node in gm.graph.find_nodes(op="placeholder"))
    environment = x.shape[0].node.shape_env
    guards = len(environment.guards)
    assert same_dim(x.shape[0], x.shape[0])
    assert same_dim(x.shape[1] + 1, 1 + x.shape[1])
    assert not same_dim(x.shape[1] + 1, y.shape[1])
    assert not same_dim(x.shape[1], 6)
    assert same_dim(6, 6)
    assert not same_dim(6, 7)
    assert len(environment.guards) == guards


BASE = torch.empty_strided((4, 6), (6, 1), device="meta")


@pytest.mark.parametrize(
    "other",
    [
        BASE.double(),
        BASE[:3],
        BASE[None],
        torch.empty_strided((4, 6), (1, 4), device="meta"),
        torch.empty(4, 6),
        torch.empty(4, 6).to_sparse(),
        4,
        None,
    ],
    ids=["dtype", "size", "rank", "strides", "device", "layout", "number", "nothing"],
)
def test_specs_differ(other: object) -> None:
    """Each of dtype, device, shape, strides and layout counts, and what is no tensor is never the same."""
    assert same_spec(BASE, torch.empty_like(BASE))
    assert not same_spec(BASE, other)
    assert not same_spec(other, BASE)


def test_lazily_conjugated_values_differ() -> None:
    """Its bits say another value than those of a tensor of the same strides; two of a kind are the same."""
    z = torch.ones(3, dtype=torch.complex64)
    assert not same_spec(z, z.conj())
    assert same_spec(z.conj(), z.clone().conj())
    assert not same_spec(z.imag, z.conj().imag)


# Programs whose operators compute values that others compute as well, in other memory, and what they return of them.
def _twins(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b, c = x.sin(), x.sin(), x.clone()
    return a * b + c + aten.alias(x), w + 1


def _two_results(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sin(), x.sin(), x.clone(), aten.alias(x), w.clone()


def _views_of_results(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = x.sin(), x.sin()
    return a.view(-1), b.view(-1), x.clone().t(), aten.alias(aten.alias(w)).clone()


def _views_of_inputs(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.t(), x.clone().t(), x.t() + w, x.t().t().clone(), x.t().t() + x


def _views_of_one_value(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = x.sin()
    return a.view(-1), aten.alias(a).view(-1) + 1, a.t().t() + w, x.sin().view(-1) + 1


def _view_of_a_copy_first(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.clone().t() + w, x.t()


PROGRAMS = [_twins, _two_results, _views_of_results, _views_of_inputs, _views_of_one_value, _view_of_a_copy_first]


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_replacement_breaks_the_contract(program: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """Whichever two nodes of equal value: where one may stand in for the other, what the graph returns, and what of it
    shares memory, stays as it was; where it may not, nothing changes."""
    x, w = torch.randn(3, 3), torch.randn(3, 3)

    original = trace(program, x, w)
    interpreter = torch.fx.Interpreter(original, garbage_collect_values=False)
    expected = interpreter.run(x, w)
    values = {node.name: value for node, value in interpreter.env.items()}
    names = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
    contract = Contract.of(original)
    allowed = 0
    for by, node in itertools.combinations(names, 2):
        gm = copy.deepcopy(original)
        nodes = {n.name: n for n in gm.graph.nodes}
        if nodes[node].op != "call_function" or not torch.equal(values[by], values[node]):
            continue
        before = str(gm.graph)
        if replace(gm, nodes[node], nodes[by]):
            allowed += 1
            verify(gm, contract)
            assert Contract.of(gm) == contract  # verify lets memory that was shared be so no longer
            assert node not in {n.name for n in gm.graph.nodes}
            gm.recompile()
            torch.testing.assert_close(gm(x, w), expected, rtol=0, atol=0)
        else:
            assert str(gm.graph) == before
    assert allowed or program in (_two_results, _view_of_a_copy_first)


@pytest.mark.parametrize(
    ("program", "node", "by", "may"),
    [
        (_twins, "sin_1", "sin", True),
        (_twins, "clone", "x_1", True),  # a copy that nobody gets
        (_twins, "alias", "x_1", True),
        (_two_results, "sin_1", "sin", False),  # two results become one object
        (_two_results, "clone", "x_1", False),  # a result becomes the input
        (_two_results, "alias", "x_1", False),  # though it lies in its memory
        (_views_of_results, "sin_1", "sin", False),  # two results come to share memory
        (_views_of_results, "clone", "x_1", False),  # a result comes to share the input's
        (_views_of_inputs, "t_1", "t", False),  # a view of a copy is no view of the input
        (_view_of_a_copy_first, "t_1", "t", False),  # nor the other way round
        (_views_of_one_value, "sin_1", "sin", True),  # memory that nobody gets
        (_views_of_one_value, "alias", "sin", True),
    ],
)
def test_what_may_be_replaced(program: Callable[..., object], node: str, by: str, may: bool) -> None:
    """Equal values are one where nobody sees the difference; results keep memory of their own."""
    gm = trace(program, torch.ones(3, 3), torch.ones(3, 3))
    nodes = {n.name: n for n in gm.graph.nodes}
    assert may_replace(gm, nodes[node], nodes[by]) is may


def test_a_constant_is_no_result() -> None:
    """A computed value may be replaced by a constant of equal value, but a result may not: the caller would write to it."""
    table = torch.arange(3.0)
    for returned in (True, False):
        gm = trace(lambda x: table.clone() if returned else table.clone() + x, torch.ones(3))  # noqa: B023
        nodes = {n.op: n for n in gm.graph.nodes if n.op == "get_attr" or n.target is aten.clone.default}
        assert may_replace(gm, nodes["call_function"], nodes["get_attr"]) is not returned


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_inserted_in_vain_is_erased(dtype: torch.dtype) -> None:
    """All of the new form is erased where it may not stand in, and the graph is as before; else the old operator goes."""
    gm = trace(lambda x: x.sin() + x.cos(), torch.ones(9))
    before = str(gm.graph)
    sine, cosine, added = _operators(gm)
    moved = insert(cosine, aten._to_copy.default, insert(cosine, aten.add.Tensor, sine.args[0], 1.5), dtype=dtype)
    new = insert(cosine, aten.sin.default, moved)
    assert replace_by_new(gm, cosine, new, after=sine) is (dtype is torch.float32)
    if dtype is torch.float32:
        assert _operators(gm) == [sine, *moved.all_input_nodes, moved, new, added]
        assert added.args == (sine, new)
    else:
        assert str(gm.graph) == before


def test_sizes_are_computed_from_those_of_inputs() -> None:
    """Sums, products and quotients of the inputs' sizes become nodes; numbers stay, and another graph's sizes do not follow."""
    gm, other = (make_fx(lambda x: x.sin(), tracing_mode="symbolic")(torch.ones(3, 5)) for _ in range(2))
    x, sine, output = gm.graph.nodes
    rows, columns = x.meta["val"].shape
    sizes = [7, rows, (rows * 3 + columns) // 2 + 1, rows * columns]
    assert follows_from_inputs(gm.graph, sizes)
    output.args = (tuple(size_argument(sine, size) for size in sizes),)
    gm.recompile()
    assert gm(torch.ones(4, 6)) == (7, 4, 10, 24)
    shapeless = copy.deepcopy(other.graph)
    for node in shapeless.find_nodes(op="placeholder"):
        node.meta = {}
    assert not follows_from_inputs(shapeless, sizes)
