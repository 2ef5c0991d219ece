"""Quantized weights that kernels take, and how they are packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.ao.quantization.fx._decomposed

from tests.codegen.regions_for_tests import region_of
from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.codegen.assemble import RegionKernels, assemble
from torch_hybrid_backend.core.precision import ROW_BITS
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.packing import pack_b, pack_nibbles
from torch_hybrid_backend.engines.cpu.operands.quantized import keeps_codebook
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import Panels, Quantized, Weight
from torch_hybrid_backend.loops.kernels import MapKernel

quantized = torch.ops.quantized_decomposed
Function = Callable[..., torch.Tensor]

K, N, GROUP = 96, 70, 32
_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


def assembled(function: Function, *inputs: torch.Tensor, changing: int = 1, target: Target = _AVX512) -> RegionKernels:
    """The kernels of a region whose inputs behind the first `changing` are constants. Its inputs are in the order of their use."""
    region = region_of(function, *inputs)
    named = tuple(replace(i, is_constant=_argument(i.name) >= changing) for i in region.inputs)
    return assemble(replace(region, inputs=named), TvmBackend(target))


def _argument(name: str) -> int:
    """The number of the function's argument that an input is."""
    stem = name.partition("_")[0]  # the argument's name, or "arg" and its number
    return ("x", "q", "scales").index(stem) if stem in ("x", "q", "scales") else int(stem.removeprefix("arg"))


def by_channel(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, *zeros: torch.Tensor) -> torch.Tensor:
    """x @ the transpose of q (N, K), dequantized with a scale for each row."""
    bounds = (0, 255) if q.dtype == torch.uint8 else (-128, 127)
    w = quantized.dequantize_per_channel(q, scales, zeros[0] if zeros else None, 0, *bounds, q.dtype)
    return torch.mm(x, w.t())


def by_group(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, *zeros: torch.Tensor) -> torch.Tensor:
    """The same of 4 bits, with a scale for each GROUP of a row."""
    bounds = (0, 15) if q.dtype == torch.uint8 else (-8, 7)
    zero = zeros[0] if zeros else None
    w = quantized.dequantize_per_channel_group(q, scales, zero, *bounds, q.dtype, GROUP, torch.float32)
    return torch.mm(x, w.t())


def weights(found: RegionKernels) -> list[Weight]:
    """The weights of the region's products."""
    return [kernel.weight for kernel in found.kernels if isinstance(kernel, CpuMatMulKernel)]


def weight_of(found: RegionKernels) -> Quantized:
    """The weight of the region's one kernel."""
    (_,), (weight,) = found.kernels, weights(found)
    assert isinstance(weight, Quantized)
    return weight


def packed_of(found: RegionKernels, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The values packed ahead of the inputs behind the first."""
    return [packed.pack(tensors[_argument(packed.source.name) - 1]) for packed in found.packed]


def test_bytes() -> None:
    """A scale for each column: one group, in panels, four times smaller than float32."""
    x, q, scales = torch.randn(5, K), torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N)
    found = assembled(by_channel, x, q, scales)
    weight = weight_of(found)
    assert (weight.bits, weight.group, weight.width, weight.zeros) == (8, K, 32, None)
    integers, factors = packed_of(found, q, scales)
    assert torch.equal(integers, pack_b(q.t()[None], 32))
    assert torch.equal(factors, pack_b(scales[None, None], 32))


def test_bytes_with_zero_points() -> None:
    """Zero points are packed as float32."""
    x, q, scales = torch.randn(5, K), torch.randint(0, 256, (N, K), dtype=torch.uint8), torch.rand(N)
    zeros = torch.randint(0, 256, (N,))
    found = assembled(by_channel, x, q, scales, zeros)
    assert weight_of(found).zeros is not None
    assert torch.equal(packed_of(found, q, scales, zeros)[2], pack_b(zeros.float()[None, None], 32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_nibbles(dtype: torch.dtype) -> None:
    """Integers that 4 bits hold are packed as such, whether they begin at -8 or at 0; so are those behind a zero point."""
    low = 0 if dtype == torch.uint8 else -8
    x, q = torch.randn(5, K), torch.randint(low, low + 16, (N, K), dtype=dtype)
    scales, zeros = torch.rand(N, K // GROUP), torch.randint(low, low + 16, (N, K // GROUP), dtype=torch.int32)
    found = assembled(by_group, x, q, scales, zeros)
    weight = weight_of(found)
    assert (weight.bits, weight.group) == (4, GROUP)
    integers, factors, moved = packed_of(found, q, scales, zeros)
    assert torch.equal(integers, pack_nibbles(q.t()[None].to(torch.int32) - (low + 8), 32))
    assert torch.equal(factors, pack_b(scales.t()[None], 32))
    assert torch.equal(moved, pack_b(zeros.t()[None].float() - (low + 8), 32))
    without = weight_of(assembled(by_group, x, q, scales))
    assert (without.zeros is None) == (low == -8)


def test_weights_laid_out_by_column() -> None:
    """A (K, N) weight, quantized as its transpose, is a product of the dequantized matrix as it is."""

    def columns(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, quantized.dequantize_per_channel(q, scales, None, 1, -128, 127, torch.int8))

    x, q, scales = torch.randn(1, K), torch.randint(-128, 128, (K, N), dtype=torch.int8), torch.rand(N)
    found = assembled(columns, x, q, scales)
    assert weight_of(found).group == K
    assert torch.equal(packed_of(found, q, scales)[0], pack_b(q[None], 32))


def test_one_weight_of_two_products_is_packed_once() -> None:
    """A weight with two readers is not written out in float32."""

    def twice(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        w = quantized.dequantize_per_channel(q, scales, None, 0, -128, 127, torch.int8)
        return torch.mm(torch.relu(torch.mm(x, w.t())), w.t())

    found = assembled(twice, torch.randn(5, 64), torch.ones(64, 64, dtype=torch.int8), torch.rand(64))
    assert [type(weight) for weight in weights(found)] == [Quantized] * 2
    assert len(found.packed) == 2


def test_one_scale_and_none() -> None:
    """A scale and a zero point for all, as numbers, and integers whose scale is applied to the product, as torchao's tensors do."""

    def by_tensor(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, quantized.dequantize_per_tensor.default(q, 0.25, 3, -128, 127, torch.int8).t())

    def scaled_product(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, q.t().to(x.dtype)) * scales

    x, q, scales = torch.randn(5, K), torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N)
    found = assembled(by_tensor, x, q)
    integers, factors, moved = packed_of(found, q)
    assert weight_of(found).group == K
    assert torch.equal(integers, pack_b(q.t()[None], 32))
    assert (factors.flatten()[:N] == 0.25).all()
    assert (moved.flatten()[:N] == 3).all()
    found = assembled(scaled_product, x, q, scales)
    assert weight_of(found).zeros is None
    assert (packed_of(found, q, scales)[1].flatten()[:N] == 1).all()


@pytest.mark.parametrize(("low", "high", "bits"), [(-50, 60, 8), (-3, 9, 4)])
def test_clamped_weights_are_packed_clamped(low: int, high: int, bits: int) -> None:
    """A model's own clamp of constants is done as they are packed."""

    def product(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, (q.clamp(low, high).float() * scales[:, None]).t())

    x, q, scales = torch.randn(5, K), torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N)
    found = assembled(product, x, q, scales)
    assert weight_of(found).bits == bits
    clamped = q.clamp(low, high).t()[None]
    expected = pack_b(clamped, 32) if bits == 8 else pack_nibbles(clamped.to(torch.int32) - (low + 8), 32)
    assert torch.equal(packed_of(found, q, scales)[0], expected)


@pytest.mark.parametrize("by_column", [False, True])
def test_tables(by_column: bool) -> None:
    """Weights that say which of 11 values they are: four bits each, and the table where these, 8 less, say modulo 16."""

    def looked_up(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        w = scales.index_select(0, q.to(torch.int32).view(-1)).view(q.shape)
        return torch.mm(x, w if by_column else w.t())

    x, q, values = (
        torch.randn(5, K),
        torch.randint(0, 11, (K, N) if by_column else (N, K)).to(torch.uint8),
        torch.randn(11),
    )
    found = assembled(looked_up, x, q, values)
    weight = weight_of(found)
    assert (weight.bits, weight.group, weight.zeros) == (4, K, None)
    by_name = dict(zip((packed.buffer for packed in found.packed), packed_of(found, q, values), strict=True))
    assert torch.equal(by_name[weight.buffer], pack_nibbles((q if by_column else q.t())[None].to(torch.int32) - 8, 32))
    assert weight.table is not None
    table = by_name[weight.table]
    assert table.shape == (16,)
    assert all(table[(place - 8) % 16] == values[place] for place in range(11))


def test_what_is_no_such_table() -> None:
    """Tables of more values, places of more bits, rows that are no whole words, and processors that cannot permute."""

    def looked_up(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, scales.index_select(0, q.to(torch.int32).view(-1)).view(q.shape).t())

    q = torch.randint(0, 11, (N, K)).to(torch.uint8)
    for k, count, dtype in ((K, 17, torch.uint8), (K, 11, torch.int32), (K - 4, 11, torch.uint8)):
        found = assembled(looked_up, torch.randn(5, k), q[:, :k].contiguous().to(dtype), torch.randn(count))
        assert not any(isinstance(weight, Quantized) for weight in weights(found))


@pytest.mark.parametrize(("bits", "parts"), [(8, 1), (16, 2), (32, 3)])
def test_rows_that_may_be_rounded(bits: int, parts: int) -> None:
    """A product with the mark has rows of as many bytes a number as it says; all have two where PyTorch allows products of float32 less."""
    x, q, scales = torch.randn(5, K), torch.randint(-8, 8, (N, K), dtype=torch.int8), torch.rand(N, K // GROUP)
    assert weight_of(assembled(by_group, x, q, scales)).row_parts == 3
    region = region_of(by_group, x, q, scales)
    for node in region.graph_module.graph.nodes:
        if node.target is torch.ops.aten.mm.default:
            node.meta[ROW_BITS] = bits
    named = tuple(replace(i, is_constant=_argument(i.name) >= 1) for i in region.inputs)
    assert weight_of(assemble(replace(region, inputs=named), TvmBackend(_AVX512))).row_parts == parts
    try:
        torch.set_float32_matmul_precision("high")
        assert weight_of(assembled(by_group, x, q, scales)).row_parts == 2
    finally:
        torch.set_float32_matmul_precision("highest")


def test_half_activations() -> None:
    """Activations and scales may be of a half type, as torch's own operator has them; the weight's rounding to it is left out."""

    def in_half(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, (q.float() * scales[:, None]).t().bfloat16())

    def by_torch(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm.default(x, q, scales)

    x, q, scales = torch.randn(5, K).bfloat16(), torch.ones(N, K, dtype=torch.int8), torch.rand(N)
    assert weight_of(assembled(in_half, x, q, scales)).bits == 8
    weight = weight_of(assembled(by_torch, x, q, scales.bfloat16()))
    assert weight.scales.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scales_are_packed_in_their_type(dtype: torch.dtype) -> None:
    """Half types as they are, for calls read them; what is made of wider ones is float32's."""

    def widened(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return by_group(x, q, scales.float())

    x, q = torch.randn(5, K), torch.randint(-8, 8, (N, K), dtype=torch.int8)
    scales = torch.rand(N, K // GROUP).to(dtype)
    found = assembled(widened, x, q, scales)
    if dtype == torch.float64:
        assert not any(isinstance(weight, Quantized) for weight in weights(found))
        return
    assert weight_of(found).scales.dtype == str(dtype).removeprefix("torch.")
    packed = packed_of(found, q, scales)[1]
    assert torch.equal(packed, pack_b(scales.t()[None], 32))


@pytest.mark.parametrize("case", ["run time", "narrow", "batched", "a scale for each element"])
def test_others_are_dequantized_in_every_call(case: str) -> None:
    """A weight that changes from call to call, or is too small, or of another form is right all the same."""
    x, q, scales = torch.randn(5, K), torch.ones(N, K, dtype=torch.int8), torch.rand(N)
    function: Function = by_channel
    changing = 1
    if case == "run time":
        changing = 2
    elif case == "narrow":
        q, scales = q[:7], scales[:7]
    elif case == "batched":
        x = torch.randn(3, 5, K)
        q = q.expand(3, N, K).contiguous()

        def function(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, (q.float() * scales[:, None]).mT)
    else:
        scales = torch.rand(N, K)

        def function(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, (q.float() * scales).t())

    found = assembled(function, x, q, scales, changing=changing)
    assert any(isinstance(weight, Panels) for weight in weights(found))
    assert any(isinstance(kernel, MapKernel) for kernel in found.kernels)


@pytest.mark.parametrize(
    ("values", "rows", "depth", "expected"),
    [
        (16, 128, 160, True),
        (2, 128, 160, True),
        (17, 128, 160, False),
        (1, 128, 160, False),
        (16, 128, 164, False),
        (16, 64, 160, False),
    ],
)
def test_codebooks_that_are_kept(values: int, rows: int, depth: int, expected: bool) -> None:
    """Codebooks of 2 to 16 values, for sums of whole words of 4 bits and weights that take time to read; others are made ahead."""

    def function(x: torch.Tensor, table: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return x @ table.index_select(0, q.int()).view(rows, depth).t()

    graph = trace(
        function, torch.rand(3, depth), torch.rand(values), torch.zeros(rows * depth, dtype=torch.uint8)
    ).graph
    (weights,) = graph.find_nodes(op="call_function", target=torch.ops.aten.index_select.default)
    assert keeps_codebook(weights) == expected
    weights.args[0].meta["val"] = weights.args[0].meta["val"].double()
    assert not keeps_codebook(weights)
