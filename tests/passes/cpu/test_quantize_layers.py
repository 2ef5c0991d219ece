"""`precision="int8"`: which layers are quantized, how, and that what engines are given computes the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_hybrid_backend
from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.core.precision import PRECISIONS
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.passes.cpu.quantize_layers import _is_never_negative, quantize_layers
from torch_hybrid_backend.passes.hoist import hoist
from torch_hybrid_backend.passes.pipeline import PASSES, PRECISION_PASSES, run_passes


class Net(nn.Module):
    """A convolution with batch norm, one behind a ReLU, a transposed one, and a linear layer on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.up = nn.Conv2d(8, 8, 3, groups=2), nn.ConvTranspose2d(8, 4, 2, groups=2)
        self.linear = nn.Linear(25, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.linear(self.up(self.second(x)).flatten(2))


def _quantized(captured, model: nn.Module, *inputs: torch.Tensor, **changes):
    subject = captured(model, *inputs)
    subject.ctx = replace(subject.ctx, precision="int8", **changes)
    run_passes(subject.gm, subject.ctx, (*PASSES, *PRECISION_PASSES))
    return subject


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_layers_are_quantized_and_others_are_told(captured):
    """Convolutions get one scale (uint8 behind a ReLU, through pooling), linear layers one for each row; transposed ones stay, with the reason.
    Weights are quantized with batch norm in them, and hoisted as int8."""
    torch.manual_seed(0)
    model = Net().eval()
    subject = _quantized(captured, model, torch.randn(2, 3, 12, 12))
    hoisted = hoist(subject.gm, subject.ctx.constants)
    operators = subject.operators(hoisted.main)
    assert operators["quantized_decomposed.quantize_per_tensor.tensor"] == 2
    assert operators["quantized_decomposed.quantize_per_token.default"] == 1
    assert operators["quantized_decomposed.dequantize_per_channel.default"] == 3
    kinds = [n.args[-1] for n in hoisted.main.graph.nodes if "quantize_per_tensor.tensor" in str(n.target)]
    assert kinds == [torch.int8, torch.int8, torch.uint8, torch.uint8]  # each pair in turn
    (left,) = subject.gm.meta["as_written"].values()
    assert (left.code, "transposed" in left.why) == (Reason.UNSUPPORTED, True)
    marks = [node.meta.get("precision") for node in subject.gm.graph.nodes if "convolution" in str(node.target)]
    assert marks == ["int8", "int8", None]
    assert 0 < _relative(subject.run()[0], subject.before[0]) < 0.03


@pytest.mark.parametrize(
    ("made", "dtype"),
    [
        (torch.relu, torch.uint8),
        (lambda x: torch.cat([torch.relu(x), functional.silu(torch.sigmoid(x))], -1), torch.uint8),
        (lambda x: torch.relu(x) * torch.sigmoid(x) + 1, torch.uint8),
        (lambda x: torch.softmax(x, -1).transpose(0, 1).clone(), torch.uint8),
        (lambda x: x.clamp(0, 6), torch.uint8),
        (lambda x: x.clamp(-1, 6), torch.int8),
        (lambda x: torch.relu(x) - 1, torch.int8),
        (lambda x: torch.relu(x) + x, torch.int8),
        (lambda x: torch.cat([torch.relu(x), x], -1), torch.int8),
        (functional.silu, torch.int8),
    ],
)
def test_rows_that_cannot_be_negative_are_unsigned(captured, made, dtype):
    """Unsigned rows are those of linear layers too, through what keeps signs; errors against float stay those of 8 bits."""
    torch.manual_seed(0)
    x = torch.randn(40, 64)
    layer = nn.Linear(made(x).shape[-1], 256).eval()
    subject = _quantized(captured, lambda x: layer(made(x)), x)
    (node,) = [
        n for n in subject.gm.graph.nodes if "quantize_per_token" in str(n.target) and "dequant" not in str(n.target)
    ]
    assert node.args[-1] is dtype
    assert 0 < _relative(subject.run()[0], subject.before[0]) < 0.03


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda x: functional.hardswish(torch.square(x)), True),
        (lambda x: torch.softmax(x, -1), True),
        (lambda x: torch.sqrt(x * x) ** 3, True),
        (lambda x: functional.gelu(functional.threshold(x, 0.0, 0.1)), True),
        (lambda x: functional.leaky_relu(functional.elu(functional.softplus(x))), True),
        (lambda x: torch.maximum(torch.relu(x).bfloat16().float(), x**2), True),
        (lambda x: functional.avg_pool2d(torch.relu(x), 2), True),
        (lambda x: torch.stack([functional.pixel_shuffle(x.abs(), 2)]).mean((-1, -2)), True),
        (lambda x: functional.adaptive_avg_pool2d(torch.sigmoid(x), 3), True),
        (lambda x: functional.max_pool3d(x.exp(), 2), True),
        (lambda x: functional.hardtanh(x, 0.0, 6.0), True),
        (lambda x: functional.hardtanh(x * 2), False),
        (lambda x: functional.hardswish(x * 2), False),
        (lambda x: functional.avg_pool2d(torch.relu(x), 2, divisor_override=-2), False),
        (lambda x: x**3, False),
        (lambda x: (-2.0) ** x.abs(), False),
        (lambda x: x.abs() * -1, False),
        (lambda x: functional.threshold(x, 0.0, -0.1), False),
        (lambda x: functional.threshold(x, -1.0, 0.1), False),
        (lambda x: functional.softplus(x, beta=-1.0), False),
        (lambda x: x.clamp(max=6), False),
        (lambda x: x.clamp(0, -1), False),
        (lambda x: (x.abs() * 1e5).int().square().float(), False),  # integers wrap
        (lambda x: torch.relu(x).view(torch.int32).view(torch.float32), False),
    ],
)
def test_operators_that_yield_nothing_negative(made, expected):
    """Operators as engines want them, undecomposed; and the values are as the table says."""
    x = torch.randn(4, 4, 8, 8)
    assert bool((made(x) >= 0).all()) or not expected
    (output,) = trace(made, x).graph.find_nodes(op="output")
    assert _is_never_negative(output.args[0]) is expected


@pytest.mark.parametrize(("bits", "bounds"), [(7, (-64, 64)), (8, (-127, 127))])
def test_weights_have_the_bits_of_the_context(captured, bits, bounds):
    """The machine that runs the pass does not count."""
    subject = _quantized(captured, Net().eval(), torch.randn(2, 3, 12, 12), weight_bits=bits)
    nodes = [n for n in subject.gm.graph.nodes if "quantize_per_channel" in str(n.target)]
    assert {tuple(n.args[4:6]) for n in nodes} == {bounds}


def test_one_quantized_tensor_serves_all_that_read_it(captured):
    """Queries, keys and values are computed from one quantized input."""
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 2048)]).eval()
    subject = _quantized(captured, lambda x: (model[0](x), torch.tanh(model[1](x))), torch.randn(40, 64))
    assert subject.operators()["quantized_decomposed.quantize_per_token.default"] == 1


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if not p.startswith("int8") or p.endswith("weights")])
def test_other_precisions_are_other_passes(captured, precision):
    """Nothing is quantized here under another setting."""
    subject = captured(Net().eval(), torch.randn(2, 3, 12, 12))
    subject.ctx = replace(subject.ctx, precision=precision)
    assert not quantize_layers(subject.gm, subject.ctx)


def test_what_stays_as_written_stays(captured):
    """A layer that the context names is not touched, nor one that the graph quantizes itself, nor a product of two activations, nor a training
    graph."""
    model, x = Net().eval(), torch.randn(2, 3, 12, 12)
    whole = _quantized(captured, model, x)
    names = [node.name for node in whole.gm.graph.nodes if node.meta.get("precision") == "int8"]
    less = _quantized(captured, model, x, as_written={names[0]: Refused(Reason.ACCURACY, "it is off")})
    assert [node.name for node in less.gm.graph.nodes if node.meta.get("precision") == "int8"] == names[1:]
    own = torch_hybrid_backend.quantize(model, [x])
    before = captured(own, x).operators()
    assert _quantized(captured, own, x).operators()["quantized_decomposed.quantize_per_tensor.default"] == 3
    assert before["quantized_decomposed.quantize_per_tensor.default"] == 3
    empty = _quantized(captured, model, x[:0])
    assert not any("quantized" in name for name in empty.operators())
    products = _quantized(captured, lambda a: a @ a.T, torch.randn(16, 16))
    assert not any("quantized" in name for name in products.operators())
    trained = captured(model, x, grad=True)
    assert trained.ctx.precision == "as-written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_setting(dtype):
    """`precision="int8"` compiles a plain model to what quantized layers compute; a changed parameter counts."""
    torch.manual_seed(0)
    model, x = Net().eval().to(dtype), torch.randn(2, 3, 12, 12, dtype=dtype)
    torch._dynamo.reset()
    # By estimates: what a busy machine would measure may speak for the model as it is written.
    compiled = torch.compile(model, backend="hybrid", options={"precision": "int8", "placement": "estimate"})
    with torch.no_grad():
        assert 0 < _relative(compiled(x).float(), model(x).float()) < 0.03
        model.linear.weight.mul_(-3)
        assert _relative(compiled(x).float(), model(x).float()) < 0.03
