"""SDPA pattern matching: attention that a model writes out becomes one operation, for which engines have flash attention kernels.

    scores = q @ k^T                               any matrix product
    p = exp(f(scores) - max) / sum                 its softmax over the keys; f: a function of a score and its place, which may load a mask
    out = p @ v

becomes `AttentionOp(out, q=q, k=k, v=v, score=f)` if nothing else reads the intermediate results.

The matcher inlines views and elementwise operations, and compares the expressions. So the spelling does not matter: views, casts, einsum,
masks that are filled in or added. Inductor matches patterns of operators instead (`torch/_inductor/fx_passes/fuse_attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from torch_hybrid_backend.loops.attention_scores import is_cheap_mask
from torch_hybrid_backend.loops.fusion import replace_loads
from torch_hybrid_backend.loops.graph import LoopGraph, in_order
from torch_hybrid_backend.loops.index import Index, Scalar, as_index
from torch_hybrid_backend.loops.ir import (
    AttentionOp,
    Buffer,
    Call,
    Const,
    Expr,
    IntegerMatMulOp,
    Load,
    LoopOp,
    Map,
    MapOp,
    MatMulOp,
    ReduceOp,
    Value,
    buffers_of,
    buffers_of_expr,
    canonical,
    depth,
    domain_vars,
    loads_of,
    rounded,
)
from torch_hybrid_backend.loops.ops import is_float, literal, mul, times_literal
from torch_hybrid_backend.sizes.size import Dim, size_hint

_MAX_WIDTH = 256  # of a head: a tile holds whole ones
_MAX_DEPTH = 64  # of scores; see `loops.policy.FusionPolicy.max_depth`


def match_sdpa(graph: LoopGraph, *, gathers: bool) -> LoopGraph:
    """The graph with each pair of matrix products around a softmax as one `AttentionOp`.

    gathers: kernels compute masks themselves, at any cost (`loops.policy.FusionPolicy.gathers_in_attention`). Otherwise a kernel reads a mask
    from memory if the mask takes more than a few operations.
    """
    if sum(map(_is_matmul, graph.ops)) < 2:
        return graph
    matcher = _Matcher(graph, gathers)
    ops = tuple(matcher.match(op) if _is_matmul(op) else op for op in graph.ops)
    return replace(graph, ops=in_order(ops, graph.needed))


@dataclass(frozen=True, slots=True)
class _Softmax:
    """A softmax, the left operand of the second product. `scores`: its argument; `product`: the one load in it of a matrix product's result.

    `nan_rows`: a row of -inf alone is NaN, not 0. `intermediates`: the operations that attention replaces if nothing else reads their results.
    """

    scores: Expr
    product: Load
    nan_rows: bool
    intermediates: frozenset[LoopOp]


class _Matcher:
    """Matches attention in one graph."""

    def __init__(self, graph: LoopGraph, gathers: bool) -> None:
        self._gathers = gathers
        self._epilogues: dict[MapOp, bool] = {}  # answers of `_is_epilogue`
        self._producer: Mapping[Buffer, LoopOp] = {out: op for op in graph.ops for out in op.outs}
        self._outputs = frozenset(graph.needed)
        self._readers: dict[Buffer, set[LoopOp]] = {}
        for op in graph.ops:
            for buffer in op.reads():
                self._readers.setdefault(buffer, set()).add(op)

    def match(self, op: MatMulOp) -> LoopOp:
        """The attention whose second product `op` is; `op` itself if there is none."""
        width = op.out.shape[2]
        index = domain_vars(op.a.shape, "p")
        softmax = self._softmax(op.a, index)
        if softmax is None or not isinstance(width, int) or width > _MAX_WIDTH:
            return op
        first = self._producer[softmax.product.buffer]
        assert isinstance(first, MatMulOp)
        depth = first.a.shape[2]
        if not isinstance(depth, int) or depth > _MAX_WIDTH or softmax.product.index != index:
            return op
        if not self._gathers and _is_better_packed_ahead(first, op):
            return op
        replaced = {first, *softmax.intermediates}
        if any(self._is_read_outside(x, replaced | {op}) for x in replaced if self._depends(x, first)):
            return op

        batch = op.out.shape[0]
        (q, scale_of_q), (k, scale_of_k) = self._unscaled(first.a), self._unscaled(first.b)
        factor = scale_of_q * scale_of_k

        def score(product: Expr, place: tuple[Index, ...]) -> Expr:
            here = self._softmax(op.a, place)
            assert here is not None
            scaled = product if factor == 1 else mul(product, literal(factor, product.dtype))
            scaled = rounded(scaled, first.out.dtype)
            return replace_loads(here.scores, lambda load: scaled if load.buffer is first.out else None)

        q = self._queries_inlined(q, first) if q is first.a else q
        k, v = _transposed(k, batch), _of_batches(op.b, batch)
        return AttentionOp(op.out, q=q, k=k, v=v, score=score, nan_rows=softmax.nan_rows)

    def _softmax(self, value: Value, index: tuple[Index, ...]) -> _Softmax | None:
        """A value as a softmax over its last axis, at a point; None if it is computed otherwise."""
        intermediates: set[LoopOp] = set()
        weights, guarded = _unguarded(_unrounded(self._inlined(value.at(index), intermediates)))
        match weights:
            case Call(op="div", args=(Call(op="exp" | "exp_nonpositive", args=(Call(op="sub", args=(s, m)),)) as e, d)):
                scores, top, total = s, _unrounded(m), _unrounded(d)
            case _:
                return None
        if not isinstance(top, Load) or not isinstance(total, Load):
            return None
        if guarded is not None and (not isinstance(guarded, Load) or guarded.buffer is not top.buffer):
            return None
        for load, combiner, body in ((top, "max", scores), (total, "sum", e)):
            reduction = self._producer.get(load.buffer)
            if not isinstance(reduction, ReduceOp) or reduction.combiner != combiner:
                return None
            if reduction.axes != (len(reduction.domain) - 1,) or reduction.domain[-1] != value.shape[-1]:
                return None
            intermediates.add(reduction)
            reduced = self._inlined(reduction.body((*load.index, index[-1])), intermediates)
            if not self._are_equal(reduced, body):
                return None
        products = [x for x in loads_of(scores) if _is_matmul(self._producer.get(x.buffer))]
        return _Softmax(scores, products[0], guarded is None, frozenset(intermediates)) if len(products) == 1 else None

    def _inlined(self, e: Expr, intermediates: set[LoopOp]) -> Expr:
        """The expression with the elementwise operations inlined that fill what it loads. They are added to `intermediates`.

        The expression itself if it would become too deep for a kernel.
        """
        sources = set[LoopOp]()
        values: dict[tuple[Buffer, tuple[Index, ...]], Expr] = {}  # each element once: models repeat `x = x + f(x)`

        def inline(outer: Expr, levels: int) -> Expr:
            def value_of(load: Load) -> Expr | None:
                source = self._producer.get(load.buffer)
                if levels == 0 or not isinstance(source, MapOp) or not self._is_inlined(source):
                    return None
                place = (load.buffer, load.index)
                if place not in values:
                    sources.add(source)
                    value = inline(source.value.at(load.index), levels - 1)
                    values[place] = rounded(value, load.buffer.dtype)
                return values[place]

            return replace_loads(outer, value_of)

        result = inline(e, _MAX_DEPTH)
        if depth(result) > _MAX_DEPTH:
            return e
        intermediates |= sources
        return result

    def _is_inlined(self, op: MapOp) -> bool:
        """True if the operation computes scores, or a mask that costs less to compute than to read."""
        if self._gathers or self._is_epilogue(op):
            return True
        expr = op.value.at(domain_vars(op.value.shape))
        return is_cheap_mask(expr) and not any(map(_is_gathered, loads_of(expr)))

    def _is_epilogue(self, op: MapOp) -> bool:
        """True if elementwise operations alone lead from a matrix product to this one."""
        if op not in self._epilogues:
            loads = loads_of(op.value.at(domain_vars(op.value.shape)))
            sources = [self._producer.get(load.buffer) for load in loads if not _is_gathered(load)]
            self._epilogues[op] = any(
                _is_matmul(source) or (isinstance(source, MapOp) and self._is_epilogue(source)) for source in sources
            )
        return self._epilogues[op]

    def _are_equal(self, first: Expr, second: Expr) -> bool:
        names = {buffer: f"b{buffer.number}" for e in (first, second) for buffer in buffers_of_expr(e)}
        return canonical(_unrounded(first), names) == canonical(_unrounded(second), names)

    def _depends(self, op: LoopOp, first: MatMulOp) -> bool:
        """True if an operation depends on the first product, directly or not. A mask does not: other operations may read it, too."""
        pending, seen = [op], set[LoopOp]()
        while pending:
            source = pending.pop()
            if source is first:
                return True
            if source not in seen:
                seen.add(source)
                pending.extend(self._producer[b] for b in source.reads() if b in self._producer)
        return False

    def _is_read_outside(self, op: LoopOp, inside: set[LoopOp]) -> bool:
        return any(out in self._outputs or not self._readers.get(out, set()) <= inside for out in op.outs)

    def _unscaled(self, value: Value) -> tuple[Value, float]:
        """An operand before an operation scaled it by a literal, and that literal; (the operand, 1) if none did."""
        scaled = self._scaled_load(value.at(domain_vars(value.shape)))
        if scaled is None:
            return value, 1.0

        def at(index: tuple[Index, ...]) -> Expr:
            here = self._scaled_load(value.at(index))
            assert here is not None
            return here[0]

        return Map(value.shape, value.dtype, at), scaled[1]

    def _scaled_load(self, e: Expr) -> tuple[Load, float] | None:
        """(x, factor) where an elementwise operation filled the loaded buffer with x * factor, x a load and the factor a literal; else None."""
        source = self._producer.get(e.buffer) if isinstance(e, Load) else None
        if not isinstance(e, Load) or not isinstance(source, MapOp):
            return None
        inner, factor = source.value.at(e.index), 1.0
        while not isinstance(inner, Load):
            found = times_literal(inner)  # a rounded product is not what its factors are: it stays as it is
            if found is None:
                return None
            inner, factor = found[0], factor * found[1]
        if not math.isfinite(factor) or inner.dtype != e.dtype or isinstance(self._producer.get(inner.buffer), MapOp):
            return None
        return inner, factor

    def _queries_inlined(self, value: Value, first: MatMulOp) -> Value:
        """Queries with the operation inlined that computes them, which then needs no memory: a program reads each of its queries once."""
        loads = loads_of(value.at(domain_vars(value.shape)))
        sources = [self._producer.get(load.buffer) for load in loads]
        if len(loads) != 1 or not isinstance(sources[0], MapOp) or self._readers[sources[0].out] != {first}:
            return value

        def at(index: tuple[Index, ...]) -> Expr:
            def value_of(load: Load) -> Expr | None:
                source = self._producer.get(load.buffer)
                return rounded(source.value.at(load.index), load.buffer.dtype) if isinstance(source, MapOp) else None

            return replace_loads(value.at(index), value_of)

        return Map(value.shape, value.dtype, at)


def _is_matmul(op: LoopOp | None) -> TypeGuard[MatMulOp]:
    """True for a matrix product of floating point. One of integers is exact, and has a zero point beside its operands."""
    return isinstance(op, MatMulOp) and not isinstance(op, IntegerMatMulOp)


def _is_better_packed_ahead(first: MatMulOp, second: MatMulOp) -> bool:
    """True if keys and values are constants, and packing them in every call costs more than keeping scores in memory.

    Two products have constants packed ahead of calls; attention packs in every call. Packing reads and writes each of T keys and values once,
    scores of S queries are written and read twice: T * (D + E) * 2 against S * T * 4 elements. Examples: codebooks, learnt memories.
    """
    if not all(buffer.constant for operand in (first.b, second.b) for buffer in buffers_of(operand)):
        return False
    _, queries, depth = first.a.shape
    return 2 * size_hint(queries) < size_hint(depth) + size_hint(second.out.shape[2])


def _is_gathered(load: Load) -> bool:
    """True if a value in memory is part of the index."""
    return any(isinstance(leaf, Scalar) for index in load.index for leaf in index.leaves())


def _unguarded(e: Expr) -> tuple[Expr, Expr | None]:
    """Weights without the `where` that gives 0 to a row of -inf alone, and the row's maximum, which its condition reads; None without one."""
    match e:
        case Call(op="where", args=(Call(op="eq", args=(top, Const(value=low))), Const(value=0), weights)):
            if low == -math.inf:
                return weights, _unrounded(top)
    return e, None


def _unrounded(e: Expr) -> Expr:
    """The value without casts between floating-point types and rounding: attention is at least as exact without them."""
    while isinstance(e, Call) and e.op in ("cast", "round") and is_float(e.args[0].dtype):
        e = e.args[0]
    return e


def _transposed(value: Value, batch: Dim) -> Value:
    """(batch or 1, D, T) as (batch, T, D)."""
    shape = (batch, value.shape[2], value.shape[1])
    is_shared = value.shape[0] == 1

    def at(index: tuple[Index, ...]) -> Expr:
        return value.at((as_index(0) if is_shared else index[0], index[2], index[1]))

    return Map(shape, value.dtype, at, base=value)


def _of_batches(value: Value, batch: Dim) -> Value:
    """(batch or 1, T, E) as (batch, T, E)."""
    if value.shape[0] == batch:
        return value
    assert value.shape[0] == 1
    shape = (batch, *value.shape[1:])
    return Map(shape, value.dtype, lambda index: value.at((as_index(0), *index[1:])), base=value)
