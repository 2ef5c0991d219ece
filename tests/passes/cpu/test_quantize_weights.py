"""Weights of linear layers in 8 and 4 bits: which, how exactly, and what of it is made outside the call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.passes.test_hoist import call, fold
from tests.passes.values import verify_values
from torch_hybrid_backend.core.limits import LEAST_QUANTIZED_ELEMENTS
from torch_hybrid_backend.core.precision import ROW_BITS, SYMMETRIC, WeightForm
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.passes.cpu.merge_siblings import merge_siblings
from torch_hybrid_backend.passes.cpu.quantize_weights import GROUP, quantize_weights
from torch_hybrid_backend.passes.hoist import hoist
from torch_hybrid_backend.passes.verify import verify

FORMS = ["int8-weights", "int4-weights"]
_GROUPED = "quantized_decomposed.dequantize_per_channel_group.default"
_BY_CHANNEL = "quantized_decomposed.dequantize_per_channel.default"
# What a call keeps of a weight: scales and integers.
_KEPT = {
    "int8-weights": ["torch.float32", "torch.int8"],
    "int4-weights": ["torch.bfloat16", "torch.int8"],
}


def quantized(subject: Any, precision: str, weights: WeightForm = SYMMETRIC) -> list[torch.Tensor]:
    """The graph's results with quantized weights, checked to be a legal graph."""
    assert quantize_weights(subject.gm, replace(subject.ctx, precision=precision, weights=weights))
    verify(subject.gm, subject.contract)
    verify_values(subject.gm)
    outputs = [output.detach() for output in subject.run()]
    for output, before in zip(outputs, subject.before, strict=True):
        assert output.stride() == before.stride()
    return outputs


def by_hand(weight: torch.Tensor, precision: str, form: WeightForm = SYMMETRIC) -> torch.Tensor:
    """A weight (N, K) by way of 8 or 4 bits, in float64, element by element as the pass's document says."""

    def kept(scale: torch.Tensor) -> torch.Tensor:
        """Scales of groups that are kept as bfloat16, rounded up."""
        return (scale * (1 + 2**-9 + 2**-17)).bfloat16().double() if form.group_size or bits == 4 else scale

    bits = int(precision.removeprefix("int").removesuffix("-weights"))
    size = form.group_size or (GROUP if bits == 4 else weight.shape[1])
    if form.zero_points:
        groups, low, high = weight.double().reshape(-1, size), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        least, most = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
        scale = kept((most - least) / (high - low))
        zero = low - (least / scale).round()
        return (((groups / scale).round() + zero).clamp(low, high) - zero).mul(scale).view(weight.shape)
    groups = weight.double().reshape(-1, size)
    if bits == 8:
        scale = kept(groups.abs().amax(1, keepdim=True) / 127)
        return ((groups / scale).round().clamp(-127, 127) * scale).view(weight.shape)
    scale = kept(groups.gather(1, groups.abs().argmax(1, keepdim=True)) / -8)
    return ((groups / scale).round().clamp(-8, 7) * scale).view(weight.shape)


@pytest.mark.parametrize("precision", FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_linear_layer(captured, precision, dynamic):
    """Its product is with the weight that the document describes; the bias stays. The product says what it was converted to."""
    layer = nn.Linear(160, 128).eval()
    subject = captured(layer, torch.randn(5, 160), dynamic=dynamic)
    (got,) = quantized(subject, precision, WeightForm(activation_bits=16))
    x = next(value for value in subject.inputs if isinstance(value, torch.Tensor) and value.shape == (5, 160))
    want = x.double() @ by_hand(layer.weight.detach(), precision).T + layer.bias.detach().double()
    # One step of a weight at a rounding tie is 1e-2 of 160 products here.
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    marked = [node for node in subject.gm.graph.nodes if node.meta.get("precision")]
    assert [(node.meta["precision"], node.meta[ROW_BITS]) for node in marked] == [(precision[:4], 16)]


@pytest.mark.parametrize("precision", FORMS)
def test_how_far_weights_are_off(captured, precision):
    """By half a step, but for those beyond 7.5 steps of the other sign than the largest; channels of zeros stay zeros."""
    layer = nn.Linear(128, 128, bias=False).eval()
    with torch.no_grad():
        layer.weight[3] = 0
        layer.weight[5] *= 1e-20
        layer.weight[6, :32] = torch.tensor([1.0, -1.0]).repeat(16)
    subject = captured(layer, torch.eye(128))
    (got,) = quantized(subject, precision)
    w, step = layer.weight.detach().T, 1 / 254 if precision == "int8-weights" else 1 / 8
    largest = (
        w.abs().amax(0)
        if precision == "int8-weights"
        else w.view(4, GROUP, 128).abs().amax(1).repeat_interleave(GROUP, 0)
    )
    # Of 4 bits, a step is rounded up to bfloat16.
    allowed = 1.001 if precision == "int8-weights" else 1.001 * (1 + 2**-7)
    assert ((got - w).abs() <= allowed * step * largest).all()
    assert torch.equal(got[:, 3], torch.zeros(128))
    relative = float((got - w).square().mean().sqrt() / w.square().mean().sqrt())
    assert relative < (0.005 if precision == "int8-weights" else 0.08)


@pytest.mark.parametrize("precision", FORMS)
def test_integers_are_made_outside_the_call(captured, precision):
    """Integers are made of the parameter outside the call, and anew when it changes; what the call keeps has a quarter of its bytes, and the
    rest stays in the call."""
    layer = nn.Linear(256, 128, bias=False).eval()
    subject = captured(layer, torch.randn(3, 256))
    want = quantized(subject, precision)
    hoisted = hoist(subject.gm, subject.captured.static_inputs)
    folded = fold(hoisted, subject.inputs)
    torch.testing.assert_close(call(hoisted, subject.inputs, folded), want)
    assert sorted(str(value.dtype) for value in folded) == _KEPT[precision]
    scales = 4 * 128 if precision == "int8-weights" else 2 * 128 * 256 // GROUP
    assert sum(value.nbytes for value in folded) == 128 * 256 + scales
    dequantize = {_BY_CHANNEL: 1} if precision == "int8-weights" else {"_to_copy.default": 1, _GROUPED: 1}
    assert subject.operators(hoisted.main) == {**dequantize, "permute.default": 1, "mm.default": 1}
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(call(hoisted, subject.inputs), [2 * value for value in want])


@pytest.mark.parametrize("precision", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights(captured, dtype, precision):
    """Half weights are quantized as float32 is, and what is dequantized is rounded to their type again: in the call, which keeps integers."""
    layer = nn.Linear(256, 128, bias=False, dtype=dtype).eval()
    subject = captured(layer, torch.randn(3, 256, dtype=dtype))
    (got,) = quantized(subject, precision)
    assert got.dtype == dtype
    (x,) = (value for value in subject.inputs if value.shape == (3, 256))
    want = x.double() @ by_hand(layer.weight.detach().float(), precision).to(dtype).double().T
    # One step of a weight at a rounding tie, times x, is 0.02.
    torch.testing.assert_close(got.double(), want, rtol=0.01, atol=0.03)
    hoisted = hoist(subject.gm, subject.captured.static_inputs)
    folded = fold(hoisted, subject.inputs)
    assert sorted(str(value.dtype) for value in folded) == _KEPT[precision]


@pytest.mark.parametrize("precision", FORMS)
def test_weights_that_lie_by_column_and_tied_ones(captured, precision):
    """GPT-2's (K, N) weights are quantized by output channel too; an embedding reads the integers of the last layer that it is tied to."""
    table, w, b = torch.randn(256, 64, requires_grad=True), torch.randn(64, 256, requires_grad=True), torch.randn(256)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.w = nn.Parameter(table), nn.Parameter(w)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = functional.embedding(tokens, self.table)
            return functional.linear(torch.addmm(b, hidden, self.w)[:, :64], self.table)

    tokens = torch.tensor([3, 200, 7])
    subject = captured(Tied().eval(), tokens)
    (got,) = quantized(subject, precision)
    hidden = by_hand(table.detach(), precision)[tokens] @ by_hand(w.detach().T.contiguous(), precision).T + b.double()
    torch.testing.assert_close(
        got.double(), hidden[:, :64] @ by_hand(table.detach(), precision).T, rtol=1e-4, atol=1e-3
    )
    quantize = "quantized_decomposed.quantize_per_channel.default"
    operators = subject.operators()
    assert (operators["embedding.default"], operators[quantize]) == (1, 2)
    marked = [node.target for node in subject.gm.graph.nodes if node.meta.get("precision") == precision[:4]]
    assert len(marked) == 3
    assert marked.count(torch.ops.aten.embedding.default) == 1


@pytest.mark.parametrize("precision", FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_embeddings(captured, precision, dynamic):
    """Rows of a table are those of the dequantized one, which no call makes whole: it is computed in the call, of integers made outside."""
    table = nn.Embedding(300, 128).eval()
    tokens = torch.tensor([[3, 299, 7], [0, 1, 3]])
    subject = captured(lambda ids: (table(ids), table(ids.flip(0))), tokens, dynamic=dynamic)
    got = quantized(subject, precision)
    whole = by_hand(table.weight.detach(), precision).float()
    for rows, ids in zip(got, (tokens, tokens.flip(0)), strict=True):
        torch.testing.assert_close(rows, whole[ids], rtol=1e-6, atol=1e-6)
    hoisted = hoist(subject.gm, subject.captured.static_inputs)
    assert sorted(str(value.dtype) for value in fold(hoisted, subject.inputs)) == _KEPT[precision]


def test_tables_that_stay_as_written(captured):
    """Small tables do, those whose rows are no whole groups, those read in another way too, and those of indices known ahead."""
    small, odd, read, fixed = (
        nn.Embedding(10, 32),
        nn.Embedding(300, 100),
        nn.Embedding(300, 128),
        nn.Embedding(300, 128),
    )

    def function(ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        others = read.weight.sum(), x @ read.weight.T
        return small(ids % 10), odd(ids), read(ids), *others, fixed(torch.arange(3)) + x

    subject = captured(function, torch.tensor([3, 299, 7]), torch.randn(3, 128))
    quantized(subject, "int4-weights")
    marked = [node.target for node in subject.gm.graph.nodes if node.meta.get("precision")]
    assert marked == [torch.ops.aten.mm.default]


def test_one_weight_of_several_layers_is_quantized_once(captured):
    """Layers that share a parameter share its integers."""
    layer = nn.Linear(128, 128).eval()
    subject = captured(lambda x: layer(layer(x)), torch.randn(3, 128))
    quantized(subject, "int8-weights")
    assert subject.operators()["quantized_decomposed.quantize_per_channel.default"] == 1


def test_one_matrix_both_ways_is_two_weights(captured):
    """A product with a matrix and one with its transpose have other output channels, so other scales."""
    w = nn.Parameter(torch.randn(128, 128) * torch.linspace(0.01, 1, 128))
    subject = captured(lambda x: torch.mm(torch.mm(x, w), w.t()), torch.randn(3, 128))
    (got,) = quantized(subject, "int8-weights")
    first, second = (by_hand(rows.detach().contiguous(), "int8-weights") for rows in (w.t(), w))
    x = next(value for value in subject.inputs if value.shape == (3, 128))
    torch.testing.assert_close(got.double(), x.double() @ first.T @ second.T, rtol=1e-5, atol=1e-4)


def test_merged_products_are_quantized_whole(captured):
    """Queries, keys and values that were merged are one weight."""
    query, key = nn.Linear(128, 128).eval(), nn.Linear(128, 160).eval()
    subject = captured(lambda x: (query(x).sum(1), key(x).sum(1)), torch.randn(3, 128))
    assert merge_siblings(subject.gm, subject.ctx)
    quantized(subject, "int4-weights")
    assert subject.operators()[_GROUPED] == 1


def test_what_stays_as_written(captured):
    """Small layers, float64 ones, and for 4 bits rows that are no whole groups: each with a code. Products of activations are no layers."""
    small, wide, odd = nn.Linear(32, 32), nn.Linear(256, 256, dtype=torch.float64), nn.Linear(250, 256)
    assert small.weight.numel() < LEAST_QUANTIZED_ELEMENTS

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return small(x[:, :32]), wide(x.double()), odd(x[:, :250]), x @ y

    subject = captured(function, torch.randn(3, 256), torch.randn(256, 256))
    assert not quantize_weights(subject.gm, replace(subject.ctx, precision="int4-weights"))
    codes = sorted(refused.code for refused in subject.gm.meta["as_written"].values())
    assert codes == [Reason.SLOWER, Reason.UNSUPPORTED, Reason.UNSUPPORTED]
    assert quantize_weights(subject.gm, replace(subject.ctx, precision="int8-weights"))
    assert len(subject.gm.meta["as_written"]) == 2 + 1  # the odd one's code stays from before


def test_layers_that_must_stay(captured):
    """A layer that the context names is left alone; others are not."""
    first, second = nn.Linear(128, 128).eval(), nn.Linear(128, 128).eval()
    subject = captured(lambda x: second(first(x)), torch.randn(3, 128))
    name = next(node.name for node in subject.gm.graph.nodes if node.target is torch.ops.aten.addmm.default)
    subject.ctx = replace(subject.ctx, as_written={name: Refused(Reason.ACCURACY, "its error is the largest")})
    quantized(subject, "int8-weights")
    assert subject.operators()[_BY_CHANNEL] == 1
    assert not subject.gm.meta["as_written"]


@pytest.mark.parametrize(
    ("precision", "form"),
    [
        ("int4-weights", WeightForm(128)),
        ("int4-weights", WeightForm(zero_points=True)),
        ("int8-weights", WeightForm(64)),
        ("int8-weights", WeightForm(zero_points=True)),
        ("int8-weights", WeightForm(32, zero_points=True)),
    ],
    ids=str,
)
def test_forms_of_weights(captured, precision, form):
    """Groups of any size, and zero points, as the document says; of values that are all positive, zero points halve the error."""
    layer = nn.Linear(256, 128).eval()
    with torch.no_grad():
        layer.weight.abs_()
    subject = captured(layer, torch.randn(5, 256))
    (got,) = quantized(subject, precision, form)
    x = next(value for value in subject.inputs if isinstance(value, torch.Tensor) and value.shape == (5, 256))
    weight = layer.weight.detach()
    want = x.double() @ by_hand(weight, precision, form).T + layer.bias.detach().double()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    plain, moved = (
        (by_hand(weight, precision, WeightForm(form.group_size, zeros)) - weight).abs().amax() for zeros in (0, 1)
    )
    assert moved < 0.6 * plain


def test_rows_that_are_no_whole_groups(captured):
    """Rows that are no whole groups stay as written, under 8 bits too where groups are asked for; the code says of what size."""
    subject = captured(nn.Linear(160, 128), torch.randn(3, 160))
    ctx = replace(subject.ctx, precision="int8-weights", weights=WeightForm(128))
    assert not quantize_weights(subject.gm, ctx)
    (refused,) = subject.gm.meta["as_written"].values()
    assert refused.code == Reason.UNSUPPORTED
    assert "groups of 128" in refused.why


@pytest.mark.parametrize("precision", FORMS)
@pytest.mark.parametrize("zero_points", [False, True])
def test_nan_stays_in_its_channel(captured, precision, zero_points):
    """A weight that is NaN or infinite makes its channel NaN and no other; nothing is raised."""
    layer = nn.Linear(128, 128, bias=False).eval()
    with torch.no_grad():
        layer.weight[2, 5], layer.weight[9, 100] = torch.nan, torch.inf
    subject = captured(layer, torch.randn(3, 128))
    (got,) = quantized(subject, precision, WeightForm(zero_points=zero_points))
    assert got.isnan().any(0).nonzero().flatten().tolist() == [2, 9]


def test_other_settings_and_training_change_nothing(captured):
    """Graphs stay as written under other settings, in half, and in graphs whose weights change in every step."""
    layer = nn.Linear(256, 256)
    subject = captured(layer, torch.randn(3, 256))
    for precision in ("as-written", "bf16", "int8"):
        assert not quantize_weights(subject.gm, replace(subject.ctx, precision=precision))
    trained = captured(layer, torch.randn(3, 256), grad=True)
    assert not quantize_weights(trained.gm, replace(trained.ctx, precision="int8-weights"))
