"""Attention kernels against float64 eager."""

from __future__ import annotations

from dataclasses import fields

import torch

from tests.engines.tvm.schedule_runner import HOST, run_kernel
from torch_hybrid_backend.engines.tvm.cpu.kernels import WordAttentionKernel
from torch_hybrid_backend.engines.tvm.schedules.attention import rules
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, AttentionKernel, Store
from torch_hybrid_backend.loops.layout import Layout, Strided, contiguous


def variables(name: str, shape: tuple[int, ...]) -> tuple[LoopVar, ...]:
    return tuple(LoopVar(f"{name}{i}", n) for i, n in enumerate(shape))


def make(
    shape: tuple[int, int, int, int, int, int],
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: str = "float32",
    heads_inside: bool = False,
) -> tuple[AttentionKernel, dict[Buffer, torch.Tensor]]:
    """(kernel, inputs) of out = 2 * attention(q, k, v) for `shape` (B, H, S, T, D, E).

    heads_inside: memory is (B, S, H, D), as projections leave it.
    """
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
    return kernel, inputs


def check(
    shape: tuple[int, int, int, int, int, int],
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: str = "float32",
    heads_inside: bool = False,
    target: Target = HOST,
) -> None:
    """The result of `make`'s kernel against float64 eager."""
    kernel, inputs = make(shape, mask=mask, causal=causal, dtype=dtype, heads_inside=heads_inside)
    (got,) = run_kernel(kernel, rules.emit, inputs, target)
    want = 2 * torch.nn.functional.scaled_dot_product_attention(
        *(value.double() for value in list(inputs.values())[:3]),
        attn_mask=None if mask is None else mask.double(),
        is_causal=causal,
    )
    tolerance = 2e-2 if dtype == "bfloat16" else 2e-5 if dtype == "float32" else 1e-12
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def in_words(kernel: AttentionKernel, form: str = "") -> WordAttentionKernel:
    """The same kernel with products of bfloat16, on tiles in the format of that name."""
    own = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
    return WordAttentionKernel(**own, format=form)


def check_words(
    shape: tuple[int, int, int, int, int, int],
    *,
    form: str = "",
    mask: torch.Tensor | None = None,
    causal: bool = False,
    heads_inside: bool = False,
    target: Target = HOST,
) -> None:
    """The result of `make`'s kernel in words against float64 eager: its error is about that of eager in the same dtype."""
    dtype = torch.float32 if form.startswith("float32") else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    kernel, inputs = make(shape, mask=mask, causal=causal, dtype=name, heads_inside=heads_inside)
    (got,) = run_kernel(in_words(kernel, form), rules.emit, inputs, target)
    values = list(inputs.values())

    def eager(dtype: torch.dtype) -> torch.Tensor:
        q, k, v, *masks = (value.to(dtype) for value in values)
        return 2 * torch.nn.functional.scaled_dot_product_attention(q, k, v, *masks, is_causal=causal)

    want = eager(torch.float64)

    def error(result: torch.Tensor) -> float:
        return float((result.double() - want).square().mean().sqrt())

    # Where heads of keys and of values differ eager has weights of float32: then their rounding is all the difference.
    factor = 1.5 if shape[4] != shape[5] and dtype == torch.bfloat16 else 50 if form == "float32 high" else 1.1
    least = 1e-4 if dtype == torch.bfloat16 else 1e-8
    assert error(got) <= factor * error(eager(dtype)) + least
    tolerance = 2e-2 if dtype == torch.bfloat16 else 5e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
