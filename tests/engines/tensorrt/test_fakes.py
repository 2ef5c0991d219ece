"""Tensors for tracing anew: of the sizes and strides of a spec, on the host, with symbols that are nobody else's."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tensorrt.fakes import Fakes
from torch_hybrid_backend.sizes.size import symbol


def test_tensors_of_a_spec() -> None:
    """Equal symbols are equal sizes, and different ones are not, whatever their examples; the CPU stands for any device."""
    a, b = symbol("a", 8), symbol("b", 8)
    fakes = Fakes({"b": 8})
    x = fakes.tensor(TensorSpec((a, b, 3), "float16", (b * 3, 3, 1), Device("cuda", 1)))
    assert x.device.type == "cpu"
    assert x.dtype is torch.float16
    y = fakes.tensor(TensorSpec((a * 2, b), "float32", (1, a * 2), Device("cpu")))
    assert not fakes.assumed()
    assert x.shape[0] * 2 == y.shape[0]
    assert y.stride(1) == y.shape[0]
    assert not fakes.assumed()
    assert fakes.size(7) == 7
    assert bool(x.shape[0] == x.shape[1])
    assert fakes.assumed()


def test_a_size_whose_example_is_1_stays_unknown() -> None:
    """PyTorch would take 0 and 1 for numbers."""
    fakes = Fakes()
    x = fakes.tensor(TensorSpec((symbol("n", 1), 4), "float32", (4, 1), Device("cpu")))
    assert not isinstance(x.shape[0], int)


def test_others_call_compiled_functions_while_it_traces() -> None:
    """torch.fx says for all threads that it traces, and Dynamo refuses to work within a trace. Engines are chosen anew beside calls."""
    fakes, inside, may_go_on = Fakes(), threading.Event(), threading.Event()
    x = fakes.tensor(TensorSpec((2,), "float32", (1,), CPU))
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    expected = compiled(torch.ones(3))

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert may_go_on.wait(10)
        return x.exp()

    with ThreadPoolExecutor(1) as pool:
        tracing = pool.submit(fakes.traced, function, [x])
        assert inside.wait(10)
        try:
            assert torch.equal(compiled(torch.ones(3)), expected)
        finally:
            may_go_on.set()
        graph = tracing.result(10)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [torch.ops.aten.exp.default]


def test_graphs_that_two_threads_trace_leave_modules_as_they_were() -> None:
    """torch.fx changes nn.Module while it traces: the second to come would put back what the first had made of it."""
    call, fakes = torch.nn.Module.__call__, Fakes()
    x = fakes.tensor(TensorSpec((2,), "float32", (1,), CPU))
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
        one = pool.submit(fakes.traced, first, [x])
        assert inside.wait(10)
        two = pool.submit(fakes.traced, second, [x])
        assert one.result(10)
        assert two.result(10)
    assert torch.nn.Module.__call__ is call


def test_new_tensors_are_on_the_host() -> None:
    """Whatever the default device is: all of a graph is on one."""
    fakes = Fakes()
    x = fakes.tensor(TensorSpec((2,), "float32", (1,), CPU))
    with torch.device("meta"):
        graph = fakes.traced(lambda x: x + torch.ones(2), [x])
    assert {node.meta["val"].device.type for node in graph.graph.nodes if "val" in node.meta} == {"cpu"}
