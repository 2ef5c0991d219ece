"""Attention of few queries against float64 eager."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, printer_of, run_kernel
from tests.engines.cpu.schedules.attention.attention_for_tests import check, make
from torch_hybrid_backend.engines.cpu.schedules.attention import rules
from torch_hybrid_backend.engines.cpu.schedules.attention.decoding import DecodingAttention
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, AttentionKernel
from torch_hybrid_backend.loops.layout import contiguous


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


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("last", [-1, 0, 31, 32, 599, 1099, 5000])
def test_keys_behind_the_last_visible_one_are_not_read(last: int, shared: int) -> None:
    """Whatever lies there, and in blocks of which no key is visible; no visible key at all gives zeros."""
    kernel, inputs = make((1, 2, 1, 1100, 32, 32), shared=shared)
    at = Buffer((1,), "int64", "last")
    key = ops.from_index(index_of(kernel.score_vars[3]))
    seen = ops.call("le", key, at.at((as_index(0),)))
    product = kernel.product.at(tuple(map(index_of, kernel.score_vars)))
    score = ops.where(seen, product, ops.const(-math.inf, "float32"))
    reads = (*kernel.reads, Argument(at, contiguous(at.shape)))
    kernel = dataclasses.replace(kernel, score=score, reads=reads)
    q, k, v = inputs.values()
    visible = min(max(last + 1, 0), 1100)
    behind = -(-visible // 32) * 32  # of the panel of the last one, all are read
    k[:, :, behind:], v[:, :, behind:] = torch.nan, torch.nan
    (got,) = run_kernel(kernel, rules.emit, inputs | {at: torch.tensor([last])}, HOST)
    keys, values = (x[:, :, :visible].repeat_interleave(shared, 1) for x in (k, v))
    want = 2 * torch.nn.functional.scaled_dot_product_attention(q, keys, values) if visible else torch.zeros_like(q)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


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


@pytest.mark.parametrize(("heads", "shared", "size"), [(4, 1, 16), (4, 4, 32)])
def test_long_caches(heads: int, shared: int, size: int) -> None:
    """Sixteen thousand keys, of which the last is new: running maxima over all blocks of keys stay exact."""
    check((1, heads, 1, 16384, size, size), shared=shared, new_at=16383)


def _decoding(kernel: AttentionKernel, cores: int, base: Target = HOST) -> DecodingAttention:
    printer = printer_of(kernel)
    return DecodingAttention(kernel, printer.builder, printer, dataclasses.replace(base, cores=cores))


@pytest.mark.parametrize(
    ("heads", "together", "keys", "cores", "expected"),
    [
        (8, 8, 16384, 2, (8, 2)),  # one head of keys
        (12, 4, 4096, 2, (4, 2)),  # three
        (32, 8, 16384, 2, (8, 1)),  # four: cores share them evenly
        (32, 8, 16384, 64, (8, 15)),
        (8, 8, 500, 2, (4, 1)),  # too few keys
        (1, 1, 1000, 64, (1, 3)),
    ],
)
def test_keys_are_divided_where_heads_are_few(
    heads: int, together: int, keys: int, cores: int, expected: tuple[int, int]
) -> None:
    """Every core has a part, and none reads keys that another one reads."""
    kernel, _ = make((1, heads, 1, keys, 64, 64), shared=together)
    decoding = _decoding(kernel, cores)
    assert decoding.serves()
    assert (decoding.shared, decoding.key_parts) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "shared", "cores", "base"),
    [
        ((1, 8, 1, 1100, 32, 64), 8, 2, HOST),  # ragged keys, parts of one block
        ((2, 6, 1, 2500, 16, 16), 2, 5, HOST),  # parts of several blocks, whose number is not that of batch and heads
        ((1, 1, 3, 5000, 64, 96), 1, 3, HOST),  # several queries, six vectors of values
        ((1, 8, 1, 1100, 16, 80), 8, 3, NARROW),  # tiles of fewer rows than a task has
    ],
)
def test_parts_of_keys(shape: tuple[int, ...], shared: int, cores: int, base: Target, dtype: str) -> None:
    """A result put together from parts is eager's; so with a mask that hides whole parts, and with a new position in one of them."""
    target = dataclasses.replace(base, cores=cores)
    kernel, _ = make(shape, shared=shared, dtype=dtype)  # type: ignore[arg-type]
    assert _decoding(kernel, cores, base).key_parts > 1
    check(shape, shared=shared, dtype=dtype, target=target, new_at=shape[3] - 7)  # type: ignore[arg-type]
    mask = torch.zeros(1, 1, 1, shape[3])
    mask[..., 40:] = -torch.inf
    check(shape, shared=shared, dtype=dtype, target=target, mask=mask)  # type: ignore[arg-type]


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize(
    ("first", "last"), [(0, -1), (0, 0), (300, 1400), (1599, 1599), (-5, 5000), (900, 800), (1700, 9000)]
)
def test_a_window_of_keys(first: int, last: int, cores: int) -> None:
    """Keys before the first visible one and behind the last are not read, by one task or by several; with none visible the result is zero."""
    target = dataclasses.replace(HOST, cores=cores)
    kernel, inputs = make((1, 2, 1, 1600, 32, 32), shared=2)
    low, high = (Buffer((1,), "int64", name) for name in ("low", "high"))
    key = ops.from_index(index_of(kernel.score_vars[3]))
    of_low, of_high = (buffer.at((as_index(0),)) for buffer in (low, high))
    product = kernel.product.at(tuple(map(index_of, kernel.score_vars)))
    never = ops.const(-math.inf, "float32")
    score = ops.where(ops.call("ge", key, of_low), ops.where(ops.call("le", key, of_high), product, never), never)
    reads = (*kernel.reads, *(Argument(buffer, contiguous(buffer.shape)) for buffer in (low, high)))
    kernel = dataclasses.replace(kernel, score=score, reads=reads)
    assert (_decoding(kernel, cores).key_parts > 1) == (cores > 1)
    q, k, v = inputs.values()
    begin, end = min(max(first, 0), 1600), min(max(last + 1, 0), 1600)
    outside = torch.ones(1600, dtype=torch.bool)
    outside[begin // 32 * 32 : -(-end // 32) * 32] = False
    k[:, :, outside], v[:, :, outside] = torch.nan, torch.nan
    inputs |= {low: torch.tensor([first]), high: torch.tensor([last])}
    (got,) = run_kernel(kernel, rules.emit, inputs, target)
    keys, values = (x[:, :, begin : max(begin, end)].repeat_interleave(2, 1) for x in (k, v))
    seen = begin < end
    want = 2 * torch.nn.functional.scaled_dot_product_attention(q, keys, values) if seen else torch.zeros_like(q)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_all_parts(value: float) -> None:
    """A key or a value that is not finite makes the result of its head what eager makes of it, whichever part it is in."""
    target = dataclasses.replace(HOST, cores=4)
    for operand in (1, 2):
        kernel, inputs = make((2, 1, 1, 1100, 32, 32))
        assert _decoding(kernel, 4).key_parts > 1
        list(inputs.values())[operand][0, 0, 900, 3] = value
        (got,) = run_kernel(kernel, rules.emit, inputs, target)
        want = 2 * torch.nn.functional.scaled_dot_product_attention(*inputs.values())
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)
