"""The first stage of a graph: what its preparation finds out, and copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from tests.fake_devices import FakeDevices
from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.driver import prepared as driver_prepared
from torch_hybrid_backend.driver.prepared import copy_of, hindrance, prepare
from torch_hybrid_backend.graph.eager_graph import EagerGraph


def _branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + torch.rand_like(x), lambda x: x.cos(), (x,))


def graph_of(program: Callable[[torch.Tensor], torch.Tensor]) -> torch.fx.GraphModule:
    """The ATen graph of a program, its control flow too."""
    captured: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        captured.append(gm)
        return make_boxed_func(gm)

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(program, backend=aot_autograd(fw_compiler=keep))(torch.rand(3))
    return captured[0]


def test_copies_have_bodies_of_their_own() -> None:
    """Passes over a graph's control flow do not change its copy."""
    module = graph_of(_branches)
    copy = copy_of(module)
    bodies = {name: body for name, body in copy.named_children() if isinstance(body, torch.fx.GraphModule)}
    assert len(bodies) == 2
    for name, body in bodies.items():
        original = getattr(module, name)
        assert body is not original
        assert body.graph is not original.graph
        (output,) = original.graph.find_nodes(op="output")
        output.args = (tuple(original.graph.find_nodes(op="placeholder")[:1]),)
        original.recompile()
    x = -torch.rand(3)
    torch.testing.assert_close(EagerGraph(copy)([x])[0], x.cos())
    torch.testing.assert_close(EagerGraph(module)([x])[0], x)


def _asserting(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async(x.sum() > 0)
    return x.sin()


def _dropping(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x.sin(), 0.5)


def test_what_keeps_a_graph_from_being_tried() -> None:
    """Neither random numbers nor control flow, on the CPU; but whatever else may be noticed, and numbers of a GPU's generator."""
    assert hindrance(graph_of(_dropping)) is None
    assert hindrance(graph_of(_branches)) is None
    found = hindrance(trace(_asserting, torch.rand(3)))
    assert found is not None
    assert "assert" in str(found.target)
    devices = FakeDevices()
    elsewhere = devices.captured(_dropping, devices.tensor(3, device="cuda")).graph_module
    found = hindrance(elsewhere)
    assert found is not None
    assert torch.Tag.nondeterministic_seeded in found.target.tags


@pytest.mark.parametrize(
    ("program", "once", "apart"),
    [(lambda x: x.sin(), True, True), (_dropping, False, True), (_asserting, False, False)],
)
def test_what_is_known_of_repeating_it(
    program: Callable[[torch.Tensor], torch.Tensor], *, once: bool, apart: bool
) -> None:
    """A graph that computes alone may be run twice; one that draws may with a generator of its own."""
    module = trace(lambda x: (program(x),), torch.rand(3)) if program is _asserting else graph_of(program)
    captured = CapturedGraph(module, "inference", frozenset(), False)
    made = prepare(captured, "graph", Config(), lambda name, body: EagerGraph(body.graph_module))
    assert (made.is_repeatable, made.is_repeatable_apart, made.has_collectives) == (once, apart, False)


@pytest.mark.parametrize("bits", [7, 8])
def test_int8_weights_have_the_bits_that_suit_the_machine(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver asks the machine at every compilation, and tells the passes."""
    monkeypatch.setattr(driver_prepared, "default_weight_bits", lambda: bits)
    module = trace(lambda x, w: (torch.mm(x, w),), torch.rand(40, 64), torch.rand(64, 64))
    weight = module.graph.find_nodes(op="placeholder")[1].name
    captured = CapturedGraph(module, "inference", frozenset({weight}), False)
    made = prepare(captured, "graph", Config(precision="int8"), lambda name, body: EagerGraph(body.graph_module))
    assert made.reduced is not None
    (node,) = [n for n in made.reduced.graph.graph.nodes if "dequantize_per_channel" in str(n.target)]
    assert node.args[5] == {7: 64, 8: 127}[bits]
