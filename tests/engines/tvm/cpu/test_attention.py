"""Which attention gets products of bfloat16, and by which instructions."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engines.tvm.schedules.attention.attention_for_tests import make
from torch_hybrid_backend.engines.tvm.cpu import attention
from torch_hybrid_backend.engines.tvm.cpu.attention import word_attention
from torch_hybrid_backend.engines.tvm.cpu.kernels import WordAttentionKernel
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.kernels import AttentionKernel

_WORDS = Target("znver4", "x", ("avx512_bf16", "avx512f"), 16, 2, 32 << 10, 1 << 20)
_TILES = dataclasses.replace(_WORDS, features=("amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512f"))
_NEITHER = dataclasses.replace(_WORDS, features=("avx512f",))
_BERT = (1, 12, 128, 128, 64, 64)


def kernel_of(shape: tuple[int, int, int, int, int, int] = _BERT, dtype: str = "bfloat16") -> AttentionKernel:
    return make(shape, dtype=dtype)[0]


@pytest.mark.parametrize(
    ("target", "dtype", "formats"),
    [
        (_TILES, "bfloat16", {"amx bfloat16": "bfloat16", "bfloat16": ""}),
        (_WORDS, "bfloat16", {"bfloat16": ""}),
        (_NEITHER, "bfloat16", {}),
        (_TILES, "float32", {"amx float32": "float32"}),
        (_TILES, "float16", {"amx float16 split": "float16 split"}),
        (_WORDS, "float32", {}),
        (_TILES, "float64", {}),
    ],
)
def test_tiles_come_before_words(target: Target, dtype: str, formats: dict[str, str]) -> None:
    """What a processor has, the fastest by estimate preferred; each rounds otherwise, and the next is still timed beside it."""
    found = word_attention(kernel_of(dtype=dtype), None, target)
    assert [variant.name for variant in found] == list(formats)
    assert [variant.is_preferred for variant in found] == [True, False][: len(found)]
    for variant in found:
        (kernel,) = variant.kernels
        assert isinstance(kernel, WordAttentionKernel)
        assert kernel.format == formats[variant.name]
        assert not variant.is_exact
        assert 1 / 1.6 < variant.cost < 1


def test_less_than_float32_where_pytorch_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products in place of six, under another name."""
    monkeypatch.setattr(attention, "float32_precision", lambda device_type: ("tf32", "none"))
    assert [variant.name for variant in word_attention(kernel_of(dtype="float32"), None, _TILES)] == [
        "amx float32 high"
    ]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((1, 12, 1, 128, 64, 64), []),  # a decoder's query
        ((1, 12, 128, 128, 63, 64), []),  # heads of half words
        ((1, 12, 5, 3, 4, 4), ["bfloat16"]),  # tiles that are mostly empty
    ],
)
def test_where_it_does_not_serve(shape: tuple[int, int, int, int, int, int], names: list[str]) -> None:
    """Few queries, and what would not gain."""
    assert [variant.name for variant in word_attention(kernel_of(shape), None, _TILES)] == names


def test_operands_must_be_bfloat16_throughout() -> None:
    """Computed ones are where they are rounded; a scale that is not positive would turn masks around."""
    kernel = kernel_of()
    double = ops.mul(kernel.q, ops.const(2, "float32"))
    assert not word_attention(dataclasses.replace(kernel, q=double), None, _WORDS)
    assert not word_attention(dataclasses.replace(kernel, q=ops.round_to(double, "float16")), None, _WORDS)
    assert word_attention(dataclasses.replace(kernel, q=ops.round_to(double, "bfloat16")), None, _WORDS)
    assert not word_attention(dataclasses.replace(kernel, scale=-1.0), None, _WORDS)
