"""Anchors: kernels of fusion groups around a matmul, a convolution or attention.

Every backend gets an `Anchor` for such a group. `neutral_kernel` makes the kernel that packs nothing and assumes no layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_hybrid_backend.loops.attention_scores import SdpaScore, unscaled
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import (
    AttentionOp,
    Buffer,
    ConvOp,
    Expr,
    LoopOp,
    MatMulOp,
    Value,
    buffers_of_expr,
    compute_dtype,
    score_over,
)
from torch_hybrid_backend.loops.kernels import Argument, AttentionKernel, ConvKernel, Kernel, MatMulKernel, Store
from torch_hybrid_backend.loops.layout import Layout
from torch_hybrid_backend.loops.ops import add, cast


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """A group around `op`, a matmul, a convolution or attention. `stores`, the epilogue, read the result from `accumulator`, over `domain`.

    `point`: the domain's variables as an index. `inside`: the buffers that the group itself computes, which are no arguments of its kernel.
    """

    op: LoopOp
    domain: tuple[LoopVar, ...]
    accumulator: Buffer
    writes: tuple[Argument, ...]
    stores: tuple[Store, ...]
    layouts: Mapping[Buffer, Layout]
    inside: frozenset[Buffer]

    @property
    def point(self) -> tuple[Index, ...]:
        return tuple(map(index_of, self.domain))

    def reads(self, exprs: Sequence[Expr], operands: Sequence[Buffer] = ()) -> tuple[Argument, ...]:
        """Arguments that the kernel reads: whole `operands`, and the buffers that `exprs` and the stores load."""
        return arguments([*exprs, *(store.value for store in self.stores)], operands, self.inside, self.layouts)


def neutral_kernel(anchor: Anchor) -> Kernel:
    """The kernel with operands as they are in the graph."""
    op = anchor.op
    match op:
        case MatMulOp():
            k = LoopVar("k", op.a.shape[2])
            batch, m, n = anchor.point
            a = op.a.at((batch, m, index_of(k)))
            b = op.b.at((as_index(0) if op.b.shape[0] == 1 else batch, index_of(k), n))
            return MatMulKernel(
                anchor.reads([a, b]),
                anchor.writes,
                anchor.domain,
                k=k,
                a=a,
                b=b,
                accumulator=anchor.accumulator,
                stores=anchor.stores,
            )
        case ConvOp():
            (x_vars, x), (w_vars, w) = over(op.x, "x"), over(op.w, "w")
            return ConvKernel(
                anchor.reads([x, w]),
                anchor.writes,
                anchor.domain,
                x_vars=x_vars,
                x=x,
                w_vars=w_vars,
                w=w,
                stride=op.stride,
                padding=op.padding,
                dilation=op.dilation,
                groups=op.groups,
                accumulator=anchor.accumulator,
                stores=anchor.stores,
                transposed=op.transposed,
            )
        case AttentionOp():
            return _attention_kernel(anchor, op)
    raise TypeError(f"a {type(op).__name__} cannot anchor a kernel")


def _attention_kernel(anchor: Anchor, op: AttentionOp) -> Kernel:
    """The kernel of attention, with a dimension for batches and one for heads. An operation with one leading dimension gets one head."""
    (q_vars, q), (k_vars, k), (v_vars, v) = over(op.q, "q"), over(op.k, "k"), over(op.v, "v")
    product = Buffer((*op.q.shape[:-1], op.k.shape[-2]), compute_dtype(op.out.dtype), "product")
    score_vars, product_at_point = over(product, "z")
    point = tuple(map(index_of, score_vars))
    score: Expr | None = None
    match op.score:
        case SdpaScore(scale=scale, causal=causal, mask=mask):
            if mask is not None:
                score = add(product_at_point, cast(mask.at(point), product.dtype))
        case _:
            causal = False
            scale, score = unscaled(score_over(op.score, product, point), product)
    return AttentionKernel(
        anchor.reads([e for e in (q, k, v, score) if e is not None]),
        anchor.writes,
        _with_heads(anchor.domain),
        q=q,
        q_vars=_with_heads(q_vars),
        k=k,
        k_vars=_with_heads(k_vars),
        v=v,
        v_vars=_with_heads(v_vars),
        score=score,
        score_vars=_with_heads(score_vars),
        product=product,
        scale=scale,
        causal=causal,
        accumulator=anchor.accumulator,
        stores=anchor.stores,
        nan_rows=op.nan_rows,
    )


def _with_heads(variables: tuple[LoopVar, ...]) -> tuple[LoopVar, ...]:
    if len(variables) == 4:
        return variables
    batch, *rest = variables
    return (batch, LoopVar(f"{batch.name}h", 1), *rest)


def over(value: Value, prefix: str) -> tuple[tuple[LoopVar, ...], Expr]:
    """(loop variables, scalar): a value over loop variables of its own."""
    variables = tuple(LoopVar(f"{prefix}{d}", n) for d, n in enumerate(value.shape))
    return variables, value.at(tuple(map(index_of, variables)))


def arguments(
    exprs: Sequence[Expr], operands: Sequence[Buffer], inside: frozenset[Buffer], layouts: Mapping[Buffer, Layout]
) -> tuple[Argument, ...]:
    """The buffers that a kernel reads from outside: `operands` first, then those that `exprs` load."""
    found = dict.fromkeys(operands)
    for expr in exprs:
        for buffer in buffers_of_expr(expr):
            if buffer not in inside and buffer in layouts:
                found[buffer] = None
    return tuple(Argument(b, layouts[b]) for b in found)
