"""Names of graphs' inputs in the user's code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.capture.input_names import called, name_inputs


@pytest.mark.parametrize(
    ("placeholder", "name"),
    [
        ("L_x_", "x"),
        ("L_input_ids_", "input_ids"),
        ("L_kwargs_input_ids_", "input_ids"),
        ("L_pairs_0_", "pairs_0"),
        ("G_table_", "table"),
        ("L_self_modules_layers_modules_0_parameters_weight_", "layers.0.weight"),
        ("L_model_modules_head_parameters_bias_", "model.head.bias"),
        ("L_self_modules_norm_buffers_running_mean_", "norm.running_mean"),
        ("L_stack0_", ""),
        ("s77", ""),
        ("primals_1", ""),
    ],
)
def test_names_of_dynamo(placeholder: str, name: str) -> None:
    """Arguments, parts of them, what modules hold; nothing of what an earlier graph left, and of sizes."""
    assert called(placeholder) == name


def test_graphs_of_unlike_inputs_are_left_alone() -> None:
    """No input is called as another."""

    def graph(*names: str) -> torch.fx.GraphModule:
        made = torch.fx.Graph()
        made.output([made.placeholder(name) for name in names])
        return torch.fx.GraphModule(nn.Module(), made)

    module = graph("arg0_1")
    name_inputs(module, graph("L_x_", "L_y_"))
    assert [node.meta for node in module.graph.find_nodes(op="placeholder")] == [{}]
    name_inputs(module, graph("L_x_"))
    assert [node.meta for node in module.graph.find_nodes(op="placeholder")] == [{"called": "x"}]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, image: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(image).relu() * scale


def test_plans_know_them() -> None:
    """For inference, also where AOTAutograd's graph is on disk, and for training."""
    model, image, scale = _Model(), torch.randn(2, 4), torch.randn(2, 4)
    for _ in range(2):
        with torch.no_grad():
            (plan,) = torch_hybrid_backend.explain(model, image, scale).plans
        assert {given.called for given in plan.inputs if not given.is_constant} == {"image", "scale"}
    (forward, *_) = torch_hybrid_backend.explain(model, image, scale).plans
    assert {given.called for given in forward.inputs} == {"image", "scale", "linear.weight", "linear.bias"}
