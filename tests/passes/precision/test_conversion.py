"""Counts of what was converted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from torch_hybrid_backend.core.plan import Conversion, Unconverted
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.graph.precision import converted_to
from torch_hybrid_backend.graph.source import with_module_stack
from torch_hybrid_backend.passes.pipeline import PASSES, PRECISION_PASSES, run_passes
from torch_hybrid_backend.passes.precision.conversion import conversion, mark_sites, quantized_as_written
from torch_hybrid_backend.passes.precision.lists import is_layer


def test_counts(captured) -> None:
    """Operators that compute in a call, how many carry which precision, casts of the call and of weights, and the layers that stayed, with
    their reasons: the pass's own and those that it was given."""
    linear = nn.Linear(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = linear(x.bfloat16().float())
        return (y.sin() @ y.cos().t()) @ linear.weight.bfloat16().float().neg()

    subject = captured(function, torch.randn(4, 4))
    nodes = {node.name: node for node in subject.gm.graph.nodes}
    nodes["addmm"].meta["precision"], nodes["sin"].meta["precision"] = "int8", "bfloat16"
    others = ["mm", "mm_1"]
    subject.gm.meta["as_written"] = {
        others[0]: Refused(Reason.UNCALIBRATED, "no ranges"),
        "gone": Refused(Reason.SLOWER, ""),
    }
    given = {
        others[1]: Refused(Reason.ACCURACY, "off"),
        "addmm": Refused(Reason.EXCLUDED, "it is converted all the same"),
    }
    context = dataclasses.replace(subject.ctx, precision="int8+bf16", as_written=given)

    found = conversion(subject.gm, context)
    assert isinstance(found, Conversion)
    assert (found.precision, found.tolerance, found.error) == ("int8+bf16", 0.1, None)
    assert found.operators == 5  # the layer, sine and cosine, and products; not what is computed of weights alone
    assert sorted(found.converted) == [("bfloat16", 1), ("int8", 1)]
    assert (found.casts, found.weight_casts) == (2, 2)
    assert [(layer.name, layer.code) for layer in found.left] == [
        (others[0], Reason.UNCALIBRATED),
        (others[1], Reason.ACCURACY),
    ]
    assert all(isinstance(layer, Unconverted) and "test_conversion.py" in layer.source for layer in found.left)
    assert conversion(subject.gm, context, 0.5).tolerance == 0.5


def test_sites_are_named_as_their_modules(captured) -> None:
    """In the order of their calls; each call of a module begins anew, and what is no call of a layer has no name."""
    subject = captured(lambda x: torch.softmax(x @ x, 0) @ x @ x.neg(), torch.randn(4, 4))
    nodes = {node.name: node for node in subject.gm.graph.nodes}
    for name, call in (("mm", "a.b"), ("mm_1", "a.b"), ("mm_2", "a.b@1")):
        with_module_stack(nodes[name], [(call, "")])
    mark_sites(subject.gm)
    assert {name: node.meta.get("site") for name, node in nodes.items() if "mm" in name} == {
        "mm": "a.b",
        "mm_1": "a.b#2",
        "mm_2": "a.b",
    }
    assert "site" not in nodes["neg"].meta


def test_graphs_that_quantize_themselves(captured) -> None:
    """Layers that they leave in floating point have a code; attention is not quantized at all. Others have no counts."""
    from torch_hybrid_backend.graph.quantization import call, tensor, weight

    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(tensor(call, x, -1.0, 1.0), weight(call, first.weight, 0, 8), first.bias)
        y = second(y)[None, None]
        return nn.functional.scaled_dot_product_attention(y, y, y)

    subject = captured(function, torch.rand(4, 8))
    found = quantized_as_written(subject.gm, subject.ctx)
    assert found is not None
    assert (found.precision, found.error, found.converted) == ("as-written", None, (("int8", 1),))
    assert (found.casts, found.weight_casts) == (1, 1)
    assert [(layer.operator.split(".")[1], layer.code) for layer in found.left] == [
        ("addmm", Reason.EXCLUDED),
        ("_scaled_dot_product_flash_attention_for_cpu", Reason.UNSUPPORTED),
    ]
    plain = captured(second, torch.rand(4, 8))
    assert quantized_as_written(plain.gm, plain.ctx) is None


class _Attention(nn.Module):
    """Linear layers around attention, once as PyTorch's operator and once written out."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 3 * 32), nn.Linear(32, 160)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        z = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return self.out((y + z).transpose(1, 2).reshape(16, 32))


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "int8+bf16", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_each_layer_is_converted_or_has_a_code(captured, precision: str, dtype: torch.dtype) -> None:
    """Also those that no pass considers: attention, products of activations, other dtypes."""
    subject = captured(_Attention().eval().to(dtype), torch.randn(1, 16, 32, dtype=dtype))
    context = dataclasses.replace(subject.ctx, precision=precision)
    run_passes(subject.gm, context, (*PASSES, *PRECISION_PASSES))
    found = conversion(subject.gm, context)
    layers = [node for node in subject.gm.graph.nodes if is_layer(node)]
    assert len(layers) == 5
    left = {layer.name: layer for layer in found.left}
    assert left.keys() == {node.name for node in layers if converted_to(node) is None}
    assert all(layer.why for layer in found.left)
    if dtype == torch.float64:
        assert len(left) == len(layers)
    elif precision == "int8":
        assert {layer.code for layer in found.left} == {Reason.UNSUPPORTED}
        whys = {layer.operator.split(".")[1]: layer.why for layer in found.left}
        assert whys["bmm"] == "aten.bmm.default is not quantized"
        assert whys["_scaled_dot_product_flash_attention_for_cpu"] == "attention is not quantized"
        assert len(left) == len(layers) - 2
    elif not precision.startswith("int8-"):
        assert not left


def test_products_of_activations_are_told(captured) -> None:
    """A matrix product of two activations, or of one whose weight is the left operand, is told: `int8` says why it is as written."""
    weight = nn.Parameter(torch.randn(16, 16))
    subject = captured(lambda x: (x @ x.neg(), weight @ x), torch.randn(16, 16))
    context = dataclasses.replace(subject.ctx, precision="int8")
    run_passes(subject.gm, context, (*PASSES, *PRECISION_PASSES))
    found = conversion(subject.gm, context)
    assert [layer.code for layer in found.left] == [Reason.UNSUPPORTED] * 2
    assert all("not a constant weight" in layer.why for layer in found.left)


def test_layers_in_their_own_half_precision_are_not_left(captured) -> None:
    """A model in bfloat16 computes as `bf16` asks; of `fp16` and `int8` its layers that stay are told."""
    subject = captured(lambda x: x @ x, torch.randn(16, 16).bfloat16())
    told = {
        p: conversion(subject.gm, dataclasses.replace(subject.ctx, precision=p)).left for p in ("bf16", "fp16", "int8")
    }
    assert told["bf16"] == ()
    assert "computes in bfloat16" in told["fp16"][0].why
    assert told["int8"][0].code is Reason.UNSUPPORTED


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "bf16"])
def test_a_graph_that_writes_in_place_says_so(captured, precision: str) -> None:
    """No pass converts anything of it; each layer has that reason."""
    subject = captured(nn.Linear(128, 128), torch.randn(4, 128))
    (layer,) = (node for node in subject.gm.graph.nodes if is_layer(node))
    with subject.gm.graph.inserting_after(layer):
        written = subject.gm.graph.call_function(torch.ops.aten.copy_.default, (layer, layer))
    written.meta["val"] = layer.meta["val"]
    context = dataclasses.replace(subject.ctx, precision=precision)
    run_passes(subject.gm, context, PRECISION_PASSES)
    (left,) = conversion(subject.gm, context).left
    assert (left.code, left.why) == (Reason.UNSUPPORTED, "the graph writes in place: nothing of it is converted")
