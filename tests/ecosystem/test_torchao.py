"""torchao's quantised models, compiled: what its graphs and tensors say is what is computed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import torch_hybrid_backend

torchao = pytest.importorskip("torchao", reason="torchao is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torchao's own, of extensions built for other versions of torch
]


class Net(nn.Module):
    """Convolutions with batch norm and a residual, pooling, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.linear = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x) + x)
        return self.linear(nn.functional.max_pool2d(x, 4).flatten(1))


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _compiled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="hybrid")
    compiled(x)
    return compiled(x)


@torch.no_grad()
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_pt2e(is_dynamic: bool) -> None:
    """A model quantised by export, x86 quantiser and conversion: one graph on our engines whose results are eager's."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 16, 16)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic))
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    expected = converted(x)
    assert 1e-4 < _relative(expected, model(x)) < 0.05
    assert _relative(_compiled(converted, x), expected) < 1e-3
    (plan,) = torch_hybrid_backend.explain(converted, x).plans
    assert not [node for node in plan.nodes if node.engine == "eager"]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Int8DynamicActivationInt8WeightConfig", "Int8WeightOnlyConfig"])
def test_tensors(kind: str) -> None:
    """Weights that are torchao's tensors, with rows quantised in every call or not: results are eager's."""
    from torchao import quantization

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).eval(), torch.randn(40, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(model, getattr(quantization, kind)())
    assert _relative(_compiled(model, x), model(x)) < 1e-3
