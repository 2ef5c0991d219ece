"""A plan tells the graph: what each operator reads and returns, and which modules call it."""

from __future__ import annotations

import torch
from torch import nn

import torch_hybrid_backend
from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.plan import GraphInput, ModuleCall, Plan
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.partition.plan_builder import make_plan
from torch_hybrid_backend.partition.regions import partition_graph


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x)) + x


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(), _Block())
        self.shared = _Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.shared(self.blocks(x))).relu()


def test_values_of_operators() -> None:
    """Inputs by name, each once; tensors that are returned, several of them too; the graph's own inputs and outputs."""
    module = trace(lambda x: torch.sort(x + x * 2)[0], torch.randn(4, 8))
    plan = make_plan("graph", "inference", partition_graph(module, [], Config()), [])
    mul, add, sort, item, *_ = plan.nodes
    (given,) = plan.inputs
    spec = TensorSpec((4, 8), "float32", (8, 1), CPU)
    assert given == GraphInput(given.name, spec, is_constant=False)
    assert (mul.inputs, add.inputs) == ((given.name,), (given.name, mul.name))
    assert sort.outputs == (spec, TensorSpec((4, 8), "int64", (8, 1), CPU))
    assert [node.is_view for node in plan.nodes[:4]] == [False, False, False, True]
    assert (item.inputs, item.outputs, plan.outputs) == ((sort.name,), (spec,), (item.name,))


def _plan(model: nn.Module, *, grad: bool) -> Plan:
    with torch.set_grad_enabled(grad):
        (plan,) = torch_hybrid_backend.explain(model, torch.randn(2, 8)).plans
    return plan


def test_modules_of_operators_survive_capture_and_passes() -> None:
    """Modules are known in graphs Of inference and of training, captured anew and read from the cache: every operator but the outermost's has
    its module, every module its class and its caller; a module that is called twice is two calls."""
    model = _Model()
    blocks = [
        ModuleCall(path, "_Block", parent)
        for path, parent in (("blocks.0", "blocks"), ("blocks.1", "blocks"), ("shared", ""), ("shared@1", ""))
    ]
    for grad in (False, False, True):
        plan = _plan(model, grad=grad)
        calls = {call.path: call for call in plan.modules}
        assert calls["blocks"] == ModuleCall("blocks", "Sequential", "")
        assert [call for call in plan.modules if call.class_name == "_Block"] == blocks
        linear = [call.parent for call in plan.modules if call.class_name == "Linear"]
        assert linear == [block.path for block in blocks]
        modules = {node.operator: node.module for node in plan.nodes}
        assert modules["aten.relu.default"] == ""
        assert [node.module for node in plan.nodes if node.operator == "aten.sin.default"] == [b.path for b in blocks]
        known = {*calls, ""}
        assert all(node.module in known and call.parent in known for node in plan.nodes for call in plan.modules)


def test_every_value_that_is_read_is_known() -> None:
    """Inputs name operators or inputs of the graph, parameters among them; outputs of the graph are among both."""
    plan = _plan(_Model(), grad=False)
    known = {node.name for node in plan.nodes} | {given.name for given in plan.inputs}
    assert {name for node in plan.nodes for name in node.inputs} | set(plan.outputs) <= known
    assert sum(given.is_constant for given in plan.inputs) >= 6
    assert sum(not given.is_constant for given in plan.inputs) == 1
