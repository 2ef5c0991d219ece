"""Attention schedule against float64 eager."""

from __future__ import annotations

import pytest
import torch

from tests.engines.tvm.schedule_runner import HOST, NARROW, run_kernel
from torch_hybrid_backend.engines.tvm.schedules.attention import rules
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, AttentionKernel, Store
from torch_hybrid_backend.loops.layout import Layout, Strided, contiguous


def variables(name: str, shape: tuple[int, ...]) -> tuple[LoopVar, ...]:
    return tuple(LoopVar(f"{name}{i}", n) for i, n in enumerate(shape))


def check(
    shape: tuple[int, int, int, int, int, int],
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: str = "float32",
    heads_inside: bool = False,
    target: Target = HOST,
) -> None:
    """out = 2 * attention(q, k, v) for `shape` (B, H, S, T, D, E); `heads_inside`: memory is (B, S, H, D), as projections leave it."""
    batch, heads, queries, keys, depth, width = shape
    torch.manual_seed(0)

    def layout_of(buffer: Buffer) -> Layout:
        _, h, s, d = buffer.shape
        return Strided((h * s * d, d, h * d, 1)) if heads_inside else contiguous(buffer.shape)

    q, k, v, out = (
        Buffer((batch, heads, rows, columns), dtype, name)
        for rows, columns, name in [
            (queries, depth, "q"),
            (keys, depth, "k"),
            (keys, width, "v"),
            (queries, width, "out"),
        ]
    )
    inputs = {b: torch.randn(b.shape).to(getattr(torch, dtype)) for b in (q, k, v)}
    reads = [Argument(b, layout_of(b)) for b in (q, k, v)]
    mask_vars = variables("z", (batch, heads, queries, keys))
    mask_expr = None
    if mask is not None:
        buffer = Buffer(tuple(mask.shape), dtype, "mask")
        inputs[buffer] = mask.to(getattr(torch, dtype))
        reads.append(Argument(buffer, contiguous(buffer.shape)))
        position = [index_of(x) if n > 1 else as_index(0) for x, n in zip(mask_vars, mask.shape, strict=True)]
        mask_expr = buffer.at(tuple(position))
    domain, q_vars, k_vars, v_vars = (variables(n, b.shape) for n, b in [("d", out), ("q", q), ("k", k), ("v", v)])
    point = tuple(map(index_of, domain))
    compute = compute_dtype(dtype)
    accumulator = Buffer(out.shape, compute, "acc")
    kernel = AttentionKernel(
        tuple(reads),
        (Argument(out, layout_of(out)),),
        domain,
        q.at(tuple(map(index_of, q_vars))),
        q_vars,
        k.at(tuple(map(index_of, k_vars))),
        k_vars,
        v.at(tuple(map(index_of, v_vars))),
        v_vars,
        mask_expr,
        mask_vars,
        depth**-0.5,
        causal,
        accumulator,
        (Store(out, point, ops.mul(accumulator.at(point), ops.const(2, compute))),),
    )
    (got,) = run_kernel(kernel, rules.emit, inputs, target)
    want = 2 * torch.nn.functional.scaled_dot_product_attention(
        *(inputs[b].double() for b in (q, k, v)), attn_mask=None if mask is None else mask.double(), is_causal=causal
    )
    tolerance = 2e-2 if dtype == "bfloat16" else 2e-5 if dtype == "float32" else 1e-12
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 5, 7, 3, 3),  # smaller than a vector everywhere
        (2, 1, 40, 37, 20, 24),  # ragged everywhere
        (1, 1, 1, 100, 16, 16),  # one query
        (1, 1, 6, 1, 8, 40),  # one key
    ],
)
def test_matches_eager(shape: tuple[int, ...]) -> None:
    """(B, H, S, T, D, E)."""
    check(shape)  # type: ignore[arg-type]


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


def test_causal() -> None:
    """A query sees the keys up to its own position, also with more keys than queries."""
    check((2, 3, 33, 33, 16, 16), causal=True)
    check((1, 1, 10, 50, 8, 8), causal=True)


@pytest.mark.parametrize("mask_shape", [(1, 1, 20, 50), (2, 1, 1, 50)])
def test_additive_mask(mask_shape: tuple[int, ...]) -> None:
    """Masks of the whole score matrix and of keys, with minus infinities."""
    torch.manual_seed(1)
    mask = torch.randn(mask_shape)
    check((2, 2, 20, 50, 16, 16), mask=torch.where(torch.rand(mask_shape) < 0.3, -torch.inf, mask))


def test_a_fully_masked_row_is_zero() -> None:
    """As eager's scaled_dot_product_attention: zeros, not NaN."""
    mask = torch.zeros(1, 1, 4, 9)
    mask[:, :, 2] = -torch.inf
    check((1, 2, 4, 9, 8, 8), mask=mask)


def test_long_keys_go_in_blocks() -> None:
    """Beyond 1024 keys the softmax runs online; a block that is wholly masked changes nothing."""
    mask = torch.zeros(1, 1, 1, 1100)
    mask[..., :600] = -torch.inf
    check((1, 1, 20, 1100, 16, 40), mask=mask)
    check((1, 1, 1100, 1100, 8, 8), causal=True)


def test_rows_are_shared_out_where_heads_are_few() -> None:
    """One head and three cores: pieces of the query rows, each with its own packed keys."""
    check((1, 1, 50, 20, 8, 8), target=NARROW)


def test_memory_of_projections() -> None:
    """q, k, v and the output lie as (B, S, H, D)."""
    check((1, 2, 17, 20, 8, 8), heads_inside=True)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    """float64 stays float64; bfloat16 is computed in float32."""
    check((1, 2, 9, 20, 8, 8), dtype=dtype)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 3, 1, 100, 64, 64),  # ragged keys
        (2, 1, 1, 64, 16, 48),  # whole panels, three vectors of values
        (1, 1, 4, 7, 32, 16),  # four queries
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
