"""Bodies of control flow operators are found, compiled apart and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops import while_loop

from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.graph.schema import CONTROL_FLOW
from torch_hybrid_backend.passes import control_flow
from torch_hybrid_backend.passes.control_flow import compile_bodies

_LAYER = torch.nn.Linear(4, 4)


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, _LAYER, torch.sin, (x,))


def loop(x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, _LAYER(x)), (torch.tensor(0), x))[1]


def mapped(x: torch.Tensor) -> torch.Tensor:
    return map_rows(_LAYER, x)


def run(program: Callable[..., Any], x: torch.Tensor) -> tuple[torch.Tensor, dict[str, CapturedGraph], list[str]]:
    """The program's value with each body run by a function of ours; the bodies by name; and which of them ran."""
    bodies: dict[str, CapturedGraph] = {}
    ran: list[str] = []

    def compile_body(name: str, body: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        bodies[name] = body

        def call(operands: list[Any]) -> list[Any]:
            ran.append(name)
            result = body.graph_module(*operands)
            return list(result) if isinstance(result, list | tuple) else [result]

        return call

    def compile_graph(captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        compile_bodies(captured, compile_body)
        return lambda inputs: list(captured.graph_module(*inputs))

    torch._dynamo.reset()
    with torch.no_grad():
        value = torch.compile(program, backend=lambda gm, inputs: capture(gm, inputs, compile_graph, ()))(x)
    torch.testing.assert_close(value, program(x))
    return value, bodies, ran


def test_only_the_branch_taken_runs() -> None:
    """Both branches are compiled, one runs."""
    _, bodies, ran = run(branches, torch.ones(2, 4))
    assert set(bodies) == {"true_graph_0", "false_graph_0"}
    assert ran == ["true_graph_0"]
    assert run(branches, -torch.ones(2, 4))[2] == ["false_graph_0"]


def test_loops_run_their_bodies() -> None:
    """A condition (a bare value, no tuple) and a body run as often as they must; a map's body once for each row."""
    ran = run(loop, torch.ones(2, 4))[2]
    assert ran.count("while_loop_cond_graph_0") == 4
    assert ran.count("while_loop_body_graph_0") == 3
    assert run(mapped, torch.ones(5, 4))[2] == ["body_graph_0"] * 5


def test_parameters_are_static_inputs_of_bodies() -> None:
    """Parameters that the outer graph hands over are static in the body; what changes with each iteration is not."""
    for program in (branches, loop, mapped):
        for name, body in run(program, torch.ones(2, 4))[1].items():
            inputs = body.graph_module.graph.find_nodes(op="placeholder")
            static = [tuple(node.meta["val"].shape) for node in inputs if node.name in body.static_inputs]
            assert sorted(static) == [(4,), (4, 4)], name


def test_one_list_of_operators() -> None:
    """Those whose bodies are compiled are those whose bodies are looked into."""
    assert control_flow._OPERATORS.keys() == CONTROL_FLOW
