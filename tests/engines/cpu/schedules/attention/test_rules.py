"""The schedules that attention gets."""

from __future__ import annotations

import pytest

from tests.engines.cpu.schedule_runner import printer_of
from tests.engines.cpu.schedules.attention.attention_for_tests import make
from torch_hybrid_backend.engines.cpu.schedules.attention import rules
from torch_hybrid_backend.engines.cpu.schedules.attention.decoding import DecodingAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.tiled import TiledAttention
from torch_hybrid_backend.engines.cpu.target import Target

_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


@pytest.mark.parametrize(
    ("shape", "dtype", "schedule"),
    [
        ((1, 2, 1, 100, 64, 64), "float32", DecodingAttention),
        ((1, 2, 4, 100, 16, 48), "float32", DecodingAttention),
        ((1, 2, 8, 100, 64, 64), "float32", DecodingAttention),
        ((1, 2, 9, 100, 64, 64), "float32", TiledAttention),  # more queries than packing costs
        ((1, 2, 1, 100, 40, 64), "float32", TiledAttention),  # heads that are no whole vectors
        ((1, 2, 1, 100, 64, 40), "float32", TiledAttention),
        ((1, 2, 1, 100, 24, 24), "float64", DecodingAttention),  # three vectors of eight
    ],
)
def test_few_queries_of_whole_vectors_are_decoded(
    shape: tuple[int, int, int, int, int, int], dtype: str, schedule: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else is tiled."""

    def emit(self: TiledAttention) -> type:
        return type(self)

    monkeypatch.setattr(TiledAttention, "emit", emit)
    kernel, _ = make(shape, dtype=dtype)
    printer = printer_of(kernel)
    assert rules.emit(kernel, printer.builder, printer, _AVX512) is schedule
