"""Models captured and run graph by graph give what eager gives."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, check_stride=True)


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    )


def test_inference_gives_one_graph_that_knows_its_parameters(recorder):
    """Under no_grad there is one inference graph; parameters and buffers, and they alone, are static inputs."""
    model, x = small_net().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert_same(recorder.compile(model)(x), model(x))
    (captured,) = recorder.graphs
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    assert captured.kind == "inference"
    assert len(placeholders) == 9
    images = [node for node in placeholders if node.name not in captured.static_inputs]
    assert [tuple(node.meta["val"].shape) for node in images] == [(2, 3, 8, 8)]


def test_inference_mode(recorder):
    """torch.inference_mode works as no_grad does."""
    model, x = small_net().eval(), torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        assert_same(recorder.compile(model)(x), model(x))
    assert [graph.kind for graph in recorder.graphs] == ["inference"]


def test_every_value_has_metadata_and_a_source_line(recorder):
    """Each node carries meta["val"]; each operator says which line of the user's code it came from."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(x * torch.tensor([1.0, 2.0]), -1)

    x = torch.randn(3, 2)
    assert_same(recorder.compile(function)(x), function(x))
    graph = recorder.graphs[0].graph_module.graph
    assert all("val" in node.meta for node in graph.nodes if node.op != "output")
    operators = graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    assert "torch.tensor([1.0, 2.0])" in operators[0].meta["stack_trace"]


def test_lifted_constants_stay_get_attr(recorder):
    """A tensor made from literals in the user's code is a get_attr node with metadata, and is right in every call."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0])

    compiled, x = recorder.compile(function), torch.randn(3, 2)
    for _ in range(2):
        assert_same(compiled(x), function(x))
    (constant,) = recorder.graphs[0].graph_module.graph.find_nodes(op="get_attr")
    assert tuple(constant.meta["val"].shape) == (2,)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_training_gives_eagers_gradients_and_statistics(recorder, requires_grad):
    """A step through forward and backward graphs: loss, gradients, batch-norm statistics as in eager."""
    model, x = small_net(), torch.randn(4, 3, 8, 8, requires_grad=requires_grad)
    reference, y = copy.deepcopy(model), x.detach().clone().requires_grad_(requires_grad)
    compiled = recorder.compile(model)
    for _ in range(2):
        compiled(x).square().sum().backward()
        reference(y).square().sum().backward()
    assert [graph.kind for graph in recorder.graphs] == ["forward", "backward"]
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
    if requires_grad:
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_threads_share_one_backward_graph(recorder):
    """Threads that call backward of one forward graph for the first time, all at once: it is compiled once, and serves each."""
    model = small_net().eval()
    inputs = [torch.randn(2, 3, 8, 8, requires_grad=True) for _ in range(3)]
    compiled = recorder.compile(model, backward_takes_s=0.3)
    losses = [compiled(x).square().sum() for x in inputs]
    start = threading.Barrier(len(losses))

    def backward(loss: torch.Tensor) -> None:
        start.wait(60)
        loss.backward()

    with ThreadPoolExecutor(len(losses)) as threads:
        list(threads.map(backward, losses))  # raises what a thread raised
    assert [graph.kind for graph in recorder.graphs] == ["forward", "backward"]
    for x in inputs:
        (expected,) = torch.autograd.grad(model(x).square().sum(), x)
        torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


def test_mutated_buffers_are_not_static(recorder):
    """Batch norm's running statistics change in every training step: they are no constants; its weights are."""
    recorder.compile(nn.BatchNorm1d(4))(torch.randn(8, 4))
    forward = recorder.graphs[0]
    shapes = [
        (node.name in forward.static_inputs, tuple(node.meta["val"].shape), node.meta["val"].dtype)
        for node in forward.graph_module.graph.find_nodes(op="placeholder")
    ]
    assert [static for static, _, _ in shapes].count(True) == 2
    assert (False, (), torch.int64) in shapes


def test_retain_graph(recorder):
    """backward(retain_graph=True) twice accumulates, as in eager."""
    x = torch.randn(3, 3, requires_grad=True)
    out = recorder.compile(lambda x: (x.sin() * x).sum())(x)
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    assert_same(x.grad, 2 * once)


def test_partial_gradients(recorder):
    """Inputs that need no gradient get none; those that do get eager's."""
    a, b = torch.randn(3, requires_grad=True), torch.randn(3)
    recorder.compile(lambda a, b: ((a * b).sum(), b * 2))(a, b)[0].backward()
    assert_same(a.grad, b)
    assert b.grad is None


def test_input_mutation(recorder):
    """In-place writes to an input reach the caller's tensor, through a view too; the graph itself stays functional."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        x[0].mul_(2)
        return x.sum(0)

    x = torch.randn(3, 4)
    y = x.clone()
    assert_same(recorder.compile(function)(x), function(y))
    assert_same(x, y)
    assert not any(name.endswith(("_.default", "_.Tensor")) for name in recorder.operators())


def test_mutated_buffer_of_a_module(recorder):
    """A counter buffer updated in forward counts calls."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    model, x = Counter(), torch.ones(2)
    compiled = recorder.compile(model)
    with torch.no_grad():
        assert [compiled(x)[0].item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert recorder.graphs[0].static_inputs == frozenset()


def test_outputs_that_are_views_of_inputs(recorder):
    """An output that eager makes a view of an input is one: writing to it writes to the input."""
    x = torch.zeros(2, 3)
    compiled = recorder.compile(lambda x: (x.t(), x[0], x + 1))
    transposed, row, fresh = compiled(x)
    transposed[2, 1] = 5
    row[0] = 7
    fresh.fill_(9)
    assert x.tolist() == [[7, 0, 0], [0, 0, 5]]


def test_outputs_that_share_memory_and_those_that_do_not(recorder):
    """Two views of one intermediate alias each other; two computations of equal value do not."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y.view(-1), y.t(), x * 2

    compiled = recorder.compile(function)
    flat, transposed, other = compiled(torch.ones(2, 2))
    flat[1] = 0
    assert transposed[1, 0] == 0
    assert other[0, 1] == 2


def test_containers_and_none(recorder):
    """Lists, dicts and None as inputs and outputs keep their structure."""

    def function(pair: list[torch.Tensor], named: dict[str, torch.Tensor], nothing: None = None) -> dict[str, Any]:
        return {"sum": pair[0] + pair[1], "none": nothing, "named": [named["a"] * 2, 3]}

    x, y = torch.randn(2), torch.randn(2)
    assert_same(recorder.compile(function)([x, y], {"a": x}), function([x, y], {"a": x}))


def test_graph_inputs_that_are_lists(recorder):
    """A graph whose own inputs are containers (not flattened by Dynamo) is flattened on the way in."""
    from torch_hybrid_backend.capture.aot import capture

    gm = torch.fx.symbolic_trace(lambda pair: pair[0] * pair[1])
    x, y = torch.randn(2), torch.randn(2)

    def compile_graph(captured: Any) -> Any:
        return lambda inputs: captured.graph_module(*inputs)

    (out,) = (capture(_tuple_output(gm), [[x, y]], compile_graph, ()))([x, y])
    assert_same(out, x * y)


def _tuple_output(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    output = gm.graph.output_node()
    output.args = ((output.args[0],),)
    gm.recompile()
    return gm


def test_dynamic_shapes_use_one_graph(recorder):
    """With dynamic=True sizes come as SymInt placeholders and one graph serves several shapes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1)).eval()
    compiled = recorder.compile(model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 5, 9):
            x = torch.randn(rows, 4)
            assert_same(compiled(x), model(x))
    (captured,) = recorder.graphs
    values = [node.meta["val"] for node in captured.graph_module.graph.find_nodes(op="placeholder")]
    assert any(isinstance(value, torch.SymInt) for value in values)


def test_dynamic_shapes_in_training(recorder):
    """Symbolic sizes reach the backward graph."""
    compiled = recorder.compile(lambda x: (x.softmax(-1) * x.shape[0]).square().sum(), dynamic=True)
    for rows in (3, 6):
        x = torch.randn(rows, 4, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        compiled(x).backward()
        (y.softmax(-1) * rows).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert [graph.kind for graph in recorder.graphs] == ["forward", "backward"]


def test_graph_break(recorder):
    """A graph break gives two graphs and eager's answer."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        torch._dynamo.graph_break()
        return y * 2

    x = torch.randn(4)
    assert_same(recorder.compile(function)(x), function(x))
    assert len(recorder.graphs) == 2


def test_tied_weights(recorder):
    """A parameter used twice is one input, and its gradient is the sum."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    model = Tied()
    reference, ids = copy.deepcopy(model), torch.tensor([[1, 2, 2]])
    recorder.compile(model)(ids).sum().backward()
    reference(ids).sum().backward()
    assert len(recorder.graphs[0].static_inputs) == 1
    torch.testing.assert_close(model.head.weight.grad, reference.head.weight.grad)


def test_autocast(recorder):
    """Autocast's casts are in the graph: bfloat16 comes out as in eager."""
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    compiled = recorder.compile(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(x)
        torch.testing.assert_close(out, model(x), rtol=2e-2, atol=2e-2)
    assert out.dtype == torch.bfloat16
    assert "aten._to_copy.default" in recorder.operators()


def test_dropout_draws_eagers_numbers(recorder):
    """Training-mode dropout drops what eager drops from the same seed; in eval it vanishes."""
    x = torch.randn(64, 33)
    compiled = recorder.compile(lambda x, train: torch.nn.functional.dropout(x, 0.4, train))
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(x, 0.4, True)
    torch.manual_seed(3)
    assert_same(compiled(x, True), expected)
    compiled(x, False)
    assert recorder.operators(-1) in ([], ["aten.alias.default"], ["aten.clone.default"])


def test_a_failing_compiler_is_heard(recorder):
    """An exception of compile_graph reaches the caller with its message."""
    from torch_hybrid_backend.capture.aot import capture

    def refuse(captured: Any) -> Any:
        raise RuntimeError("no engine today")

    with pytest.raises(Exception, match="no engine today"):
        torch.compile(lambda x: x + 1, backend=lambda gm, inputs: capture(gm, inputs, refuse, ()))(torch.ones(2))
