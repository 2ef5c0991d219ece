"""Casts around what is converted: few, at the borders, and unseen by whoever calls the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  # registers the operators

from tests.passes.values import verify_values
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.passes.pipeline import PASSES, PRECISION_PASSES, run_passes
from torch_hybrid_backend.passes.precision import lists
from torch_hybrid_backend.passes.precision.conversion import conversion
from torch_hybrid_backend.passes.precision.half import half

aten = torch.ops.aten


def _convert(subject, precision: str = "bf16", **changes):
    """The graph in a precision, legal and with results as near as that lets them be; its counts."""
    context = dataclasses.replace(subject.ctx, precision=precision, **changes)
    run_passes(subject.gm, subject.ctx, PASSES)
    run_passes(subject.gm, context, PRECISION_PASSES)
    verify_values(subject.gm)
    torch.testing.assert_close(subject.run(), subject.before, rtol=0.05, atol=0.05, check_stride=True)
    return conversion(subject.gm, context)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = (self.second(x) + x).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_two_casts_for_a_network(captured, precision: str, dynamic: bool):
    """The input is cast once, the output once; weights apart, after the batch norm is folded into them in float32."""
    found = _convert(captured(_Block().eval(), torch.randn(2, 3, 8, 8), dynamic=dynamic), precision)
    name = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    assert found.converted == ((name, 7),)
    assert (found.operators, found.casts, found.weight_casts, found.left) == (7, 2, 6, ())


def test_a_value_is_cast_once(captured):
    """However many read it, in either precision."""
    linear = nn.Linear(6, 6)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.sin()
        y = linear(x) + linear(x.cos())
        return y.exp(), y.cos(), x.exp()

    subject = captured(function, torch.randn(4, 6))
    found = _convert(subject)
    assert found.casts == 2 + 2  # to the half type: x, its cosine; back: both products
    assert subject.operators()["_to_copy.default"] == found.casts + found.weight_casts


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x @ x)[:, 1:3],  # strides of a larger tensor
        lambda x: (x @ x).t(),
        lambda x: ((x @ x).t()[1:], x.t() @ x),
        lambda x: (x.view(-1), x.view(-1).view(6, 6) @ x),  # shares an input's memory
        lambda x: (x.relu(), x.relu() @ x),
        lambda x: (x @ x).unsqueeze(0).expand(3, 6, 6),
        lambda x: aten.convolution(
            x.expand(2, 3, 6, 6), x[:3, :3].expand(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        ),
    ],
)
def test_outputs_are_as_promised(captured, function: Callable[..., object]):
    """Outputs keep dtype, strides and memory of their own; what the graph only passes on is not rounded."""
    subject = captured(function, torch.randn(6, 6).softmax(-1))
    assert _convert(subject).converted
    for before, after in zip(subject.before, subject.run(), strict=True):
        if torch.equal(before, subject.inputs[0].relu()):
            torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.double() @ x.double(),
        lambda x: x.long() @ x.long(),
        lambda x: x.bfloat16() @ x.bfloat16(),
        lambda x: x.sum(0, dtype=torch.float32),
        lambda x: x.sin() + 1,
    ],
)
def test_graphs_that_stay(captured, function: Callable[..., object]):
    """Other dtypes are what the model asks for, and nothing gains where there is no product."""
    subject = captured(function, torch.rand(6, 6))
    context = dataclasses.replace(subject.ctx, precision="bf16")
    assert not half(subject.gm, context)
    assert conversion(subject.gm, context).converted == ()


def test_as_written_and_integer_precisions_are_not_for_this_pass(captured):
    """Each precision has its own pass; both halves of int8+bf16 do their part."""
    for precision, changes in (("as-written", False), ("int8", False), ("int4-weights", False), ("int8+bf16", True)):
        subject = captured(lambda x: x @ x, torch.rand(6, 6))
        assert half(subject.gm, dataclasses.replace(subject.ctx, precision=precision)) is changes


def test_quantized_layers_stay_so(captured):
    """A reader of dequantized values is not cast: engines multiply integers there. The layers around it are converted."""
    quantized = torch.ops.quantized_decomposed

    def function(x: torch.Tensor) -> torch.Tensor:
        y = quantized.quantize_per_tensor((x @ x).relu(), 0.1, 0, -128, 127, torch.int8)
        y = quantized.dequantize_per_tensor(y, 0.1, 0, -128, 127, torch.int8)
        return (y @ y.t()) @ x

    subject = captured(function, torch.rand(6, 6))
    context = dataclasses.replace(subject.ctx, precision="int8+bf16")
    run_passes(subject.gm, context, PRECISION_PASSES)
    verify_values(subject.gm)
    dtypes = [node.meta["val"].dtype for node in subject.gm.graph.nodes if node.target is aten.mm.default]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert set(conversion(subject.gm, context).converted) == {("bfloat16", 3), ("int8", 1)}


def test_training_graphs_are_as_written(captured):
    """Training graphs have no precision to begin with."""
    subject = captured(nn.Linear(6, 6), torch.rand(6, 6), grad=True)
    assert subject.ctx.of(subject.captured, "bf16").precision == "as-written"


def test_who_reads_a_form_alone_needs_no_cast(captured):
    """Sizes that are known only at run time, and fills in a dtype of their own, are the same of half values."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ x.t()
        first = torch.arange(y.shape[0] + y.shape[1]).float() * torch.ones_like(y, dtype=torch.float64).sum()
        return (y @ y).view(y.shape[0] * y.shape[1]), first

    found = _convert(captured(function, torch.rand(5, 6), dynamic=True))
    assert (found.casts, found.converted) == (2, (("bfloat16", 2),))


def test_layers_that_are_to_stay(captured):
    """Layers that are to stay compute in float32, and are told with the reason that was given for them."""
    linear = nn.Linear(6, 6)
    subject = captured(lambda x: linear(linear(x).relu()), torch.rand(4, 6))
    why = Refused(Reason.ACCURACY, "its results are off")
    found = _convert(subject, as_written={"addmm": why})
    (left,) = found.left
    assert (left.name, left.operator, left.code, left.why) == ("addmm", "aten.addmm.default", why.code, why.why)
    assert found.converted == (("bfloat16", 2),)
    assert next(n for n in subject.gm.graph.nodes if n.name == "addmm").meta["val"].dtype == torch.float32


def test_a_layer_that_is_merely_slow_spoils_nothing_behind_it(captured):
    """Only it computes in float32; one that is off has what reads it do so too, where small differences count."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)

    def converted(code: Reason) -> int:
        subject = captured(lambda x: second(first(x) + second(x)), torch.rand(4, 6))
        return dict(_convert(subject, as_written={"addmm": Refused(code, "")}).converted)["bfloat16"]

    assert (converted(Reason.SLOWER), converted(Reason.ACCURACY)) == (3, 2)


def test_what_cannot_be_converted_says_why(captured, monkeypatch: pytest.MonkeyPatch):
    """A layer that raises for half values stays as written, with a code; those around it are converted."""
    monkeypatch.setattr(
        lists, "_READ_AS_WRITTEN", {aten.bmm: ("mat2",)}
    )  # a product of half values and of float32: PyTorch has none
    found = _convert(captured(lambda x: torch.bmm((x @ x)[None], x.cos()[None]), torch.rand(6, 6)))
    assert {(layer.operator, layer.code) for layer in found.left} == {("aten.bmm.default", Reason.UNSUPPORTED)}
    assert "it does not take bfloat16: expected scalar type" in found.left[0].why
    assert found.converted == (("bfloat16", 1),)
