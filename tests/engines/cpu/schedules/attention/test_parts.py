"""Parts that attention tasks share: packing, and panels of keys."""

from __future__ import annotations

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, printer_of
from tests.engines.cpu.schedules.attention.attention_for_tests import check, make
from torch_hybrid_backend.engines.cpu.schedules.attention.parts import AttentionParts
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.index import as_index


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 49, 49, 32, 32),  # a last panel of two vectors, or of one
        (1, 2, 29, 69, 80, 20),  # of which the last holds five keys
        (1, 1, 7, 33, 37, 64),  # whole squares of a head's dimension, and a rest
        (1, 1, 5, 16, 64, 16),  # one vector of keys
        (1, 2, 9, 48, 16, 16),  # a last panel of one whole vector
    ],
)
def test_keys_transposed_in_registers(shape: tuple[int, ...], target: Target) -> None:
    """Heads of a vector and more, whose keys are packed by squares; ragged panels end with their last key's vector."""
    check(shape, target=target)  # type: ignore[arg-type]
    mask = torch.randn(1, shape[1], shape[2], shape[3])
    check(shape, mask=mask, heads_inside=True, target=target)  # type: ignore[arg-type]


_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


def parts_of(shape: tuple[int, int, int, int, int, int], dtype: str = "float32") -> AttentionParts:
    """(B, H, S, T, D, E), for vectors of 16 float32."""
    kernel, _ = make(shape, dtype=dtype)
    printer = printer_of(kernel)
    return AttentionParts(kernel, printer.builder, printer, _AVX512)


@pytest.mark.parametrize(
    ("keys", "dtype", "panel", "panels", "tail"),
    [
        (7, "float32", 16, 1, 7),
        (16, "float32", 16, 1, 0),
        (17, "float32", 32, 1, 17),
        (100, "float32", 32, 4, 4),
        (16, "float64", 16, 1, 0),
        (9, "float64", 16, 1, 9),
        (9, "bfloat16", 16, 1, 9),
    ],
)
def test_panels_of_keys(keys: int, dtype: str, panel: int, panels: int, tail: int) -> None:
    """Two vectors of the compute dtype, one where that holds all keys; the last one may be ragged."""
    parts = parts_of((1, 1, 3, keys, 8, 8), dtype)
    assert (parts.panel, parts.panels, parts.tail) == (panel, panels, tail)
    assert parts.whole_panels * panel + tail == keys
    if tail:
        assert (parts.vectors_of(tail) - 1) * parts.lanes < tail <= parts.vectors_of(tail) * parts.lanes


@pytest.mark.parametrize(("keys", "blocks", "panels"), [(1024, 1, 32), (1025, 3, 16), (2048, 4, 16)])
def test_blocks_of_keys(keys: int, blocks: int, panels: int) -> None:
    """Up to 1024 keys a row of scores is kept whole; beyond, the softmax goes on over blocks of half as many."""
    parts = parts_of((1, 1, 3, keys, 8, 8))
    assert (parts.blocks, parts.block_panels, parts.is_online) == (blocks, panels, blocks > 1)
    assert parts.stride == panels * parts.panel + parts.lanes


@pytest.mark.parametrize(("keys", "variants"), [(64, [32]), (20, [20]), (70, [32, 6])])
def test_ragged_panels_have_a_variant_of_their_own(keys: int, variants: list[int]) -> None:
    """Only where there are both kinds is there a choice; a body that is nothing for both stays nothing."""
    parts = parts_of((1, 1, 3, keys, 8, 8))
    asked: list[object] = []

    def body(count: object) -> object:
        asked.append(count)
        return parts.builder.store(parts.q, 0, 0.0)

    assert parts.by_panel(as_index(0), body) is not None
    assert asked == variants
    assert parts.by_panel(as_index(0), lambda count: None) is None
