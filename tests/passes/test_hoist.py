"""Values that depend on parameters alone leave the call, and follow the parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.distributed
from torch import nn

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend import compress
from torch_hybrid_backend.core.hoisted_inputs import CallInput
from torch_hybrid_backend.passes.hoist import Hoisted, hoist, partition_fold
from torch_hybrid_backend.passes.pipeline import run_passes


def call(hoisted: Hoisted, inputs: list[Any], folded: tuple[Any, ...] | None = None) -> list[Any]:
    if folded is None:
        folded = fold(hoisted, inputs)
    sources = hoisted.inputs.main
    return list(hoisted.main(*(inputs[s.position] if isinstance(s, CallInput) else folded[s.index] for s in sources)))


def fold(hoisted: Hoisted, inputs: list[Any]) -> tuple[Any, ...]:
    return hoisted.fold(*(inputs[k] for k in hoisted.inputs.fold)) if hoisted.fold is not None else ()


def hoisted_of(subject) -> Hoisted:
    run_passes(subject.gm, subject.ctx)
    hoisted = hoist(subject.gm, subject.ctx.constants, subject.ctx.keeps_packed)
    hoisted.main.graph.lint()
    torch.testing.assert_close(call(hoisted, subject.inputs), subject.before, rtol=1e-5, atol=1e-5, check_stride=True)
    return hoisted


def constants_of(hoisted: Hoisted) -> list[bool]:
    return [bool(node.meta.get("constant")) for node in hoisted.main.graph.find_nodes(op="placeholder")]


def test_transposed_weights_are_views(captured):
    """A linear layer's transposed weight is hoisted as a view: no second copy of the weight."""
    model = nn.Linear(4, 3).eval()
    subject = captured(model, torch.randn(2, 4))
    hoisted = hoisted_of(subject)
    assert subject.operators(hoisted.main) == {"addmm.default": 1}
    (transposed,) = fold(hoisted, subject.inputs)
    assert transposed.data_ptr() == model.weight.data_ptr()
    assert constants_of(hoisted) == [True, False, True]  # bias, x, folded weight


def test_parts_of_a_fold_have_no_work_in_common(captured):
    """Large results are parts of their own, with what is made on the way to them; views are one, small results another."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.other = (nn.Parameter(torch.randn(600, 600)) for _ in range(2))
            self.small = nn.Parameter(torch.randn(600))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = self.large * 2
            return x @ doubled @ (doubled + 1) @ (self.other * self.small) @ self.other.t() * (self.small + 1)

    subject = captured(Layers().eval(), torch.randn(3, 600))
    hoisted = hoist(subject.gm, subject.ctx.constants)
    parts = partition_fold(hoisted.fold)
    assert [(part.is_view, len(part.gives)) for part in parts] == [(True, 1), (False, 1), (False, 2), (False, 1)]
    constants = [subject.inputs[k] for k in hoisted.inputs.fold]
    whole = hoisted.fold(*constants)
    results = [part.graph(*(constants[k] for k in part.reads)) for part in parts]
    found = {n: y for part, made in zip(parts, results, strict=True) for n, y in zip(part.gives, made, strict=True)}
    assert found.keys() == set(range(len(whole)))
    for number, value in enumerate(whole):
        torch.testing.assert_close(found[number], value, rtol=0, atol=0)


def test_changed_parameters_give_changed_results(captured):
    """Folding again after an in-place update gives the updated model's result."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    x = torch.randn(2, 3, 6, 6)
    subject = captured(model, x)
    hoisted = hoisted_of(subject)
    stale = fold(hoisted, subject.inputs)
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[1].running_mean.add_(1)
        torch.testing.assert_close(call(hoisted, subject.inputs)[0], model(x), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(call(hoisted, subject.inputs, stale)[0], model(x))


def test_masks_are_folded_and_main_has_no_attributes(captured):
    """Lifted and folded constants come to main as inputs."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -1.0) * torch.tensor([1.0, 2.0, 3.0, 4.0])

    hoisted = hoisted_of(captured(function, torch.randn(4, 4)))
    assert not hoisted.main.graph.find_nodes(op="get_attr")
    assert hoisted.inputs.fold == ()
    assert constants_of(hoisted) == [False, True, True]


def test_large_growth_stays(captured):
    """An outer product of two vectors is not kept for the life of the model."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(1000)), nn.Parameter(torch.randn(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.a.exp().unsqueeze(1) * self.b).sin()

    subject = captured(Outer(), torch.randn(1000, 1000))
    hoisted = hoisted_of(subject)
    assert sum(value.numel() for value in fold(hoisted, subject.inputs)) <= 2000
    assert subject.operators(hoisted.main)["sin.default"] == 1


def test_expand_stays_in_main(captured):
    """A broadcast parameter is not handed over expanded."""

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)

    subject = captured(Token(), torch.randn(3, 2, 4))
    hoisted = hoisted_of(subject)
    assert subject.operators(hoisted.main)["expand.default"] == 1
    assert hoisted.fold is None


def test_returned_values_stay_fresh(captured):
    """A returned function of the parameters is computed in every call."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scaled = self.weight.exp() * 2
            return x * scaled, scaled

    subject = captured(Scaled(), torch.randn(4))
    hoisted = hoisted_of(subject)
    folded = fold(hoisted, subject.inputs)
    first, second = (call(hoisted, subject.inputs, folded)[1] for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_training_graphs_hoist_constants_only(captured):
    """With parameters that change in each step nothing of them is folded."""
    hoisted = hoisted_of(captured(nn.Linear(4, 3), torch.randn(2, 4), grad=True))
    assert hoisted.fold is None
    assert not any(constants_of(hoisted))
    assert hoisted.inputs.main == tuple(CallInput(k) for k in range(3))


def test_symbolic_sizes_stay_inputs(captured):
    """SymInt placeholders pass through in their places."""
    subject = captured(nn.Linear(4, 3).eval(), torch.randn(5, 4), dynamic=True)
    hoisted = hoisted_of(subject)
    values = [node.meta["val"] for node in hoisted.main.graph.find_nodes(op="placeholder")]
    assert sum(isinstance(value, torch.SymInt) for value in values) == 1


def test_random_operators_stay(captured):
    """Dropout on a parameter is drawn in every call."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * nn.functional.dropout(self.weight, 0.5)

    subject = captured(Dropped(), torch.ones(50))
    run_passes(subject.gm, subject.ctx)
    hoisted = hoist(subject.gm, subject.ctx.constants)
    assert subject.operators(hoisted.main)["native_dropout.default"] == 1


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_collectives_of_parameters_stay():
    """All ranks gather a parameter in every call: only what comes before may be folded, for it concerns this rank alone."""

    def program(w, x):
        c10d = torch.ops._c10d_functional
        return x @ c10d.wait_tensor(c10d.all_gather_into_tensor(w.sin(), 2, "0")).t()

    gm = trace(program, torch.ones(3, 4), torch.ones(2, 4))
    hoisted = hoist(gm, frozenset({"w_1"}))
    assert [str(n.target) for n in hoisted.fold.graph.nodes if n.op == "call_function"] == ["aten.sin.default"]
    main = [str(n.target) for n in hoisted.main.graph.nodes if n.op == "call_function"]
    assert main[:2] == ["_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"]


def test_what_is_returned_through_a_hidden_view_stays():
    """Each call returns memory of its own, also where the result is an `_unsafe_view`, whose schema hides that it shares memory."""
    gm = trace(lambda w, x: (torch.ops.aten._unsafe_view(w.sin(), [12]), x.cos()), torch.ones(3, 4), torch.ones(2))
    hoisted = hoist(gm, frozenset({"w_1"}))
    assert hoisted.fold is None


class Quantized(nn.Module):
    """A convolution with weights quantized per channel, written with torch.ao's operators or out in full, and batch norm."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.written_out = written_out
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.conv.weight
        scales = weight.abs().amax((1, 2, 3)) / 127
        if self.written_out:
            narrow = torch.clamp(torch.round(weight / scales.view(-1, 1, 1, 1)), -127, 127).to(torch.int8)
            weight = narrow.float() * scales.view(-1, 1, 1, 1)
        else:
            quantized, zeros = torch.ops.quantized_decomposed, torch.zeros(4, dtype=torch.int64)
            narrow = quantized.quantize_per_channel.default(weight, scales, zeros, 0, -127, 127, torch.int8)
            weight = quantized.dequantize_per_channel.default(narrow, scales, zeros, 0, -127, 127, torch.int8)
        return self.norm(torch.nn.functional.conv2d(x, weight, self.conv.bias))


@pytest.mark.parametrize("written_out", [False, True])
def test_weights_are_quantized_once_and_dequantized_where_they_are_read(captured, written_out):
    """A quantized weight is kept with 8 bits an element; batch norm is not folded into its dequantized form. A changed parameter is
    quantized anew."""
    model = Quantized(written_out).eval()
    x = torch.randn(2, 3, 6, 6)
    subject = captured(model, x)
    hoisted = hoisted_of(subject)
    kept = fold(hoisted, subject.inputs)
    assert [value.dtype for value in kept if value.numel() == model.conv.weight.numel()] == [torch.int8]
    operators = subject.operators(hoisted.main)
    assert operators["convolution.default"] == 1
    widened = "_to_copy.default" if written_out else "quantized_decomposed.dequantize_per_channel.default"
    assert operators[widened] == 1
    with torch.no_grad():
        model.conv.weight.mul_(-1.5)
    torch.testing.assert_close(call(hoisted, subject.inputs)[0], model(x), rtol=1e-5, atol=1e-5)


class Shared(nn.Module):
    """Two weights of shared values, as `compress` makes them; one of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(128, 160), nn.Conv1d(8, 64, 32))
        self.linear, self.convolution = compress(layers, clusters=16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.convolution(y)


@pytest.mark.parametrize("keeps_packed", [True, False])
def test_weights_of_products_are_looked_up_where_they_are_read(captured, keeps_packed):
    """A linear layer's weight is kept as indices of 8 bits where kernels read these packed; else, and of a convolution, as floats."""
    model = Shared().eval()
    subject = captured(model, torch.randn(3, 128), torch.randn(2, 8, 40))
    subject.ctx = replace(subject.ctx, keeps_packed=lambda weights: keeps_packed)
    hoisted = hoisted_of(subject)
    kept = fold(hoisted, subject.inputs)
    assert sorted((str(value.dtype), value.numel()) for value in kept) == [
        ("torch.float32", 64 * 8 * 32),
        ("torch.uint8" if keeps_packed else "torch.float32", 128 * 160),
    ]
    assert subject.operators(hoisted.main)["index_select.default"] == int(keeps_packed)
    torch.testing.assert_close(call(hoisted, subject.inputs), subject.before, rtol=1e-5, atol=1e-5)


def test_tables_that_no_kernel_reads_in_place(captured):
    """Tables that are looked up by wide integers, or read by others than products, are made ahead."""
    table, places = nn.Parameter(torch.randn(16)), torch.randint(0, 16, (128 * 160,))

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table
            self.register_buffer("places", places)
            self.register_buffer("bytes", places.to(torch.uint8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            weight = self.table.index_select(0, self.places).view(128, 160)
            narrow = self.table.index_select(0, self.bytes.int()).view(128, 160)
            return x @ weight, narrow.exp() * x[:1, :1], self.table[self.bytes.long()[:4]]

    subject = captured(Wide().eval(), torch.randn(3, 128))
    subject.ctx = replace(subject.ctx, keeps_packed=lambda weights: True)
    hoisted = hoisted_of(subject)
    assert "index_select.default" not in subject.operators(hoisted.main)
    torch.testing.assert_close(call(hoisted, subject.inputs), subject.before, rtol=1e-5, atol=1e-5)
