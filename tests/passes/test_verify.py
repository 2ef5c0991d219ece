"""Each rule of the verifier: the graph that breaks it is refused, and what no rule forbids is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed
from torch.fx.experimental.proxy_tensor import make_fx

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.errors import PassError
from torch_hybrid_backend.passes.rewrite import insert
from torch_hybrid_backend.passes.verify import Contract, verify

aten = torch.ops.aten
_TABLE = torch.arange(3.0)


def _program(x: torch.Tensor, y: torch.Tensor) -> tuple[object, ...]:
    return (x + 1) * _TABLE, y.sin(), 3


def _results(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    (returned,) = gm.graph.output_node().args
    return list(returned)


def _return(gm: torch.fx.GraphModule, *values: object) -> None:
    gm.graph.output_node().args = (tuple(values),)


def change_dtype(gm: torch.fx.GraphModule) -> None:
    first, *others = _results(gm)
    _return(gm, insert(gm.graph.output_node(), aten._to_copy.default, first, dtype=torch.float64), *others)


def change_strides(gm: torch.fx.GraphModule) -> None:
    first, *others = _results(gm)
    _return(gm, insert(gm.graph.output_node(), aten.as_strided.default, first, [2, 3], [1, 2]), *others)


def change_a_literal(gm: torch.fx.GraphModule) -> None:
    _return(gm, *_results(gm)[:2], 4)


def change_a_bit(gm: torch.fx.GraphModule) -> None:
    first, *others = _results(gm)
    _return(gm, insert(gm.graph.output_node(), aten._neg_view.default, first), *others)


def swap_outputs(gm: torch.fx.GraphModule) -> None:
    first, second, number = _results(gm)
    _return(gm, second, first, number)


def add_an_output(gm: torch.fx.GraphModule) -> None:
    _return(gm, *_results(gm), None)


def mutate(gm: torch.fx.GraphModule) -> None:
    output = gm.graph.output_node()
    insert(output, aten.add_.Tensor, _results(gm)[0], 1)


def lose_metadata(gm: torch.fx.GraphModule) -> None:
    del _results(gm)[0].meta["val"]


def use_before_definition(gm: torch.fx.GraphModule) -> None:
    first, second, _ = _results(gm)
    second.append(first)
    second.args = (first,)


def swap_inputs(gm: torch.fx.GraphModule) -> None:
    first, second = gm.graph.find_nodes(op="placeholder")
    second.append(first)


def drop_an_input(gm: torch.fx.GraphModule) -> None:
    first, second = gm.graph.find_nodes(op="placeholder")
    second.replace_all_uses_with(first)
    gm.graph.erase_node(second)


def return_a_view_of_another_output(gm: torch.fx.GraphModule) -> None:
    first, _, number = _results(gm)
    _return(gm, first, insert(gm.graph.output_node(), aten.alias.default, first), number)


def return_a_view_of_an_input(gm: torch.fx.GraphModule) -> None:
    first, _, number = _results(gm)
    (_, y) = gm.graph.find_nodes(op="placeholder")
    _return(gm, first, insert(gm.graph.output_node(), aten.alias.default, y), number)


def return_a_constant(gm: torch.fx.GraphModule) -> None:
    (table,) = gm.graph.find_nodes(op="get_attr")
    gm.register_buffer("wide", torch.zeros(2, 3))
    table.target = "wide"
    table.meta["val"] = _results(gm)[0].meta["val"]
    _return(gm, table, *_results(gm)[1:])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (change_dtype, "output 0 changed from .*float32.* to .*float64"),
        (change_strides, "output 0 changed"),
        (change_a_bit, "output 0 changed"),
        (change_a_literal, "output 2 changed from 3 to 4"),
        (swap_outputs, "output 0 changed"),
        (add_an_output, "number of outputs changed from 3 to 4"),
        (mutate, r"\(aten.add_.Tensor\) mutates"),
        (lose_metadata, r"mul \(aten.mul.Tensor\) has no meta"),
        (use_before_definition, "malformed"),
        (swap_inputs, "inputs changed from .* to "),
        (drop_an_input, "inputs changed from .* to "),
        (return_a_view_of_another_output, r"share memory that did not before: \[\(0, 1\)\]"),
        (return_a_view_of_an_input, r"share memory that did not before: \[\(1, -2\)\]"),
        (return_a_constant, r"share memory that did not before: \[\(0, -3\)\]"),
    ],
)
def test_each_rule(break_it: Callable[[torch.fx.GraphModule], None], message: str) -> None:
    """A graph that breaks the rule is refused by an error that says where; the graph before was legal."""
    # The outputs differ in their sizes, so that swapping them shows.
    gm = trace(_program, torch.ones(2, 3), torch.ones(2, 3) if break_it is not swap_outputs else torch.ones(4))
    contract = Contract.of(gm)
    verify(gm, contract)
    break_it(gm)
    with pytest.raises(PassError, match=message):
        verify(gm, contract)


def test_memory_may_be_shared_as_before_or_less() -> None:
    """Outputs that shared memory may still do so, with each other and with inputs; a pass may also give them memory of their own."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y, y.view(-1), x.t(), aten.split(y, 1)[0]

    gm = trace(program, torch.ones(2, 3))
    contract = Contract.of(gm)
    assert contract.shared == {(0, 1), (0, 3), (1, 3), (2, -1)}
    verify(gm, contract)
    values = _results(gm)
    _return(gm, values[0], insert(gm.graph.output_node(), aten.clone.default, values[1]), *values[2:])
    verify(gm, contract)


def test_a_mutated_input_may_be_copied_back() -> None:
    """AOTAutograd's copy at the graph's end is the one write in place that plain operators may do."""
    gm = trace(lambda x: x.copy_(x.sin()), torch.ones(3))
    verify(gm, Contract.of(gm))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_collectives_may_write_what_they_receive() -> None:
    """A collective in place is legal: other processes' values have to go somewhere."""
    gm = trace(lambda x: torch.ops._c10d_functional.all_reduce_(x + 1, "sum", "0"), torch.ones(3))
    verify(gm, Contract.of(gm))


def test_symbolic_sizes_are_part_of_the_contract() -> None:
    """An output that is a size, or has one, stays that size: another symbol is another output."""
    gm = make_fx(lambda x, y: (x.shape[0], x.new_empty(x.shape[0], 2)), tracing_mode="symbolic")(
        torch.ones(4, 6), torch.ones(5, 3)
    )
    contract = Contract.of(gm)
    verify(gm, contract)
    size, empty = _results(gm)
    y = gm.graph.find_nodes(op="placeholder")[1]
    with gm.graph.inserting_before(size):
        other = gm.graph.call_function(aten.sym_size.int, (y, 0))
    other.meta["val"] = y.meta["val"].shape[0]
    _return(gm, other, empty)
    with pytest.raises(PassError, match="output 0 changed from s"):
        verify(gm, contract)
