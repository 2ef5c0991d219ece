"""Products of quantized values: rewritten, they compute the same, and TensorRT's builder makes integer products of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch.fx.experimental.proxy_tensor import make_fx

from tests.engines.tensorrt.regions_for_tests import builds_bytes, built, engine, region
from tests.fake_devices import FakeDevices
from torch_hybrid_backend import quantize
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest
from torch_hybrid_backend.engines.tensorrt.integer_products import factor_out_scales
from torch_hybrid_backend.engines.tensorrt.quantization import zero_points
from torch_hybrid_backend.graph import quantization as quantized
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.passes.hoist import hoist

F = torch.nn.functional
Q = torch.ops.quantized_decomposed
aten = torch.ops.aten
FP8 = torch.float8_e4m3fn


def weight(w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """A weight in the form that `hoist` leaves in a graph: integers and scales are inputs, zero points a fill."""
    zeros = torch.full([w.shape[0]], 0, dtype=torch.int64)
    dequantized: torch.Tensor = Q.dequantize_per_channel(w, s, zeros, 0, -127, 127, torch.int8)
    return dequantized


def fixed(x: torch.Tensor) -> torch.Tensor:
    dequantized: torch.Tensor = quantized.tensor(quantized.call, x, -3.0, 3.0)
    return dequantized


def rows(x: torch.Tensor) -> torch.Tensor:
    dequantized: torch.Tensor = quantized.rows_now(quantized.call, x)
    return dequantized


def whole(x: torch.Tensor) -> torch.Tensor:
    dequantized: torch.Tensor = quantized.tensor_now(quantized.call, x)
    return dequantized


def float8(x: torch.Tensor) -> torch.Tensor:
    narrow = Q.quantize_per_tensor(x, 0.1, 0, -448, 448, FP8)
    dequantized: torch.Tensor = Q.dequantize_per_tensor(narrow, 0.1, 0, -448, 448, FP8)
    return dequantized


def linear(quantize: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, w, s, b: F.linear(quantize(x), weight(w, s).to(x.dtype), b)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    w = torch.randint(-127, 128, (32, 64), dtype=torch.int8)
    return [torch.randn(*shape, 64).to(dtype), w, torch.rand(32) + 0.1, torch.randn(32).to(dtype)]


CASES: dict[str, tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]] = {
    "fixed": (linear(fixed), inputs(8)),
    "rows": (linear(rows), inputs(2, 8)),
    "whole": (linear(whole), inputs(8)),
    "half": (linear(fixed), inputs(8, dtype=torch.float16)),
    "batched": (
        lambda x, y: fixed(x) @ fixed(y).transpose(-1, -2),
        [torch.randn(4, 8, 16), torch.randn(4, 8, 16)],
    ),
    "float8": (
        lambda x, w: F.linear(float8(x), w.to(torch.float32)),
        [torch.randn(8, 64), torch.randn(32, 64).to(FP8)],
    ),
    "two layers": (
        lambda x, w, s, b: linear(fixed)(
            F.gelu(linear(fixed)(x, w[:, :32].repeat(2, 2), s.repeat(2), b.repeat(2))), w, s, b
        ),
        inputs(8),
    ),
}
CONVOLUTION = (
    lambda x, w, s, b: F.conv2d(fixed(x), weight(w, s), b, stride=2),
    [torch.randn(2, 4, 9, 9), torch.randint(-127, 128, (6, 4, 3, 3), dtype=torch.int8), torch.rand(6), torch.randn(6)],
)


def lowered(function: Callable[..., torch.Tensor], given: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Replace views as torch_tensorrt's lowering does."""
    table = {
        aten.t.default: lambda x: x.permute(1, 0),
        aten.transpose.int: lambda x, a, b: x.permute([{a: b, b: a}.get(d - x.dim(), d) for d in range(x.dim())]),
    }
    return make_fx(function, decomposition_table=table, tracing_mode="fake")(*given)


@pytest.mark.parametrize("name", [*CASES, "convolution"])
def test_scales_leave_products(name: str) -> None:
    """Run by PyTorch, the rewritten graph gives the same results up to fewer roundings. Each product reads integers."""
    function, given = {**CASES, "convolution": CONVOLUTION}[name]
    graph = lowered(function, given)
    expected = graph(*given)
    factor_out_scales(graph)
    graph.graph.lint()
    result = graph(*given)
    assert result.dtype == expected.dtype
    near = 2e-3 if expected.dtype is torch.float16 else 2e-6
    assert float((result.double() - expected.double()).abs().max()) <= near * float(expected.abs().max())
    if name == "batched":  # numbers are constants wherever they are
        return
    scales = [
        node.args[1]
        for node in graph.graph.nodes
        if str(node.target).startswith("quantized_decomposed.dequantize_per_tensor")
    ]
    assert scales
    assert set(scales) == {1.0}
    assert not [
        node for node in graph.graph.nodes if "per_channel" in str(node.target) or "per_token" in str(node.target)
    ]


def test_products_of_integers_are_exact() -> None:
    """Sums that float32 represents are bit-equal to sums in int64, times the scales."""
    function, given = CASES["rows"]
    graph = lowered(function, given)
    factor_out_scales(graph)
    (product,) = (node for node in graph.graph.nodes if node.target is aten.mm.default)
    graph.graph.output_node().args = ((product,),)
    graph.recompile()
    x, w, _, _ = given
    integers = quantized.rows_now(_integers, x)
    (result,) = graph(*given)
    assert torch.equal(result.to(torch.int64).reshape(2, 8, 32), integers.to(torch.int64) @ w.t().to(torch.int64))


def _integers(op: Any, *args: Any, **options: Any) -> Any:
    """`Apply` that does not dequantize."""
    return args[0] if "dequantize" in str(op) else op(*args, **options)


def test_weights_alone_keep_their_scales() -> None:
    """The other operand is not quantized: the builder dequantizes within the product."""
    function, given = (lambda x, w, s, b: F.linear(x, weight(w, s), b)), inputs(8)
    graph = lowered(function, given)
    factor_out_scales(graph)
    (dequantizer,) = (node for node in graph.graph.nodes if "dequantize" in str(node.target))
    assert "per_channel" in str(dequantizer.target)
    assert torch.equal(graph(*given), function(*given))


@pytest.mark.tensorrt
@builds_bytes
@pytest.mark.parametrize("name", CASES)
def test_the_builder_makes_products_of_integers(name: str) -> None:
    """Layer by layer: quantizers write 8-bit values, products read them, and all other operators are fused into neighbours."""
    made = region(CASES[name][0], *CASES[name][1])
    layers = built(made).layers
    short = "FP8" if name == "float8" else "Int8"
    products = [layer for layer in layers if layer.startswith("gemm")]
    assert len(products) == (2 if name == "two layers" else 1)
    for product in products:
        assert f"({short}, {short}; " in product, layers
    assert any(layer.startswith("kgen") and f" {short}" in layer.split("->")[-1] for layer in layers), layers


@pytest.mark.tensorrt
@builds_bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_alone_are_dequantized_within_the_product(dtype: torch.dtype) -> None:
    """Weight-only quantized weights enter as they are, one byte each."""
    layers = built(region(lambda x, w, s, b: F.linear(x, weight(w, s).to(x.dtype), b), *inputs(8, dtype=dtype))).layers
    (product,) = (layer for layer in layers if "Fc" in layer)
    assert product.startswith("runtime_fusion")
    assert ", Int8 ->" in product


@pytest.mark.tensorrt
@builds_bytes
def test_sizes_known_only_at_run_time() -> None:
    """Rows are scaled, whatever their number."""
    made = region(lambda x, w, s: F.linear(rows(x), weight(w, s)), *inputs(8)[:3], dynamic=True)
    assert any("(Int8, Int8; " in layer for layer in built(made).layers)


@pytest.mark.tensorrt
@builds_bytes
def test_zero_points_of_another_region_are_known() -> None:
    """A fill of zero points that several regions share is an input of some of them. The request holds it as zeros."""
    x, w, s, _ = inputs(8)
    made = region(lambda x, w, s: F.linear(x, weight(w, s)), x, w, s)
    graph = made.graph_module.graph
    (fill,) = (node for node in graph.nodes if node.target is aten.full.default)
    with graph.inserting_before(next(iter(graph.nodes))):
        outside = graph.placeholder("outside")
    outside.meta["val"] = fill.meta["val"]
    fill.replace_all_uses_with(outside)
    graph.erase_node(fill)
    made.graph_module.recompile()
    found = zero_points(made)
    assert list(found) == [0]
    assert torch.equal(found[0], torch.zeros(32, dtype=torch.int64))


@pytest.mark.tensorrt
@builds_bytes
def test_weights_as_constants_stay_bytes() -> None:
    """torch_tensorrt does not fold constant weights to floats."""
    given = inputs(8)
    made = region(linear(fixed), *given)
    by_name = dict(zip(("x_1", "w_1", "s_1", "b_1"), given, strict=True))
    constants = {i: by_name[each.name] for i, each in enumerate(made.inputs) if each.name != "x_1"}
    plan = built(made, constants=constants)
    assert plan.inputs == ("input0",)
    assert any(layer.startswith("gemm") and "(Int8; Int8" in layer for layer in plan.layers), plan.layers
    assert BuildRequest.of(made, {}, constants=constants).engine_inputs == (0,)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64), torch.nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x + self.down(F.gelu(self.up(x))))
        return normed


@pytest.mark.tensorrt
@builds_bytes
@pytest.mark.parametrize("calibration", ["naive", "none"])
def test_a_model_of_quantize_is_one_region(calibration: str) -> None:
    """Captured for a GPU that does not exist: linear layers become int8 products with live weights; all other operators are fused around
    them."""
    x = torch.randn(4, 16, 64)
    quantized = quantize(Block().eval(), [x], calibration=calibration)
    devices = FakeDevices()
    captured = devices.captured(devices.move(quantized, "cuda"), devices.tensor(*x.shape, device="cuda"))
    main = hoist(captured.graph_module, captured.static_inputs).main
    made = engine()
    made.devices = frozenset({"cuda"})
    cut = partition_graph(main, [made], Config(min_region_nodes=1))
    (segment,) = cut.graph.segments
    assert not [refusal for node in cut.nodes for refusal in node.refusals]
    layers = built(segment.region).layers
    assert [layer.count("(Int8, Int8; ") for layer in layers if layer.startswith("gemm")] == [1, 1], layers
    assert len(layers) <= 7
