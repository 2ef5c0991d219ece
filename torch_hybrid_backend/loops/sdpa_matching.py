"""Attention that a model writes out, as one operation: two matrix products with a softmax between them, found by what is computed.

    scores = q @ k^T                               any matrix product
    p = exp(f(scores) - max) / sum                 over its columns; f: any function of a score and of where it stands, with what else it loads
    out = p @ v

becomes `ScoredAttentionOp(out, q, k, v, f)`, where nothing else reads what is between. How the model got there (views, casts, einsum, masks
filled in or added) does not matter: expressions are compared after views and elementwise operations have been written out. Kernels that may not
gather read a mask from memory where it is more than a few operations.
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
    ScoredAttentionOp,
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


def find_attention(graph: LoopGraph, *, gathers: bool) -> LoopGraph:
    """The graph with every written attention as one operation.

    gathers: kernels compute masks as they need them, whatever that takes (`loops.policy.FusionPolicy.gathers_in_attention`).
    """
    if sum(map(_is_product, graph.ops)) < 2:
        return graph
    search = _Search(graph, gathers)
    ops = tuple(search.replaced(op) if _is_product(op) else op for op in graph.ops)
    return replace(graph, ops=in_order(ops, graph.needed))


@dataclass(frozen=True, slots=True)
class _Softmax:
    """The left operand of a product as a softmax: `scores` is what it is of, `product` the one load of a matrix product's result in it.

    `nan_rows`: a row of -inf alone is NaN, not 0. `between`: the operations whose results must be read by nothing else.
    """

    scores: Expr
    product: Load
    nan_rows: bool
    between: frozenset[LoopOp]


class _Search:
    def __init__(self, graph: LoopGraph, gathers: bool) -> None:
        self._gathers = gathers
        self._of_product: dict[MapOp, bool] = {}
        self._producer: Mapping[Buffer, LoopOp] = {out: op for op in graph.ops for out in op.outs}
        self._outputs = frozenset(graph.needed)
        self._readers: dict[Buffer, set[LoopOp]] = {}
        for op in graph.ops:
            for buffer in op.reads():
                self._readers.setdefault(buffer, set()).add(op)

    def replaced(self, op: MatMulOp) -> LoopOp:
        """The attention that ends with a product, or the product."""
        width = op.out.shape[2]
        index = domain_vars(op.a.shape, "p")
        found = self._softmax(op.a, index)
        if found is None or not isinstance(width, int) or width > _MAX_WIDTH:
            return op
        first = self._producer[found.product.buffer]
        assert isinstance(first, MatMulOp)
        depth = first.a.shape[2]
        if not isinstance(depth, int) or depth > _MAX_WIDTH or found.product.index != index:
            return op
        if not self._gathers and _is_better_packed_ahead(first, op):
            return op
        between = {first, *found.between}
        if any(self._is_read_outside(own, between | {op}) for own in between if self._depends(own, first)):
            return op

        batch = op.out.shape[0]
        (q, of_queries), (k, of_keys) = self._unscaled(first.a), self._unscaled(first.b)
        factor = of_queries * of_keys

        def score(product: Expr, place: tuple[Index, ...]) -> Expr:
            own = self._softmax(op.a, place)
            assert own is not None
            scaled = product if factor == 1 else mul(product, literal(factor, product.dtype))
            scaled = rounded(scaled, first.out.dtype)
            return replace_loads(own.scores, lambda load: scaled if load.buffer is first.out else None)

        q = self._inlined(q, first) if q is first.a else q
        return ScoredAttentionOp(op.out, q, _keys(k, batch), _batched(op.b, batch), score, found.nan_rows)

    def _softmax(self, value: Value, index: tuple[Index, ...]) -> _Softmax | None:
        between: set[LoopOp] = set()
        weights, guarded = _unguarded(_unrounded(self._written_out(value.at(index), between)))
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
            between.add(reduction)
            own = self._written_out(reduction.body((*load.index, index[-1])), between)
            if not self._are_equal(own, body):
                return None
        products = [x for x in loads_of(scores) if _is_product(self._producer.get(x.buffer))]
        return _Softmax(scores, products[0], guarded is None, frozenset(between)) if len(products) == 1 else None

    def _written_out(self, e: Expr, between: set[LoopOp]) -> Expr:
        """The expression with what elementwise operations computed written out; they are added to `between`. One that becomes too deep for a
        kernel stays as it is."""
        found = set[LoopOp]()
        values: dict[tuple[Buffer, tuple[Index, ...]], Expr] = {}  # each element once: models repeat `x = x + f(x)`

        def written_out(own: Expr, levels: int) -> Expr:
            def inner(load: Load) -> Expr | None:
                source = self._producer.get(load.buffer)
                if levels == 0 or not isinstance(source, MapOp) or not self._is_written_out(source):
                    return None
                place = (load.buffer, load.index)
                if place not in values:
                    found.add(source)
                    value = written_out(source.value.at(load.index), levels - 1)
                    values[place] = rounded(value, load.buffer.dtype)
                return values[place]

            return replace_loads(own, inner)

        written = written_out(e, _MAX_DEPTH)
        if depth(written) > _MAX_DEPTH:
            return e
        between |= found
        return written

    def _is_written_out(self, op: MapOp) -> bool:
        """True if scores are computed by it, or a mask that costs less to compute than to read."""
        if self._gathers or self._is_of_product(op):
            return True
        expr = op.value.at(domain_vars(op.value.shape))
        return is_cheap_mask(expr) and not any(map(_is_gathered, loads_of(expr)))

    def _is_of_product(self, op: MapOp) -> bool:
        """True if it is computed from a matrix product, elementwise and by elementwise operations alone."""
        if op not in self._of_product:
            loads = loads_of(op.value.at(domain_vars(op.value.shape)))
            sources = [self._producer.get(load.buffer) for load in loads if not _is_gathered(load)]
            self._of_product[op] = any(
                _is_product(own) or (isinstance(own, MapOp) and self._is_of_product(own)) for own in sources
            )
        return self._of_product[op]

    def _are_equal(self, first: Expr, second: Expr) -> bool:
        names = {buffer: f"b{buffer.number}" for e in (first, second) for buffer in buffers_of_expr(e)}
        return canonical(_unrounded(first), names) == canonical(_unrounded(second), names)

    def _depends(self, op: LoopOp, first: MatMulOp) -> bool:
        """True if an operation computes from a product, at any distance; a mask does not, and may be read by others."""
        pending, seen = [op], set[LoopOp]()
        while pending:
            own = pending.pop()
            if own is first:
                return True
            if own not in seen:
                seen.add(own)
                pending.extend(source for b in own.reads() if (source := self._producer.get(b)) is not None)
        return False

    def _is_read_outside(self, op: LoopOp, inside: set[LoopOp]) -> bool:
        return any(out in self._outputs or not self._readers.get(out, set()) <= inside for out in op.outs)

    def _unscaled(self, value: Value) -> tuple[Value, float]:
        """An operand and a factor: it is read from where it was scaled by a literal. The operand itself where there is no such thing."""
        found = self._source(value.at(domain_vars(value.shape)))
        if found is None:
            return value, 1.0

        def at(index: tuple[Index, ...]) -> Expr:
            own = self._source(value.at(index))
            assert own is not None
            return own[0]

        return Map(value.shape, value.dtype, at), found[1]

    def _source(self, e: Expr) -> tuple[Load, float] | None:
        """The load, and its scale by literals, where an elementwise operation filled the buffer that is loaded."""
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

    def _inlined(self, value: Value, first: MatMulOp) -> Value:
        """Queries as they are computed: a program reads its own once, so that what is done to them needs no memory."""
        loads = loads_of(value.at(domain_vars(value.shape)))
        sources = [self._producer.get(load.buffer) for load in loads]
        if len(loads) != 1 or not isinstance(sources[0], MapOp) or self._readers[sources[0].out] != {first}:
            return value

        def at(index: tuple[Index, ...]) -> Expr:
            def inner(load: Load) -> Expr | None:
                source = self._producer.get(load.buffer)
                return rounded(source.value.at(load.index), load.buffer.dtype) if isinstance(source, MapOp) else None

            return replace_loads(value.at(index), inner)

        return Map(value.shape, value.dtype, at)


def _is_product(op: LoopOp | None) -> TypeGuard[MatMulOp]:
    """A matrix product of floating point; one of integers has a zero point beside its operands, and is exact."""
    return isinstance(op, MatMulOp) and not isinstance(op, IntegerMatMulOp)


def _is_better_packed_ahead(first: MatMulOp, second: MatMulOp) -> bool:
    """True if packing keys and values in every call costs more than scores in memory do, where products have both packed ahead.

    That is where they are constants: codebooks, memories that are learnt. Each of T keys and values is read and written once, the scores of S
    queries are written and read twice: T * (D + Dv) * 2 against S * T * 4 elements.
    """
    if not all(buffer.constant for operand in (first.b, second.b) for buffer in buffers_of(operand)):
        return False
    _, queries, depth = first.a.shape
    return 2 * size_hint(queries) < size_hint(depth) + size_hint(second.out.shape[2])


def _is_gathered(load: Load) -> bool:
    """True if it is read where another number says."""
    return any(isinstance(leaf, Scalar) for index in load.index for leaf in index.leaves())


def _unguarded(e: Expr) -> tuple[Expr, Expr | None]:
    """Weights without the choice of 0 where the greatest score is -inf, and that score."""
    match e:
        case Call(op="where", args=(Call(op="eq", args=(top, Const(value=low))), Const(value=0), weights)):
            if low == -math.inf:
                return weights, _unrounded(top)
    return e, None


def _unrounded(e: Expr) -> Expr:
    """The value that is rounded or cast between floating-point types: products with it are at least as exact without."""
    while isinstance(e, Call) and e.op in ("cast", "round") and is_float(e.args[0].dtype):
        e = e.args[0]
    return e


def _keys(value: Value, batch: Dim) -> Value:
    """(Z, D, T) as (Z, T, D)."""
    shape = (batch, value.shape[2], value.shape[1])
    is_shared = value.shape[0] == 1

    def at(index: tuple[Index, ...]) -> Expr:
        return value.at((as_index(0) if is_shared else index[0], index[2], index[1]))

    return Map(shape, value.dtype, at, base=value)


def _batched(value: Value, batch: Dim) -> Value:
    if value.shape[0] == batch:
        return value
    assert value.shape[0] == 1
    shape = (batch, *value.shape[1:])
    return Map(shape, value.dtype, lambda index: value.at((as_index(0), *index[1:])), base=value)
