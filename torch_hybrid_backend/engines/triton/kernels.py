"""The kernels of attention on a GPU: what `loops/kernels.py` has for every backend, with any score, log-sum-exps, gradients and splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_hybrid_backend.codegen.anchors import Anchor, over
from torch_hybrid_backend.loops.attention_scores import SdpaScore, is_free_of
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.ir import (
    AttentionGradientOp,
    AttentionKeyGradientOp,
    AttentionOp,
    Buffer,
    Expr,
    ScoreFn,
    buffers_of_expr,
    compute_dtype,
    score_over,
)
from torch_hybrid_backend.loops.kernels import Argument, Kernel, RowKernel, Stage, Store
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.loops.ops import call, literal
from torch_hybrid_backend.sizes.size import Dim


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreKernel(Kernel):
    """The base of the kernels of attention. Leading dimensions are written *lead; the last of them are the heads.

    `score` is over `score_vars` (*lead, s, t) and reads `product`, which lives in the kernel: q . k at that point. `share` query heads read
    the same keys and values.
    """

    q: Expr
    q_vars: tuple[LoopVar, ...]  # (*lead, s, d)
    k: Expr
    k_vars: tuple[LoopVar, ...]  # (*lead, t, d)
    v: Expr
    v_vars: tuple[LoopVar, ...]  # (*lead, t, e)
    score: Expr
    score_vars: tuple[LoopVar, ...]
    product: Buffer
    share: int
    accumulator: Buffer
    stores: tuple[Store, ...]

    @property
    def lead(self) -> tuple[LoopVar, ...]:
        """The leading dimensions of the queries."""
        return self.q_vars[:-2]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlashKernel(ScoreKernel):
    """Domain (*lead, s, e): softmax of the scores times v, then `stores` read `accumulator`.

    `row_stores` are over `row_vars` (*lead, s) and read `log_sum_exp`, natural; a row that sees nothing has `empty` there. Such a row's
    result is 0, or NaN with `nan_rows`.

    `splits`: so many programs share the keys of a row; each of them stores its own part, and `split`, its number, is among the variables of
    `stores` and `row_stores`.

    `scale`: where scores are product * scale + mask, causal or not, and the result alone is stored; None where there is more to them. `mask` is
    over `mask_vars` (*lead, s, t).
    """

    log_sum_exp: Buffer
    row_vars: tuple[LoopVar, ...]
    row_stores: tuple[Store, ...] = field(default=())
    empty: float = 0.0
    nan_rows: bool = False
    split: LoopVar | None = None
    scale: float | None = None
    causal: bool = False
    mask: Expr | None = None
    mask_vars: tuple[LoopVar, ...] = ()

    @property
    def splits(self) -> int:
        if self.split is None:
            return 1
        assert isinstance(self.split.extent, int)
        return self.split.extent


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GradientKernel(ScoreKernel):
    """See `loops.ir.AttentionGradientOp`."""

    grad: Expr
    grad_vars: tuple[LoopVar, ...]  # (*lead, s, e)
    log_sum_exp: Expr
    delta: Expr
    row_vars: tuple[LoopVar, ...]  # (*lead, s), of both
    scale: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueryGradientKernel(GradientKernel):
    """Domain (*lead, s, d): the queries' gradient."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KeyGradientKernel(GradientKernel):
    """Domain (b, g, t, d): the keys' gradient, for each head of keys. `value_stores` are over `value_vars` (b, g, t, e) and read the values'
    gradient, `value_accumulator`."""

    value_accumulator: Buffer
    value_vars: tuple[LoopVar, ...]
    value_stores: tuple[Store, ...]


def attention_kernel(anchor: Anchor) -> Kernel:
    """The kernel of a group around attention, or around one of its gradients."""
    op = anchor.op
    assert isinstance(op, AttentionOp | AttentionGradientOp)
    (q_vars, q), (k_vars, k), (v_vars, v) = over(op.q, "q"), over(op.k, "k"), over(op.v, "v")
    score_vars = _variables((*op.q.shape[:-1], op.k.shape[-2]), "z")
    product = Buffer((*op.q.shape[:-1], op.k.shape[-2]), compute_dtype(op.q.dtype), "product")
    score = score_over(op.score, product, tuple(map(index_of, score_vars)))
    share = _share(q_vars[-3].extent, (k, k_vars), (v, v_vars))
    fields = dict[str, Any](q=q, q_vars=q_vars, k=k, k_vars=k_vars, v=v, v_vars=v_vars, product=product, share=share)
    fields |= {"score": score, "score_vars": score_vars, "accumulator": anchor.accumulator, "stores": anchor.stores}
    written = {argument.buffer: argument for argument in anchor.writes}
    shape = op.q.shape[:-1]
    row_vars = _variables(shape, "r")
    if isinstance(op, AttentionOp):
        log_sum_exp = Buffer(shape, compute_dtype(op.out.dtype), "log-sum-exp")
        rows = _plain_stores(op.log_sum_exp, log_sum_exp, row_vars, written)
        return FlashKernel(
            _reads(anchor, [q, k, v, score], product),
            anchor.writes,
            anchor.domain,
            **fields,
            log_sum_exp=log_sum_exp,
            row_vars=row_vars,
            row_stores=rows,
            empty=op.empty,
            nan_rows=op.nan_rows,
            **({} if rows else _arguments_of(op.score)),
        )
    grad_vars, grad = over(op.grad, "g")
    point = tuple(map(index_of, row_vars))
    statistics, delta = op.log_sum_exp.at(point), op.delta.at(point)
    reads = _reads(anchor, [q, k, v, score, grad, statistics, delta], product)
    fields |= {"grad": grad, "grad_vars": grad_vars, "log_sum_exp": statistics, "delta": delta}
    fields |= {"row_vars": row_vars, "scale": op.scale}
    if not isinstance(op, AttentionKeyGradientOp):
        return QueryGradientKernel(reads, anchor.writes, anchor.domain, **fields)
    value_vars = _variables(op.value.shape, "w")
    value_accumulator = Buffer(op.value.shape, compute_dtype(op.value.dtype), "value accumulator")
    value_stores = _plain_stores(op.value, value_accumulator, value_vars, written)
    fields |= {"value_accumulator": value_accumulator, "value_vars": value_vars, "value_stores": value_stores}
    return KeyGradientKernel(reads, anchor.writes, anchor.domain, **fields)


def _arguments_of(score: ScoreFn) -> dict[str, Any]:
    """The arguments of a FlashKernel that say what scores are in the terms of attention operators."""
    if not isinstance(score, SdpaScore):
        return {}
    mask_vars, mask = over(score.mask, "m") if score.mask is not None else ((), None)
    return {"scale": score.scale, "causal": score.causal, "mask": mask, "mask_vars": mask_vars}


def _variables(shape: Sequence[Dim], prefix: str) -> tuple[LoopVar, ...]:
    return tuple(LoopVar(f"{prefix}{d}", n) for d, n in enumerate(shape))


def _plain_stores(
    buffer: Buffer | None, local: Buffer, variables: tuple[LoopVar, ...], written: Mapping[Buffer, Argument]
) -> tuple[Store, ...]:
    """Stores of `local` as it is, where anything reads it."""
    if buffer is None or buffer not in written:
        return ()
    point = tuple(map(index_of, variables))
    return (Store(buffer, point, local.at(point)),)


def _reads(anchor: Anchor, exprs: list[Expr], product: Buffer) -> tuple[Argument, ...]:
    assert product not in anchor.layouts
    return anchor.reads(exprs)


def _share(heads: Dim, *operands: tuple[Expr, tuple[LoopVar, ...]]) -> int:
    """The number of heads in a row that read the same of each operand: the greatest that divides all heads."""
    if not isinstance(heads, int):
        return 1
    for share in (n for n in range(heads, 1, -1) if heads % n == 0):
        group, member = LoopVar("group", heads // share), LoopVar("member", share)
        if all(
            is_free_of(expr, member, {variables[-3]: index_of(group) * share + index_of(member)})
            for expr, variables in operands
        ):
            return share
    return 1


# Splits


def split_along_keys(kernel: FlashKernel, splits: int) -> tuple[Kernel, ...]:
    """The same by `splits` programs for each row, which share its keys, and a kernel that combines what they found; where log-sum-exps are
    wanted one more, which combines theirs.

    Source: Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023.
    """
    dtype = kernel.accumulator.dtype
    shape = tuple(v.extent for v in kernel.domain)
    parts = Buffer((splits, *shape), dtype, "parts")
    sums = Buffer((splits, *shape[:-1]), dtype, "sums")
    split = LoopVar("split", splits)
    point, row = tuple(map(index_of, kernel.domain)), tuple(map(index_of, kernel.row_vars))
    arguments = tuple(Argument(buffer, contiguous(buffer.shape)) for buffer in (parts, sums))
    prologues = {buffer for e in (kernel.q, kernel.k, kernel.v, kernel.score) for buffer in buffers_of_expr(e)}
    partial = replace(
        kernel,
        reads=tuple(argument for argument in kernel.reads if argument.buffer in prologues),
        writes=arguments,
        stores=(Store(parts, (index_of(split), *point), kernel.accumulator.at(point)),),
        row_stores=(Store(sums, (index_of(split), *row), kernel.log_sum_exp.at(row)),),
        empty=float("-inf"),
        nan_rows=False,
        split=split,
        scale=None,
        mask=None,
        mask_vars=(),
    )
    p = LoopVar("p", splits)
    place = index_of(p)
    zero, one = literal(0, dtype), literal(1, dtype)

    def combining(point: tuple[Index, ...], result: Buffer) -> tuple[list[Stage], Expr, Expr, Expr]:
        """The stages that the sums of the parts go through, for a kernel over `point`: the greatest of their logarithms, or 0, the weight of a
        part beside it, and the sum of weights."""
        top, total = (Buffer(result.shape, dtype, name) for name in ("top", "total"))
        own, largest = sums.at((place, *point[: len(kernel.row_vars)])), top.at(point)
        sees_nothing = call("eq", largest, literal(float("-inf"), dtype))
        base = call("where", sees_nothing, zero, largest, dtype=dtype)
        weight = call("exp", call("sub", own, base))
        stages = [Stage("reduce", top, own, "max"), Stage("reduce", total, weight, "sum")]
        return stages, base, weight, total.at(point)

    def combined(
        domain: tuple[LoopVar, ...], found: Sequence[Argument], stages: list[Stage], stores: Sequence[Store]
    ) -> RowKernel:
        """The kernel that stores what the stages make of what was `found` of the parts."""
        stored = {store.buffer for store in stores}
        read = {buffer for store in stores for buffer in buffers_of_expr(store.value)}
        reads = (*found, *(a for a in kernel.reads if a.buffer in read))
        writes = tuple(a for a in kernel.writes if a.buffer in stored)
        last = [Stage("store_scalar", None, store.value, store=store) for store in stores]
        return RowKernel(reads, writes, (*domain, p), (len(domain),), (*stages, *last))

    stages, _, weight, whole = combining(point, kernel.accumulator)
    weights = Buffer(shape, dtype, "weights")
    divisor = whole if kernel.nan_rows else call("where", call("eq", whole, zero), one, whole, dtype=dtype)
    stages += [
        Stage("reduce", weights, call("mul", weight, parts.at((place, *point))), "sum"),
        Stage("scalar", kernel.accumulator, call("div", weights.at(point), divisor)),
    ]
    results = combined(kernel.domain, arguments, stages, kernel.stores)
    if not kernel.row_stores:
        return partial, results
    stages, base, _, whole = combining(row, kernel.log_sum_exp)
    found = call("add", base, call("log", whole))
    value = call("where", call("eq", whole, zero), literal(kernel.empty, dtype), found, dtype=dtype)
    stages.append(Stage("scalar", kernel.log_sum_exp, value))
    return partial, results, combined(kernel.row_vars, arguments[1:], stages, kernel.row_stores)
