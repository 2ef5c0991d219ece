"""Scatter: points that meet at one element are combined by one thread, one after the other in the order of the domain.

So there are no atomic operations, and results depend neither on chance nor on the number of threads. A variable of the domain is *free* if
it is, alone, a dimension of the place: its values never meet. Data or arithmetic decide the rest of the place, from the other variables.

Threads share, in this order:

1. the free variables but the vector axis, such as batches and channels, if they suffice;
2. else parts of the vector axis (columns), each of whole vectors, and
3. ranges of the first dimension of the place that is not a free variable (rows). Each thread runs through all points, and combines those of
   its rows; of other points it reads the index alone.

A sum over E edges of F features reads E F messages, and reads and writes E F elements of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch_hybrid_backend.engines.cpu.schedules.axes import Env, fastest, is_large, step, vectors
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr, converted
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.attention_scores import is_free_of
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.ir import INDEX_DTYPE, FromIndex
from torch_hybrid_backend.loops.kernels import ScatterKernel, Store
from torch_hybrid_backend.loops.ops import call
from torch_hybrid_backend.sizes.size import ceil_div, product, size_hint

_OPS = {"sum": "add", "max": "max", "min": "min"}


class _Shares(NamedTuple):
    """The number of parts of the vector axis, and of ranges of rows."""

    columns: int
    rows: int


def emit(kernel: ScatterKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The loops of a scatter."""
    return _Scatter(kernel, builder, printer, target).emit()


class _Scatter:
    def __init__(self, kernel: ScatterKernel, builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.b, self.p, self.target = kernel, builder, printer, target
        place, domain = kernel.store.index, [v for v in kernel.domain if v.extent != 1]
        free = [v for v in domain if _is_free(v, place)]
        self.meeting = [v for v in domain if v not in free]
        offset = printer.offset(kernel.store.buffer, place, {})
        self.inner = fastest([offset], free)
        self.outer = sorted((v for v in free if v is not self.inner), key=lambda v: -step(offset, v))
        # Dimensions of the place that are computed once for a point, and not for each element of the vector axis.
        self.computed = [d for d, i in enumerate(place) if i.terms and not any(i == index_of(v) for v in free)]

    def emit(self) -> Stmt:
        extents = [v.extent for v in self.outer]
        cores = self.target.cores if is_large(self.kernel, [self.kernel.store.value]) else 1
        shares = self._shares(cores)

        def task(at: tuple[Index, ...]) -> Stmt:
            column, row, *others = at
            env: Env = dict(zip(self.outer, others, strict=True))

            def point(here: tuple[Index, ...]) -> Stmt:
                return self._point({**env, **dict(zip(self.meeting, here, strict=True))}, column, row, shares)

            return self.b.nest([v.extent for v in self.meeting], point)

        kind = "parallel" if cores > 1 else "serial"
        return self.b.fused([shares.columns, shares.rows, *extents], task, kind)

    def _shares(self, cores: int) -> _Shares:
        if size_hint(product(v.extent for v in self.outer)) >= cores:
            return _Shares(1, 1)
        columns = 1
        if self.inner is not None and isinstance(extent := self.inner.extent, int):
            columns = max(c for c in range(1, cores + 1) if c == 1 or extent % (c * self.target.lanes) == 0)
        return _Shares(columns, -(-cores // columns) if self.computed else 1)

    def _point(self, env: Env, column: Index, row: Index, shares: _Shares) -> Stmt:
        """A point is combined with its place, if that is one of this task's rows."""
        buffer, place = self.kernel.store.buffer, list(self.kernel.store.index)

        def use(values: list[TirExpr]) -> Stmt:
            binds: list[Stmt] = []
            for d, value in zip(self.computed, values, strict=True):
                place[d], bind = self.b.bound(converted(value, INDEX_DTYPE, self.b.address), buffer.shape[d], "place")
                binds.append(bind)
            body = self._combined(tuple(place), env, column, shares.columns)
            if shares.rows == 1:
                return self.b.seq(*binds, body)
            d = self.computed[0]
            rows, position = ceil_div(buffer.shape[d], shares.rows), self.b.index(place[d])
            first, end = (self.b.index((row + n) * rows) for n in (0, 1))
            return self.b.seq(*binds, self.b.when(tir.logical_and(first <= position, position < end), body))

        places = [FromIndex(INDEX_DTYPE, self.kernel.store.index[d]) for d in self.computed]
        return self.p.evaluate(places, env, use)

    def _combined(self, place: tuple[Index, ...], env: Env, column: Index, columns: int) -> Stmt:
        store, inner = self.kernel.store, self.inner
        value = store.value
        if self.kernel.combiner != "write":
            value = call(_OPS[self.kernel.combiner], store.buffer.at(place), value)
        combined = Store(store.buffer, place, value)
        if inner is None:
            return self.p.store(combined, env)
        width = inner.extent if columns == 1 else inner.extent // columns

        def along(base: Index, lane: Index, _: int) -> Stmt:
            return self.p.store(combined, {**env, inner: column * width + base + lane})

        return vectors(self.b, self.p, width, self.target.lanes, along)


def _is_free(variable: LoopVar, place: Sequence[Index]) -> bool:
    """True if a variable is one dimension of the place and no other depends on it."""
    depending = [index for index in place if not is_free_of(FromIndex(INDEX_DTYPE, index), variable)]
    return depending == [index_of(variable)]
