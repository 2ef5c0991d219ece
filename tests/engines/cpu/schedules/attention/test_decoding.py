"""Attention of few queries against float64 eager."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, printer_of
from tests.engines.cpu.schedules.attention.attention_for_tests import check, make
from torch_hybrid_backend.engines.cpu.schedules.attention.decoding import DecodingAttention
from torch_hybrid_backend.engines.cpu.target import Target


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 3, 1, 100, 64, 64),  # ragged keys
        (2, 1, 1, 64, 16, 48),  # whole panels, three vectors of values
        (1, 1, 4, 7, 32, 16),  # four queries
        (1, 2, 8, 100, 64, 64),  # as many as are few
        (1, 2, 3, 2000, 16, 96),  # blocks of keys, six vectors of values
        (1, 1, 1, 1, 16, 16),
    ],
)
def test_few_queries(shape: tuple[int, ...], target: Target) -> None:
    """A decoder's queries, whose keys and values are read where they lie."""
    check(shape, target=target)  # type: ignore[arg-type]
    check(shape, target=target, heads_inside=True)  # type: ignore[arg-type]


def test_few_queries_masked() -> None:
    """A mask over the keys of a cache that is not full; causal; and half types."""
    torch.manual_seed(1)
    mask = torch.zeros(2, 1, 1, 1100)
    mask[0, :, :, 600:] = -torch.inf
    check((2, 3, 1, 1100, 32, 32), mask=mask)
    check((1, 2, 4, 40, 16, 16), causal=True)
    check((1, 2, 2, 40, 16, 16), dtype="bfloat16")


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
def test_a_new_position(target: Target) -> None:
    """A cache of which one position is replaced is read where it lies, and so is what is new: first, last, in a ragged panel, outside."""
    for at in (0, 63, 99, -1, 100):
        check((1, 3, 1, 100, 64, 32), target=target, new_at=at)
    check((1, 4, 2, 1100, 16, 16), target=target, shared=2, new_at=1050)
    for rows in (2, 4, 8):  # what a position is computed by is there once for all rows
        check((2, rows, 1, 100, 64, 64), target=target, shared=rows, new_at=-30, wraps=True)


def test_grouped_heads_of_half_types() -> None:
    """No more heads that share keys of bfloat16 are rows of one task than are read where they lie: packing would widen them one by one."""
    target = dataclasses.replace(HOST, cores=2)
    kernel, _ = make((1, 32, 1, 100, 64, 64), dtype="bfloat16", shared=16)
    printer = printer_of(kernel)
    decoding = DecodingAttention(kernel, printer.builder, printer, target)
    assert decoding.serves()
    assert decoding.shared == 8
    check((1, 32, 1, 100, 64, 64), dtype="bfloat16", shared=16, target=target)


def test_a_cache_is_read_where_it_lies() -> None:
    """Keys and values of bfloat16 are widened in registers: what a task has for itself is no multiple of them."""
    queries, keys, depth = 1, 2000, 64
    kernel, _ = make((1, 2, queries, keys, depth, depth), dtype="bfloat16")
    printer = printer_of(kernel)
    decoding = DecodingAttention(kernel, printer.builder, printer, HOST)
    assert decoding.serves()
    elements = sum(int(buffer.shape[0]) for buffer in decoding._buffers())
    assert elements < 2 * keys
