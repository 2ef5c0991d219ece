"""Attention kernels against float64 eager."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.engines.cpu.schedule_runner import HOST, run_kernel
from torch_hybrid_backend.engines.cpu.kernels import Bf16AttentionKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.schedules.attention import rules
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, AttentionKernel, Store, as_kind
from torch_hybrid_backend.loops.layout import Layout, Strided, contiguous
from torch_hybrid_backend.sizes.size import Dim, symbol


def variables(name: str, shape: tuple[Dim, ...]) -> tuple[LoopVar, ...]:
    return tuple(LoopVar(f"{name}{i}", n) for i, n in enumerate(shape))


def make(
    shape: tuple[int, int, int, int, int, int],
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: str = "float32",
    heads_inside: bool = False,
    shared: int = 1,
    new_at: int | None = None,
    wraps: bool = False,
    open_sizes: bool = False,
) -> tuple[AttentionKernel, dict[Buffer, torch.Tensor]]:
    """(kernel, inputs) of out = 2 * attention(q, k, v) for `shape` (B, H, S, T, D, E).

    heads_inside: memory is (B, S, H, D), as projections leave it. shared: neighbouring heads that read the same keys and values. new_at: keys
    and values are a cache of which this position is replaced; what by, and the position, are the last three inputs. wraps: positions
    below 0 count from the end. open_sizes: the kernel knows B, S and T at run time only.
    """
    batch, heads, queries, keys, depth, width = shape
    torch.manual_seed(0)
    numbers: dict[Dim, int] = {}
    if open_sizes:
        named = {symbol(name, shape[at]): shape[at] for name, at in (("batch", 0), ("queries", 2), ("keys", 3))}
        numbers, (batch, queries, keys) = named, named

    def layout_of(buffer: Buffer) -> Layout:
        _, h, s, d = buffer.shape
        return Strided((h * s * d, d, h * d, 1)) if heads_inside else contiguous(buffer.shape)

    q, k, v, out = (
        Buffer((batch, number, rows, columns), dtype, name)
        for number, rows, columns, name in [
            (heads, queries, depth, "q"),
            (heads // shared, keys, depth, "k"),
            (heads // shared, keys, width, "v"),
            (heads, queries, width, "out"),
        ]
    )
    inputs = {b: torch.randn([numbers.get(n, n) for n in b.shape]).to(getattr(torch, dtype)) for b in (q, k, v)}
    reads = [Argument(b, layout_of(b)) for b in (q, k, v)]
    score_vars = variables("z", (batch, heads, queries, keys))
    compute = compute_dtype(dtype)
    product = Buffer((batch, heads, queries, keys), compute, "product")
    score = None
    if mask is not None:
        buffer = Buffer(tuple(mask.shape), dtype, "mask")
        inputs[buffer] = mask.to(getattr(torch, dtype))
        reads.append(Argument(buffer, contiguous(buffer.shape)))
        position = [index_of(x) if n > 1 else as_index(0) for x, n in zip(score_vars, mask.shape, strict=True)]
        score = ops.add(product.at(tuple(map(index_of, score_vars))), buffer.at(tuple(position)))
    domain, q_vars = variables("d", out.shape), variables("q", q.shape)
    k_vars, v_vars = (variables(n, (batch, heads, keys, size)) for n, size in [("k", depth), ("v", width)])
    news = [Buffer((*b.shape[:2], 1, b.shape[3]), dtype, "new") for b in (k, v)]
    at = Buffer((1,), "int64", "at")
    if new_at is not None:
        inputs |= {b: torch.randn(b.shape).to(getattr(torch, dtype)) for b in news} | {at: torch.tensor([new_at])}
        reads += [Argument(b, contiguous(b.shape)) for b in (*news, at)]

    def attended(cache: Buffer, new: Buffer, own: tuple[LoopVar, ...]) -> Expr:
        b, h, t, d = map(index_of, own)
        element = cache.at((b, h // shared, t, d))
        if new_at is None:
            return element
        position = at.at((as_index(0),))
        if wraps:
            zero, size = ops.const(0, "int64"), ops.const(keys, "int64")
            position = ops.where(ops.call("lt", position, zero), ops.add(position, size), position)
        is_new = ops.call("eq", position, ops.from_index(t))
        return ops.where(is_new, new.at((b, h // shared, as_index(0), d)), element)

    point = tuple(map(index_of, domain))
    accumulator = Buffer(out.shape, compute, "acc")
    kernel = AttentionKernel(
        tuple(reads),
        (Argument(out, layout_of(out)),),
        domain,
        q=q.at(tuple(map(index_of, q_vars))),
        q_vars=q_vars,
        k=attended(k, news[0], k_vars),
        k_vars=k_vars,
        v=attended(v, news[1], v_vars),
        v_vars=v_vars,
        score=score,
        score_vars=score_vars,
        product=product,
        scale=depth**-0.5,
        causal=causal,
        accumulator=accumulator,
        stores=(Store(out, point, ops.mul(accumulator.at(point), ops.const(2, compute))),),
    )
    return kernel, inputs


def of_int8(
    kernel: AttentionKernel, inputs: dict[Buffer, torch.Tensor], dtypes: tuple[str, ...], zeros: tuple[int, ...]
) -> tuple[AttentionKernel, dict[Buffer, torch.Tensor], list[torch.Tensor]]:
    """`make`'s kernel with queries, keys and values that are dequantized integers: kernel, inputs, and the three in float64."""
    operands, values, buffers, scales = [], [], dict[Buffer, Buffer](), (0.02, 0.03, 0.01)
    for expr, dtype, zero, scale in zip((kernel.q, kernel.k, kernel.v), dtypes, zeros, scales, strict=True):
        assert isinstance(expr, Load)
        narrow = Buffer(expr.buffer.shape, dtype, expr.buffer.name)
        number: Expr = ops.cast(Load(dtype, narrow, expr.index), "float32")
        if zero:
            number = ops.sub(number, ops.const(float(zero), "float32"))
        operands.append(ops.mul(number, ops.const(scale, "float32")))
        least = 0 if dtype == "uint8" else -128
        integers = torch.randint(least, least + 256, narrow.shape).to(getattr(torch, dtype))
        buffers[expr.buffer], values = narrow, [*values, integers]
    q, k, v = operands
    reads = tuple(Argument(buffers.get(read.buffer, read.buffer), read.layout) for read in kernel.reads)
    narrow_inputs = dict(zip(buffers.values(), values, strict=True))
    others = {buffer: value for buffer, value in inputs.items() if buffer not in buffers}
    exact = [(x.double() - zero) * scale for x, zero, scale in zip(values, zeros, scales, strict=True)]
    return replace(kernel, q=q, k=k, v=v, reads=reads), {**narrow_inputs, **others}, exact


def check_beside_eager(got: torch.Tensor, values: list[torch.Tensor], *, causal: bool) -> None:
    """A result of `of_int8`'s kernel is as exact as eager's in float32."""

    def eager(dtype: torch.dtype) -> torch.Tensor:
        q, k, v = (value.to(dtype) for value in values)
        return 2 * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    want = eager(torch.float64)
    of_ours, of_eager = ((result.double() - want).abs().max() for result in (got, eager(torch.float32)))
    assert of_ours <= 1.5 * of_eager


def check(
    shape: tuple[int, int, int, int, int, int],
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: str = "float32",
    heads_inside: bool = False,
    target: Target = HOST,
    shared: int = 1,
    new_at: int | None = None,
    wraps: bool = False,
) -> None:
    """The result of `make`'s kernel against float64 eager."""
    kernel, inputs = make(
        shape,
        mask=mask,
        causal=causal,
        dtype=dtype,
        heads_inside=heads_inside,
        shared=shared,
        new_at=new_at,
        wraps=wraps,
    )
    (got,) = run_kernel(kernel, rules.emit, inputs, target)
    q, *caches = (value.double() for value in list(inputs.values())[:3])
    if new_at is not None and wraps and new_at < 0:
        new_at += shape[3]
    if new_at is not None and 0 <= new_at < shape[3]:
        new = [value.double() for value in list(inputs.values())[-3:-1]]
        caches = [torch.cat((c[:, :, :new_at], n, c[:, :, new_at + 1 :]), 2) for c, n in zip(caches, new, strict=True)]
    want = 2 * torch.nn.functional.scaled_dot_product_attention(
        q,
        *(cache.repeat_interleave(shared, 1) for cache in caches),
        attn_mask=None if mask is None else mask.double(),
        is_causal=causal,
    )
    tolerance = 2e-2 if dtype == "bfloat16" else 2e-5 if dtype == "float32" else 1e-12
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def in_bf16(kernel: AttentionKernel, form: str = "") -> Bf16AttentionKernel:
    """The same kernel with products of bfloat16, on tiles in the format of that name."""
    return as_kind(kernel, Bf16AttentionKernel, format=form)


def check_bf16(
    shape: tuple[int, int, int, int, int, int],
    *,
    form: str = "",
    mask: torch.Tensor | None = None,
    causal: bool = False,
    heads_inside: bool = False,
    target: Target = HOST,
) -> None:
    """The result of `make`'s kernel in bfloat16 against float64 eager: its error is about that of eager in the same dtype."""
    name = FORMATS[form].operand if form else "bfloat16"
    dtype = getattr(torch, name)
    kernel, inputs = make(shape, mask=mask, causal=causal, dtype=name, heads_inside=heads_inside)
    (got,) = run_kernel(in_bf16(kernel, form), rules.emit, inputs, target)
    values = list(inputs.values())

    def eager(dtype: torch.dtype) -> torch.Tensor:
        q, k, v, *masks = (value.to(dtype) for value in values)
        return 2 * torch.nn.functional.scaled_dot_product_attention(q, k, v, *masks, is_causal=causal)

    want = eager(torch.float64)

    def error(result: torch.Tensor) -> float:
        return float((result.double() - want).square().mean().sqrt())

    # Where heads of keys and of values differ eager has weights of float32: then their rounding is all the difference.
    factor = 1.5 if shape[4] != shape[5] and dtype == torch.bfloat16 else 50 if form == "float32 high" else 1.1
    least = {"bfloat16": 1e-4, "float16": 1e-5}.get(name, 1e-8)
    assert error(got) <= factor * error(eager(dtype)) + least
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3}.get(name, 5e-5)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
