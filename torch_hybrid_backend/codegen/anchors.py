"""Anchors: the kernel of a group around a matmul, a convolution or attention, as the loops language has it.

`Anchor` is what every backend gets of such a group; `neutral_kernel` is the kernel that packs nothing and assumes no layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_hybrid_backend.loops.attention_scores import unscaled
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import (
    AttentionOp,
    Buffer,
    ConvOp,
    Expr,
    LoopOp,
    MatMulOp,
    ScoredAttentionOp,
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
    """`op` is the matmul, convolution or attention; `stores` are written from what it leaves in `accumulator`, over `domain`.

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
        """The kernel's arguments that it reads: whole `operands`, and what `exprs` and the stores load."""
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
            reads = anchor.reads([a, b])
            return MatMulKernel(reads, anchor.writes, anchor.domain, k, a, b, anchor.accumulator, anchor.stores)
        case ConvOp():
            (x_vars, x), (w_vars, w) = over(op.x, "x"), over(op.w, "w")
            return ConvKernel(
                anchor.reads([x, w]),
                anchor.writes,
                anchor.domain,
                x_vars,
                x,
                w_vars,
                w,
                op.stride,
                op.padding,
                op.dilation,
                op.groups,
                anchor.accumulator,
                anchor.stores,
                transposed=op.transposed,
            )
        case AttentionOp() | ScoredAttentionOp():
            return _attention_kernel(anchor, op)
    raise TypeError(f"a {type(op).__name__} is no anchor")


def _attention_kernel(anchor: Anchor, op: AttentionOp | ScoredAttentionOp) -> Kernel:
    """The kernel has batches and heads: heads of one behind batches, where the operation has them as one dimension."""
    (q_vars, q), (k_vars, k), (v_vars, v) = over(op.q, "q"), over(op.k, "k"), over(op.v, "v")
    shape = (*op.q.shape[:-1], op.k.shape[-2])
    product = Buffer(shape, compute_dtype(op.out.dtype), "product")
    score_vars, product_at_point = over(product, "z")
    point = tuple(map(index_of, score_vars))
    score: Expr | None
    if isinstance(op, AttentionOp):
        score = None if op.mask is None else add(product_at_point, cast(op.mask.at(point), product.dtype))
        scale, causal, nan_rows = op.scale, op.causal, False
    else:
        scale, score = unscaled(score_over(op.score, product, point), product)
        causal, nan_rows = False, op.nan_rows
    return AttentionKernel(
        anchor.reads([e for e in (q, k, v, score) if e is not None]),
        anchor.writes,
        _with_heads(anchor.domain),
        q,
        _with_heads(q_vars),
        k,
        _with_heads(k_vars),
        v,
        _with_heads(v_vars),
        score,
        _with_heads(score_vars),
        product,
        scale,
        causal,
        anchor.accumulator,
        anchor.stores,
        nan_rows,
    )


def _with_heads(variables: tuple[LoopVar, ...]) -> tuple[LoopVar, ...]:
    if len(variables) == 4:
        return variables
    batch, *rest = variables
    return (batch, LoopVar(f"{batch.name}h", 1), *rest)


def over(value: Value, prefix: str) -> tuple[tuple[LoopVar, ...], Expr]:
    """A value over loop variables of its own: them, and the scalar."""
    variables = tuple(LoopVar(f"{prefix}{d}", n) for d, n in enumerate(value.shape))
    return variables, value.at(tuple(map(index_of, variables)))


def arguments(
    exprs: Sequence[Expr], operands: Sequence[Buffer], inside: frozenset[Buffer], layouts: Mapping[Buffer, Layout]
) -> tuple[Argument, ...]:
    """The buffers a kernel reads from outside itself: `operands` first, then what `exprs` load."""
    found = dict.fromkeys(operands)
    for expr in exprs:
        for buffer in buffers_of_expr(expr):
            if buffer not in inside and buffer in layouts:
                found[buffer] = None
    return tuple(Argument(b, layouts[b]) for b in found)
