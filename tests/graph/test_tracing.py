"""Tracing beside calls and traces of other threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from torch_hybrid_backend.graph.tracing import traced


def test_others_call_compiled_functions_while_it_traces() -> None:
    """torch.fx says for all threads that it traces, and Dynamo refuses to work within a trace. Engines are chosen anew beside calls."""
    inside, may_go_on = threading.Event(), threading.Event()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    expected = compiled(torch.ones(3))

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert may_go_on.wait(10)
        return x.exp()

    with ThreadPoolExecutor(1) as pool:
        tracing = pool.submit(traced, function, [torch.ones(2)], {}, tracing_mode="fake")
        assert inside.wait(10)
        try:
            assert torch.equal(compiled(torch.ones(3)), expected)
        finally:
            may_go_on.set()
        graph = tracing.result(10)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [torch.ops.aten.exp.default]


def test_graphs_that_two_threads_trace_leave_modules_as_they_were() -> None:
    """torch.fx changes nn.Module while it traces: the second to come would put back what the first had made of it."""
    call = torch.nn.Module.__call__
    inside, may_go_on = threading.Event(), threading.Event()

    def first(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        may_go_on.wait(0.2)  # nobody says so: the other waits for this one
        return x.exp()

    def second(x: torch.Tensor) -> torch.Tensor:
        may_go_on.set()
        time.sleep(0.2)
        return x.exp()

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(traced, first, [torch.ones(2)], {}, tracing_mode="fake")
        assert inside.wait(10)
        two = pool.submit(traced, second, [torch.ones(2)], {}, tracing_mode="fake")
        assert one.result(10)
        assert two.result(10)
    assert torch.nn.Module.__call__ is call
