"""Attention that gets products of bfloat16, and by which instructions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.codegen.regions_for_tests import region_of
from tests.engines.cpu.schedules.attention.attention_for_tests import make, of_int8
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.kernels import Bf16AttentionKernel
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.variants import attention
from torch_hybrid_backend.engines.cpu.variants.attention import low_precision_attention
from torch_hybrid_backend.graph import quantization
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.kernels import AttentionKernel

_AVX512_BF16 = Target("znver4", "x", ("avx512_bf16", "avx512f"), 16, 2, 32 << 10, 1 << 20)
_TILES = dataclasses.replace(_AVX512_BF16, features=("amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512f"))
_NEITHER = dataclasses.replace(_AVX512_BF16, features=("avx512f",))
_BERT, _LONG = (1, 12, 128, 128, 64, 64), (1, 8, 512, 512, 128, 128)


def kernel_of(shape: tuple[int, int, int, int, int, int] = _BERT, dtype: str = "bfloat16") -> AttentionKernel:
    return make(shape, dtype=dtype)[0]


@pytest.mark.parametrize(
    ("target", "dtype", "formats"),
    [
        (_TILES, "bfloat16", {"amx bfloat16": "bfloat16", "bfloat16": ""}),
        (_AVX512_BF16, "bfloat16", {"bfloat16": ""}),
        (_NEITHER, "bfloat16", {}),
        (_TILES, "float32", {"amx float32": "float32"}),
        (_TILES, "float16", {"amx float16 split": "float16 split"}),
        (_AVX512_BF16, "float32", {}),
        (_TILES, "float64", {}),
    ],
)
def test_amx_comes_before_dot_products(target: Target, dtype: str, formats: dict[str, str]) -> None:
    """Variants are in the order of estimates, the fastest preferred; each rounds otherwise, and the next is still timed beside it."""
    found = low_precision_attention(kernel_of(_LONG, dtype), None, target)
    assert [variant.name for variant in found] == list(formats)
    assert [variant.is_preferred for variant in found] == [True, False][: len(found)]
    for variant in found:
        (kernel,) = variant.kernels
        assert isinstance(kernel, Bf16AttentionKernel)
        assert kernel.format == formats[variant.name]
        assert not variant.is_exact
        assert 1 / 1.6 < variant.cost < 1


def test_splitting_does_not_pay_for_short_sequences() -> None:
    """Tiles of split float32 are timed beside vectors, which stay the first choice; for few keys they are not even timed."""
    (found,) = low_precision_attention(kernel_of(dtype="float32"), None, _TILES)
    assert not found.is_preferred
    assert found.cost > 1
    assert not low_precision_attention(kernel_of((64, 3, 49, 49, 32, 32), "float32"), None, _TILES)


def test_less_than_float32_where_pytorch_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products in place of six, under another name."""
    monkeypatch.setattr(attention, "float32_precision", lambda device_type: ("tf32", "none"))
    assert [variant.name for variant in low_precision_attention(kernel_of(dtype="float32"), None, _TILES)] == [
        "amx float32 high"
    ]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((1, 12, 1, 128, 64, 64), []),  # a decoder's query
        ((1, 12, 128, 128, 63, 64), []),  # heads of an odd number of elements
        ((1, 12, 5, 3, 4, 4), ["bfloat16"]),  # tiles that are mostly empty
    ],
)
def test_where_it_does_not_serve(shape: tuple[int, int, int, int, int, int], names: list[str]) -> None:
    """Few queries, and what would not gain."""
    assert [variant.name for variant in low_precision_attention(kernel_of(shape), None, _TILES)] == names


@pytest.mark.parametrize(("dtype", "names"), [("bfloat16", ["amx bfloat16", "bfloat16"]), ("float32", [])])
def test_lengths_known_only_at_run_time(dtype: str, names: list[str]) -> None:
    """bfloat16 is multiplied on tiles, by the likely lengths; float32, which is split, needs to know them."""
    kernel, _ = make(_BERT, dtype=dtype, open_sizes=True)
    assert [way.name for way in low_precision_attention(kernel, None, _TILES)] == names


def _dequantized(x: torch.Tensor, scale: float | None = 0.02) -> torch.Tensor:
    """Dequantize as `quantize` does it; with a scale for each row without one."""
    if scale is not None:
        return quantization.tensor(quantization.call, x, -scale * 127, scale * 127)
    return quantization.rows_now(quantization.call, x)


@pytest.mark.parametrize(
    ("of_q", "of_v", "name"),
    [(0.02, 0.03, "amx int8 as bfloat16"), (None, 0.03, "amx float32"), (0.02, None, "amx float32")],
)
def test_dequantized_operands_are_read_as_int8(of_q: float | None, of_v: float | None, name: str) -> None:
    """By every kernel; products are of integers where scales are literals, which go behind them."""
    inputs = [torch.randn(1, 4, 128, 64) for _ in range(3)]

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        operands = _dequantized(q, of_q), _dequantized(k, 0.02), _dequantized(v, of_v)
        return torch.nn.functional.scaled_dot_product_attention(*operands)

    found = assemble(region_of(attended, *inputs, changing=3), TvmBackend(_TILES))
    kernel = found.kernels[-1]
    assert isinstance(kernel, AttentionKernel)
    assert [read.buffer.dtype for read in kernel.reads].count("int8") == 3
    (variant,) = low_precision_attention(kernel, None, _TILES)
    assert variant.name == name


def test_integers_must_be_bfloat16() -> None:
    """A zero point beyond what the integers can be makes larger ones, which it does not hold; a scale of 0 leaves nothing to scale."""
    plain, inputs = make(_BERT)
    kernel, _, _ = of_int8(plain, inputs, ("int8", "uint8", "int8"), (0, 255, -128))
    assert [variant.name for variant in low_precision_attention(kernel, None, _TILES)] == ["amx int8 as bfloat16"]
    for zeros in ((0, 256, 0), (-129, 0, 0)):
        kernel, _, _ = of_int8(plain, inputs, ("int8", "uint8", "int8"), zeros)
        assert [variant.name for variant in low_precision_attention(kernel, None, _TILES)] == ["amx float32"]


def test_operands_must_be_bfloat16_throughout() -> None:
    """Computed ones are where they are rounded; a scale that is not positive would turn masks around."""
    kernel = kernel_of()
    double = ops.mul(kernel.q, ops.const(2, "float32"))
    assert not low_precision_attention(dataclasses.replace(kernel, q=double), None, _AVX512_BF16)
    assert not low_precision_attention(
        dataclasses.replace(kernel, q=ops.round_to(double, "float16")), None, _AVX512_BF16
    )
    assert low_precision_attention(dataclasses.replace(kernel, q=ops.round_to(double, "bfloat16")), None, _AVX512_BF16)
    assert not low_precision_attention(dataclasses.replace(kernel, scale=-1.0), None, _AVX512_BF16)
