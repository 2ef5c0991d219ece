"""The canonical form: equal for what means the same, different for anything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.partition.region_key import region_key
from torch_hybrid_backend.partition.regions import partition_graph

_A, _B = torch.randn(4, 4), torch.randn(4, 4)


def _key(function: Callable[..., object], *inputs: torch.Tensor, constant: int | None = None) -> str:
    module = trace(function, *inputs)
    if constant is not None:
        list(module.graph.nodes)[constant].meta["constant"] = True
    (segment,) = partition_graph(module, [FakeEngine()], Config()).graph.segments
    return segment.region.key


def _base(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x - y * 2.0, 1)


def test_constants_of_a_graph_are_read_while_others_are_fake() -> None:
    """Constants are read as when AOTAutograd is still tracing: the key is that of the constant's contents."""
    table = torch.arange(4.0)
    module = torch.fx.symbolic_trace(lambda x: x)
    graph = torch.fx.Graph()
    module.register_buffer("table", table)
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, graph.get_attr("table"))))
    module = torch.fx.GraphModule(module, graph)
    with FakeTensorMode():
        key = region_key(module, ())
    assert key == region_key(module, ())
    table += 1
    assert key != region_key(module, ())


def test_names_do_not_matter() -> None:
    """The same computation under other parameter names, traced again, has the same key."""
    assert _key(_base, _A, _B) == _key(lambda left, right: torch.softmax(left - right * 2.0, 1), _B, _A)


@pytest.mark.parametrize(
    ("function", "inputs", "constant"),
    [
        pytest.param(lambda x, y: torch.softmax(x + y * 2.0, 1), (_A, _B), None, id="operator"),
        pytest.param(lambda x, y: torch.softmax(y * 2.0 - x, 1), (_A, _B), None, id="wire"),
        pytest.param(lambda x, y: torch.softmax(x - x * 2.0, 1), (_A, _B), None, id="input"),
        pytest.param(lambda x, y: torch.softmax(x - y * 2.5, 1), (_A, _B), None, id="constant"),
        pytest.param(lambda x, y: torch.softmax(x - y * 2, 1), (_A, _B), None, id="constant-type"),
        pytest.param(lambda x, y: torch.softmax(x - y * 2.0, 0), (_A, _B), None, id="argument"),
        pytest.param(lambda x, y: torch.softmax(x - y * 2.0, 1).exp(), (_A, _B), None, id="longer"),
        pytest.param(lambda x, y: (torch.softmax(x - y * 2.0, 1), x - y), (_A, _B), None, id="outputs"),
        pytest.param(_base, (_A.double(), _B.double()), None, id="dtype"),
        pytest.param(_base, (torch.randn(4, 6), torch.randn(4, 6)), None, id="shape"),
        pytest.param(_base, (_A.t(), _B), None, id="strides"),
        pytest.param(_base, (_A, _B), 1, id="is-constant"),
    ],
)
def test_every_ingredient_changes_the_key(
    function: Callable[..., object], inputs: tuple[torch.Tensor, ...], constant: int | None
) -> None:
    """Operator, wire, scalar and its type, argument, outputs, dtype, shape, strides, constant flag."""
    assert _key(function, *inputs, constant=constant) != _key(_base, _A, _B)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_bytes_of_tensor_constants_change_the_key(dtype: torch.dtype) -> None:
    """Two constants that differ in one element are two regions; equal bytes are one."""
    one = torch.tensor([0, 1, 1, 0]).to(dtype)
    other = torch.tensor([0, 1, 1, 1]).to(dtype)
    equal, x = one.clone(), torch.randn(4)
    assert _key(lambda v: v * one, x) == _key(lambda v: v * equal, x)
    assert _key(lambda v: v * one, x) != _key(lambda v: v * other, x)
