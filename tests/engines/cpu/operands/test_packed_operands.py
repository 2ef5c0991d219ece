"""Operands that are packed, their forms, and the kernels that read them."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.regions_for_tests import region_of
from torch_hybrid_backend.codegen.assemble import RegionKernels, assemble
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.packing import pack_b, pack_conv_weight, packed_conv_weight_value
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.weights import InPlace, Panels, Weight
from torch_hybrid_backend.loops.index import as_index
from torch_hybrid_backend.loops.ir import Buffer, Const, Load
from torch_hybrid_backend.loops.kernels import AttentionKernel, Kernel, MapKernel

_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


def assembled(function: object, *inputs: torch.Tensor, changing: int = 1) -> RegionKernels:
    return assemble(region_of(function, *inputs, changing=changing), TvmBackend(_AVX512))  # type: ignore[arg-type]


def weight_of(kernel: Kernel) -> Weight:
    """The weight of a product's kernel."""
    assert isinstance(kernel, CpuMatMulKernel)
    return kernel.weight


def test_a_constant_right_operand_is_packed_ahead() -> None:
    """In panels of two vectors of columns."""
    w = torch.randn(70, 40)
    found = assembled(torch.mm, torch.randn(5, 70), w)
    (kernel,), (packed,) = found.kernels, found.packed
    assert isinstance(kernel, CpuMatMulKernel)
    assert isinstance(kernel.weight, Panels)
    assert (kernel.weight.buffer, kernel.weight.width, kernel.is_batched) == (packed.buffer, 32, False)
    assert torch.equal(packed.pack(w), pack_b(w[None], 32))


def test_a_right_operand_that_changes_is_packed_in_every_call() -> None:
    """By a kernel of its own, before the product; one for each batch."""
    found = assembled(torch.bmm, torch.randn(3, 5, 70), torch.randn(3, 70, 40), changing=2)
    packing, product = found.kernels
    assert not found.packed
    assert isinstance(packing, MapKernel)
    assert isinstance(product, CpuMatMulKernel)
    assert product.is_batched
    assert packing.writes[0].buffer is product.weight.buffer


@pytest.mark.parametrize(
    ("rows", "transposed", "strides"),
    [(128, True, (256, 1)), (128, False, (1, 1536)), (5, True, None), (5, False, None)],
)
def test_weights_that_are_read_where_they_lie(rows: int, transposed: bool, strides: tuple[int, int] | None) -> None:
    """(N, K) and (K, N), of products with rows enough; (row stride, stride of k)."""
    w = torch.randn(1536, 256).t() if transposed else torch.randn(256, 1536)
    found = assembled(torch.mm, torch.randn(rows, 256), w)
    (kernel,) = found.kernels
    weight = weight_of(kernel)
    assert isinstance(weight, Panels if strides is None else InPlace)
    if isinstance(weight, InPlace):
        assert (weight.row_stride, weight.k_stride, weight.offset) == (*strides, 0)  # type: ignore[misc]
        assert weight.buffer is found.inputs[1]
        assert not found.packed


def test_weights_of_several_batches_are_packed() -> None:
    """Weights of several batches are packed, as only one matrix is read in place."""
    found = assembled(torch.bmm, torch.randn(2, 128, 256), torch.randn(2, 256, 1536))
    assert isinstance(weight_of(found.kernels[0]), Panels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_packed(dtype: torch.dtype) -> None:
    """Weights of other dtypes are packed, as only float32 is read in place."""
    found = assembled(torch.mm, torch.randn(128, 256).to(dtype), torch.randn(1536, 256).to(dtype).t())
    assert isinstance(weight_of(found.kernels[0]), Panels)


@pytest.mark.parametrize(
    ("shape", "groups"), [((37, 19, 3, 3), 1), ((48, 16, 3, 3), 3), ((20, 1, 5, 5), 20), ((7, 4, 3), 1)]
)
def test_convolutions_have_their_weight_packed(shape: tuple[int, ...], groups: int) -> None:
    """In blocks of output channels, ahead."""
    each = len(shape) - 2
    x, w = torch.randn(1, shape[1] * groups, *[9] * each), torch.randn(shape)

    def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x, w, None, [1] * each, [1] * each, [1] * each, False, [0] * each, groups)

    found = assembled(convolution, x, w)
    (kernel,), (packed,) = found.kernels, found.packed
    assert isinstance(kernel, CpuConvKernel)
    assert isinstance(kernel.weight, Panels)
    assert (kernel.kernel, kernel.groups, kernel.weight.buffer) == (shape[2:], groups, packed.buffer)
    assert torch.equal(packed.pack(w), pack_conv_weight(w, groups, kernel.weight.width))
    assert kernel.weight.buffer.shape == packed.pack(w).shape


def test_attention_packs_nothing_ahead() -> None:
    """Its kernel is the neutral one."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)[0]

    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    found = assembled(attention, q, k, v, changing=3)
    assert any(isinstance(kernel, AttentionKernel) for kernel in found.kernels)
    assert not found.packed


@pytest.mark.parametrize(("shape", "groups", "block"), [((5, 3, 2, 3), 1, 4), ((6, 2, 3), 3, 2), ((5, 1, 3, 3), 5, 4)])
def test_a_weight_as_a_value_is_what_packing_gives(shape: tuple[int, ...], groups: int, block: int) -> None:
    """Element by element, of weights known only at run time; padding is zero."""
    w = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    want = pack_conv_weight(w, groups, block)
    value = packed_conv_weight_value(Buffer(shape, "float32"), groups, block)
    assert value.shape == want.shape
    for place in torch.cartesian_prod(*map(torch.arange, want.shape)).tolist():
        element = value.at(tuple(map(as_index, place)))
        if isinstance(element, Load):
            assert w[tuple(int(i.const) for i in element.index)] == want[tuple(place)]
        else:
            assert isinstance(element, Const)
            assert element.value == 0
            assert want[tuple(place)] == 0
