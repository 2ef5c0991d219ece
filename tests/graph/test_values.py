"""Facts about values that a whole graph tells."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
from torch import nn

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.graph.values import (
    constant_nodes,
    effects,
    has_mutation,
    holds_collectives,
    outputs_of,
    returned_roots,
    storage_root,
)

aten = torch.ops.aten

if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

c10d = torch.ops._c10d_functional


def _reduced(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def test_memory_is_followed_through_views_items_and_waits() -> None:
    """Views, members of a split, `_unsafe_view`, waiting and writing in place stay in the memory they were given."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = aten.sin(x)
        split = aten._unsafe_view(aten.split(made, 2)[1], [8])
        members = torch.var_mean(x, 0)
        return (
            split,
            aten.add_(aten.view(x, [16]), 1),
            c10d.wait_tensor(aten.view(c10d.all_reduce(x, "sum", "0"), [16])),
            *members,
        )

    gm = trace(program, torch.ones(4, 4))
    roots = [storage_root(node) for node in outputs_of(gm)]  # type: ignore[arg-type]
    assert [str(root.target) for root in roots[:3]] == [
        "aten.sin.default",
        "x_1",
        "_c10d_functional.all_reduce.default",
    ]
    assert roots[3:] == list(outputs_of(gm)[3:])  # members that own their memory
    assert has_mutation(gm)
    assert returned_roots(gm) == dict.fromkeys(roots, 1)


def test_a_collective_of_constants_is_no_constant() -> None:
    """A collective of all ranks' parameters does not follow from this rank's."""
    gm = trace(lambda w: _reduced(w) + aten.sin(w), torch.ones(3))
    assert {str(node.target) for node in constant_nodes(gm, frozenset({"w_1"}))} == {"w_1", "aten.sin.default"}


def test_collectives_are_found_in_sub_graphs() -> None:
    """A graph whose branch holds a collective holds one."""
    inner = trace(_reduced, torch.ones(3))
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"),)),))
    root = nn.Module()
    root.body = inner
    assert holds_collectives(inner)
    assert holds_collectives(torch.fx.GraphModule(root, graph))
    assert not holds_collectives(trace(torch.sin, torch.ones(3)))


def test_effects_are_found_in_bodies_of_control_flow() -> None:
    """Control flow does what its bodies do; other operators that call graphs may do anything."""

    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() + torch.rand_like(x), lambda x: x.cos(), (x,))

    captured: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        captured.append(gm)
        return gm

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(keep(gm, inputs)))
    with torch.no_grad():
        torch.compile(branches, backend=backend)(torch.rand(3))
    (module,) = captured
    found = [node.target for node in effects(module)]
    assert found
    assert all(torch.Tag.nondeterministic_seeded in target.tags for target in found)
    assert [node.target for node in effects(trace(lambda x: x.sin(), torch.rand(3)))] == []
