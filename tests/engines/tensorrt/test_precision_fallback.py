"""Accumulation precisions: those of a region, what each computes in float32, and what TensorRT's builder makes of that. Engines are built,
never run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.engines.tensorrt.regions_for_tests import region
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest, SerializedEngine, build
from torch_hybrid_backend.engines.tensorrt.precision_fallback import (
    AccumulationPrecision,
    accumulation_precisions,
    keeps_tf32_exact,
    widen,
)

F = torch.nn.functional
aten = torch.ops.aten
HALF = [torch.float16, torch.bfloat16]


def attention(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    heads = F.linear(x, w, b).view(2, 16, 4, 16).transpose(1, 2)
    mixed = (heads @ heads.transpose(-1, -2) * 0.25).softmax(-1) @ heads
    return F.layer_norm(x + mixed.transpose(1, 2).reshape(2, 16, 64), (64,), g, h)


def convolution(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(F.batch_norm(F.group_norm(F.conv2d(x, w), 2), m, v).relu(), 1)


SHAPES: dict[Callable[..., torch.Tensor], Sequence[tuple[int, ...]]] = {
    attention: ((2, 16, 64), (64, 64), (64,), (64,), (64,)),
    convolution: ((2, 4, 16, 16), (8, 4, 3, 3), (8,), (8,)),
}


def inputs_of(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    variance = len(SHAPES[function]) - 1 if function is convolution else None
    made = [torch.randn(shape) * 0.5 for shape in SHAPES[function]]
    return [(each.abs() + 1 if i == variance else each).to(dtype) for i, each in enumerate(made)]


def layers_on(made: Region, accumulation: AccumulationPrecision) -> list[str]:
    request = BuildRequest.of(made, {}, accumulation=accumulation, tf32=keeps_tf32_exact(made, accumulation))
    return list(SerializedEngine.from_bytes(build(request.to_bytes(), lambda done: True)).layers)


@pytest.mark.tensorrt
def test_a_region_has_the_precisions_that_make_a_difference() -> None:
    """Regions of float32 have one precision. Regions of half types have more for products and for layers, and one if they only move or add
    values."""
    x = torch.ones(8, 8)
    cases: list[tuple[Callable[..., Any], torch.dtype, tuple[AccumulationPrecision, ...]]] = [
        (lambda x: (x @ x).softmax(-1), torch.float32, (AccumulationPrecision.AS_WRITTEN,)),
        (
            lambda x: x @ x + 1,
            torch.float16,
            (AccumulationPrecision.AS_WRITTEN, AccumulationPrecision.FP32_ACCUMULATION),
        ),
        (
            lambda x: x.softmax(-1),
            torch.bfloat16,
            (AccumulationPrecision.AS_WRITTEN, AccumulationPrecision.FP32_LAYERS),
        ),
        (lambda x: F.gelu(x @ x), torch.bfloat16, tuple(AccumulationPrecision)),
        (lambda x: (x + x).relu().t(), torch.float16, (AccumulationPrecision.AS_WRITTEN,)),
    ]
    for function, dtype, precisions in cases:
        assert accumulation_precisions(region(function, x.to(dtype))) == precisions


@pytest.mark.tensorrt
def test_tf32_loses_nothing_of_widened_half_types() -> None:
    """Products that accumulate in float32 may use TF32. Beside a product of float32 they may not, as an engine has one flag."""
    x = torch.ones(8, 8)
    half = region(lambda x: x @ x, x.half())
    mixed = region(lambda x, y: (x @ x, y @ y), x.half(), x)
    assert keeps_tf32_exact(half, AccumulationPrecision.FP32_ACCUMULATION)
    assert not keeps_tf32_exact(half, AccumulationPrecision.AS_WRITTEN)
    assert not keeps_tf32_exact(mixed, AccumulationPrecision.FP32_ACCUMULATION)
    a = (torch.randn(64, 64) * 1e-3).half()
    lost = torch.tensor((1 << 13) - 1, dtype=torch.int32)  # bits of float32 that TF32 has not
    assert not (a.float().view(torch.int32) & lost).any()
    assert not (a.bfloat16().float().view(torch.int32) & lost).any()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("function", SHAPES)
def test_no_precision_is_further_from_float64(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """Run by PyTorch, sums and layers round where the casts say. Outputs keep their dtype, and the error of the last precision is at most the
    rounding of products and of the result."""
    inputs = inputs_of(function, dtype)
    ideal = function(*(each.double() for each in inputs))
    errors = []
    for accumulation in AccumulationPrecision:
        graph = make_fx(function, tracing_mode="fake")(*inputs)
        widen(graph, accumulation)
        graph.graph.lint()
        products = [
            n for n in graph.graph.nodes if n.target in (aten.addmm.default, aten.bmm.default, aten.convolution.default)
        ]
        layers = [n for n in graph.graph.nodes if n.target in (aten._softmax.default, aten.mean.dim)]
        wanted = dtype if accumulation is AccumulationPrecision.AS_WRITTEN else torch.float32
        assert {n.meta["val"].dtype for n in products} == {wanted}
        assert {n.meta["val"].dtype for n in layers} == {
            torch.float32 if accumulation is AccumulationPrecision.FP32_LAYERS else dtype
        }
        for node in products:  # what they read was rounded, so that kernels for half types can do it
            read = [each for each in node.all_input_nodes if accumulation is not AccumulationPrecision.AS_WRITTEN]
            assert all(each.args[0].meta["val"].dtype is dtype for each in read)
        result = graph(*inputs)
        assert result.dtype is dtype
        errors.append(float((result.double() - ideal).square().mean().sqrt()))
    assert errors[-1] <= errors[0]
    assert errors[-1] < torch.finfo(dtype).eps * float(ideal.abs().max())


def test_float32_is_left_alone() -> None:
    """A graph without half types is the same with every precision."""
    inputs = inputs_of(attention, torch.float32)
    graph = make_fx(attention, tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    before = graph.code
    widen(graph, AccumulationPrecision.FP32_LAYERS)
    assert graph.code == before


@pytest.mark.tensorrt
@pytest.mark.parametrize(("dtype", "short"), [(torch.float16, "Half"), (torch.bfloat16, "BFloat16")], ids=str)
def test_the_builder_computes_in_each_precision(dtype: torch.dtype, short: str) -> None:
    """Layer by layer: products in half types, then in float32, then norms and softmax in float32 too. Inputs and outputs keep their dtypes."""
    made = region(attention, *inputs_of(attention, dtype))
    written, accumulated, layered = (layers_on(made, accumulation) for accumulation in accumulation_precisions(made))

    def types(layers: Sequence[str], kind: str) -> set[str]:
        return {
            each
            for layer in layers
            if kind in layer
            for each in re.findall(r"(?:BFloat16|Half|Float)", layer.split("(")[-1])
        }

    assert types(written, "Fc") == {short}
    assert "Float" in types(accumulated, "Fc")
    assert any(re.search(rf"Fc.*\(Float, Float.*-> {short}\)", layer) for layer in accumulated), accumulated
    # Attention is one kernel for half types, which sums in float32 already; with the last precision its softmax is a layer of float32 alone.
    assert any("mha" in layer for layer in written)
    (softmax,) = (layer for layer in layered if "MaxrSubExpSumDiv" in layer)
    assert softmax.endswith("-> Float)")
    assert short not in softmax
    assert all(f"{short} -> {short}" not in layer for layer in layered), layered


@pytest.mark.tensorrt
def test_convolutions_and_norms_of_half_types() -> None:
    """Convolutions are computed in float32 from the second precision on, norms with the last one."""
    made = region(convolution, *inputs_of(convolution, torch.float16))
    written, accumulated, layered = (layers_on(made, accumulation) for accumulation in accumulation_precisions(made))
    for layers, found in ((written, "Half"), (accumulated, "Float"), (layered, "Float")):
        (product,) = (layer for layer in layers if layer.startswith("correlation"))
        assert product.endswith(f"-> {found})")
    for layers, found in ((accumulated, "Half"), (layered, "Float")):
        (norm,) = (layer for layer in layers if "MeanSubMulMeanAddSqrt" in layer)
        assert norm.endswith(f"-> {found})"), norm
