"""Row kernels: reductions over the same axes of one domain, and what is computed per row from them.

Pattern: per row, stages in order: softmax is reduce(max) -> map(exp) -> reduce(sum) -> store; a layer norm reduce(sum) -> scalar ->
reduce(sum of squares) -> store; pooling reduce(max) over a window -> store.

Strategy
1. The vector axis is the dimension along which most accesses go element by element.
2. It is reduced (softmax over the last dimension): one task per row; every stage runs along the row in vectors; a reduction
   keeps several vector accumulators, so that additions overlap, and combines them by halves at the end of the row.
3. It is kept (pooling, means over rows or pixels, anything in NCHW16c): a task handles one vector of rows at once; reduced axes are serial
   loops inside, small windows unrolled; the accumulator is one vector.
4. A guard around an element (a window's padding) that does not depend on the lane becomes a branch around the vector step.
5. Values that later stages read stay in a buffer of the row.

Not used: splitting one long row over several threads (few-row reductions of large tensors run on as many threads as there are rows).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import tvm
from tvm import tirx

from torch_hybrid_backend.core.size import Dim, Size, below, product, typical
from torch_hybrid_backend.engines.tvm.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.tvm.math import is_nan
from torch_hybrid_backend.engines.tvm.printer import Printer
from torch_hybrid_backend.engines.tvm.schedules.axes import (
    Chunk,
    Env,
    Flat,
    chunks,
    depends,
    fastest,
    flatten,
    is_large,
    offsets_of,
    step,
    vectors,
)
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Buffer, Expr
from torch_hybrid_backend.loops.kernels import RowKernel, Stage

# Independent accumulators of a row: latency of an addition (4) on current x86 cores.
_WAYS = 4
# Windows of at most this many elements are unrolled.
_UNROLLED = 16
_ARG = ("argmax", "argmin")


def emit(kernel: RowKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The loops of a row kernel."""
    return _Rows(kernel, builder, printer, target).emit()


class _Rows:
    """One row kernel being emitted."""

    def __init__(self, kernel: RowKernel, builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.b, self.p, self.target = kernel, builder, printer, target
        self.reduced = [kernel.domain[d] for d in kernel.axes]
        self.kept = [v for d, v in enumerate(kernel.domain) if d not in kernel.axes]
        self.exprs = [stage.value for stage in kernel.stages]
        self.offsets = offsets_of(printer, self.exprs)
        self.written = [printer.offset(s.store.buffer, s.store.index, {}) for s in kernel.stages if s.store]
        self.offsets += self.written
        self.kind = "parallel" if is_large(kernel, self.exprs) else "serial"

    def emit(self) -> Stmt:
        inner = fastest(self.offsets, self.kernel.domain)
        if inner is None:
            inner = max(self.kernel.domain, key=lambda v: typical(v.extent), default=None)
        if inner in self.reduced and below(inner.extent, self.target.lanes):
            # A window is too short for a vector: run along what is written instead.
            inner = fastest(self.written, self.kept) or inner
        if inner is None or inner in self.reduced:
            return self._along_rows(inner)
        return self._across_rows(inner)

    # The vector axis is reduced.

    def _along_rows(self, inner: LoopVar | None) -> Stmt:
        rest = [v for v in self.reduced if v is not inner and v.extent != 1]
        rest.sort(key=lambda v: -max((step(o, v) for o in self.offsets), default=0))
        flat = Flat(())
        if inner is not None:
            flat = flatten(inner, rest, [o for o in self.offsets if depends(o, inner)], self.exprs)
            rest = [v for v in rest if v not in flat.variables]
        kept = [v for v in self.kept if v.extent != 1]

        def row(place: tuple[Index, ...]) -> Stmt:
            return _Row(self, dict(zip(kept, place, strict=True)), rest, flat).emit()

        return self.b.fused([v.extent for v in kept], row, self.kind)

    # The vector axis is kept.

    def _across_rows(self, inner: LoopVar) -> Stmt:
        others = [v for v in self.kept if v.extent != 1 and v is not inner]
        # A blocked dimension's lanes must not straddle blocks; vectors of that many lanes from 0 on do not.
        lanes = self.target.lanes
        extents = [v.extent for v in others]
        whole = inner.extent // lanes

        def at(place: tuple[Index, ...], base: Index, width: int) -> Stmt:
            return _Vector(self, dict(zip(others, place, strict=True)), inner, base, width).emit()

        parts: list[Stmt] = []
        if whole != 0:
            parts.append(self.b.fused([*extents, whole], lambda p: at(p[:-1], p[-1] * lanes, lanes), self.kind))
        for chunk in chunks(self.b, inner.extent - whole * lanes, lanes if isinstance(whole, int) else lanes // 2):
            tail = partial(at, base=chunk.start + whole * lanes, width=chunk.width)
            parts.append(chunk.around(self.b, self.b.fused(extents, tail, self.kind if extents else "serial")))
        return self.b.seq(*parts)


class _Row:
    """The stages of one row, along it."""

    def __init__(self, rows: _Rows, env: Env, rest: Sequence[LoopVar], flat: Flat) -> None:
        self.rows, self.b, self.p = rows, rows.b, rows.p
        self.env, self.rest, self.flat = env, list(rest), flat
        self.allocated: list[TirBuffer] = []

    def emit(self) -> Stmt:
        stages = [self._stage(stage) for stage in self.rows.kernel.stages]
        return self.b.seq(*(self.b.alloc(buffer) for buffer in self.allocated), *stages)

    def _local(self, size: Dim, dtype: str, name: str) -> TirBuffer:
        buffer = self.b.local(size, _held(dtype), name)
        self.allocated.append(buffer)
        return buffer

    def _stage(self, stage: Stage) -> Stmt:
        match stage.kind:
            case "reduce":
                return self._reduce(stage)
            case "scalar":
                assert stage.local is not None
                local = self._scalar(stage.local)
                return _computed(
                    self.p, stage.value, self.env, stage.local.dtype, lambda value: self.b.store(local, 0, value)
                )
            case "store_scalar":
                assert stage.store is not None
                return self.p.stores([stage.store], self.env)
            case "map":
                return self._map(stage)
            case "store":
                store = stage.store
                assert store is not None
                return self._each(lambda env: self.p.stores([store], env))
        raise ValueError(f"a row kernel has no stages of kind {stage.kind!r}")

    def _scalar(self, local: Buffer) -> TirBuffer:
        buffer = self._local(1, local.dtype, "scalar")
        self.p.locals[id(local)] = lambda _: _held_value(self.b.load(buffer, 0), local.dtype)
        return buffer

    def _each(self, body: Callable[[Env], Stmt]) -> Stmt:
        """`body` at every element of the row, in vectors along the flat axis."""

        def inside(place: tuple[Index, ...]) -> Stmt:
            env = {**self.env, **dict(zip(self.rest, place, strict=True))}
            if not self.flat.variables:
                return body(env)
            return vectors(
                self.b,
                self.p,
                self.flat.extent,
                self.rows.target.lanes,
                lambda base, lane, width: body({**env, **self.flat.env(base + lane)}),
            )

        return self.b.nest([v.extent for v in self.rest], inside)

    def _map(self, stage: Stage) -> Stmt:
        local = stage.local
        assert local is not None
        order = [*self.rest, *self.flat.variables]
        buffer = self._local(product(v.extent for v in order), local.dtype, "row")
        positions = {v: d for d, v in enumerate(self.rows.kernel.domain)}

        def offset(index: tuple[Index, ...]) -> Index:
            total = as_index(0)
            for variable in order:
                total = total * variable.extent + index[positions[variable]]
            return total

        self.p.locals[id(local)] = lambda index: _held_value(self.b.load(buffer, offset(index)), local.dtype)

        def body(env: Env) -> Stmt:
            at = tuple(env.get(v, as_index(0)) for v in self.rows.kernel.domain)
            return _computed(
                self.p, stage.value, env, local.dtype, lambda value: self.b.store(buffer, offset(at), value)
            )

        return self._each(body)

    def _reduce(self, stage: Stage) -> Stmt:
        local = stage.local
        assert local is not None
        if stage.combiner in _ARG:
            return self._arg(stage)
        result = self._scalar(local)
        combine = _Combiner(stage.combiner, local.dtype, self.p)
        lanes, extent = self.rows.target.lanes, self.flat.extent if self.flat.variables else 1
        if isinstance(extent, int) and extent < 2:
            # One element at a time: short rows, and values that cannot be computed in vectors.
            serial = self.b.store(result, 0, combine.identity)
            order = [*self.rest, *self.flat.variables]

            def element(place: tuple[Index, ...]) -> Stmt:
                env = {**self.env, **dict(zip(order, place, strict=True))}
                return _computed(
                    self.p,
                    stage.value,
                    env,
                    local.dtype,
                    lambda value: self.b.store(result, 0, combine(self.b.load(result, 0), value)),
                )

            return self.b.seq(serial, self.b.nest([v.extent for v in order], element))
        width = 1 << (extent.bit_length() - 1) if isinstance(extent, int) and extent < lanes else lanes
        ways = _WAYS if typical(extent) >= _WAYS * width else 1
        accumulators = self._local(ways * width, local.dtype, "acc")

        def clear(lane: Index) -> Stmt:
            return self.b.seq(*(self.b.store(accumulators, lane + w * width, combine.identity) for w in range(ways)))

        def step_at(env: Env, base: Index | int, lane: Index, way: int) -> Stmt:
            place = lane + way * width
            return _computed(
                self.p,
                stage.value,
                {**env, **self.flat.env(lane + base)},
                local.dtype,
                lambda value: self.b.store(accumulators, place, combine(self.b.load(accumulators, place), value)),
            )

        def along(place: tuple[Index, ...]) -> Stmt:
            env = {**self.env, **dict(zip(self.rest, place, strict=True))}
            whole = extent // (ways * width)

            def one_way(base: Index, way: int, lane: Index) -> Stmt:
                return step_at(env, base + way * width, lane, way)

            parts = [
                self.b.loop(
                    whole,
                    lambda v: self.b.seq(
                        *(self.p.vector_loop(width, partial(one_way, v * (ways * width), w)) for w in range(ways))
                    ),
                )
            ]
            done = whole * ways * width
            # Less than `ways` vectors are left; of a row whose length only the running kernel knows, `ways` is a power of two too.
            for chunk in chunks(self.b, extent - done, width if isinstance(extent, int) else ways * width // 2):

                def narrow(chunk: Chunk = chunk) -> Stmt:
                    return self.b.seq(
                        *(
                            self.p.vector_loop(
                                min(chunk.width, width),
                                lambda lane, f=first: step_at(env, chunk.start + (done + f), lane, 0),  # type: ignore[misc]
                            )
                            for first in range(0, chunk.width, width)
                        )
                    )

                parts.append(chunk.around(self.b, narrow()))
            return self.b.seq(*parts)

        folds = []
        size = ways * width
        while size > 1:
            size //= 2
            folds.append(
                self.p.vector_loop(
                    size,
                    lambda lane, s=size: self.b.store(  # type: ignore[misc]
                        accumulators,
                        lane,
                        combine(self.b.load(accumulators, lane), self.b.load(accumulators, lane + s)),
                    ),
                )
            )
        return self.b.seq(
            self.p.vector_loop(width, clear),
            self.b.nest([v.extent for v in self.rest], along),
            *folds,
            self.b.store(result, 0, self.b.load(accumulators, 0)),
        )

    def _arg(self, stage: Stage) -> Stmt:
        """The position of the largest or smallest element: the first of equals, a NaN before everything."""
        local = stage.local
        assert local is not None
        position = self._scalar(local)
        dtype = stage.value.dtype
        best, current = self._local(1, dtype, "best"), self._local(1, dtype, "x")
        reduced = [v for v in self.rows.reduced if v.extent != 1]

        def element(place: tuple[Index, ...]) -> Stmt:
            env = {**self.env, **dict(zip(reduced, place, strict=True))}
            linear = as_index(0)
            for variable, index in zip(reduced, place, strict=True):
                linear = linear * variable.extent + index
            value, old = self.b.load(current, 0), self.b.load(best, 0)
            wins = _beats(stage.combiner, value, old, dtype)
            is_first = tirx.EQ(self.b.index(linear), 0)
            update = self.b.seq(
                self.b.store(best, 0, value),
                self.b.store(position, 0, tirx.Cast("int64", self.b.index(linear))),
            )
            return self.b.seq(
                _computed(self.p, stage.value, env, dtype, lambda x: self.b.store(current, 0, x)),
                self.b.when(tirx.Or(is_first, wins), update),
            )

        start = self.b.seq(
            self.b.store(best, 0, tvm.tirx.const(0, _held(dtype))), self.b.store(position, 0, tirx.IntImm("int64", 0))
        )
        return self.b.seq(start, self.b.nest([v.extent for v in reduced], element))


class _Vector:
    """The stages of `width` neighbouring rows, a lane each."""

    def __init__(self, rows: _Rows, env: Env, inner: LoopVar, base: Index, width: int) -> None:
        self.rows, self.b, self.p = rows, rows.b, rows.p
        self.env, self.inner, self.base, self.width = env, inner, base, width
        self.reduced = [v for v in rows.reduced if v.extent != 1]
        self.allocated: list[TirBuffer] = []

    def emit(self) -> Stmt:
        stages = [self._stage(stage) for stage in self.rows.kernel.stages]
        return self.b.seq(*(self.b.alloc(buffer) for buffer in self.allocated), *stages)

    def _stage(self, stage: Stage) -> Stmt:
        match stage.kind:
            case "reduce":
                return self._reduce(stage)
            case "scalar":
                local = stage.local
                assert local is not None
                buffer = self._lanes_of(local)
                return self._vector(
                    lambda lane, env: _computed(
                        self.p, stage.value, env, local.dtype, lambda value: self.b.store(buffer, lane, value)
                    )
                )
            case "store_scalar":
                once = stage.store
                assert once is not None
                return self._vector(lambda lane, env: self.p.stores([once], env))
            case "map":
                return self._map(stage)
            case "store":
                store = stage.store
                assert store is not None
                return self._each(lambda lane, env: self.p.stores([store], env))
        raise ValueError(f"a row kernel has no stages of kind {stage.kind!r}")

    def _vector(self, body: Callable[[Index, Env], Stmt], env: Env | None = None) -> Stmt:
        env = self.env if env is None else env
        return self.p.vector_loop(self.width, lambda lane: body(lane, {**env, self.inner: self.base + lane}))

    def _each(self, body: Callable[[Index, Env], Stmt]) -> Stmt:
        return self._window(lambda env: self._vector(body, env))

    def _window(self, body: Callable[[Env], Stmt]) -> Stmt:
        """`body` at every point of the reduced axes; a small window is unrolled."""
        extents = [v.extent for v in self.reduced]
        total = product(extents)
        if isinstance(total, Size) or total > _UNROLLED:
            return self.b.nest(extents, lambda place: body({**self.env, **dict(zip(self.reduced, place, strict=True))}))
        points: list[Env] = [{}]
        for variable in self.reduced:
            points = [{**p, variable: as_index(i)} for p in points for i in range(int(variable.extent))]
        return self.b.seq(*(body({**self.env, **p}) for p in points))

    def _lanes_of(self, local: Buffer) -> TirBuffer:
        buffer = self.b.local(self.width, _held(local.dtype), "lanes")
        self.allocated.append(buffer)
        self.p.locals[id(local)] = lambda index: _held_value(self.b.load(buffer, self._lane(index, local)), local.dtype)
        return buffer

    def _lane(self, index: tuple[Index, ...], local: Buffer) -> Index:
        """The lane a kept index stands for."""
        position = self.rows.kept.index(self.inner)
        return index[position] - self.base

    def _map(self, stage: Stage) -> Stmt:
        local = stage.local
        assert local is not None
        size = product(v.extent for v in self.reduced)
        buffer = self.b.local(size * self.width, _held(local.dtype), "row")
        self.allocated.append(buffer)
        positions = {v: d for d, v in enumerate(self.rows.kernel.domain)}

        def offset(index: tuple[Index, ...]) -> Index:
            total = as_index(0)
            for variable in self.reduced:
                total = total * variable.extent + index[positions[variable]]
            return total * self.width + index[positions[self.inner]] - self.base

        self.p.locals[id(local)] = lambda index: _held_value(self.b.load(buffer, offset(index)), local.dtype)

        def body(lane: Index, env: Env) -> Stmt:
            at = tuple(env.get(v, as_index(0)) for v in self.rows.kernel.domain)
            return _computed(
                self.p, stage.value, env, local.dtype, lambda value: self.b.store(buffer, offset(at), value)
            )

        return self._each(body)

    def _reduce(self, stage: Stage) -> Stmt:
        local = stage.local
        assert local is not None
        if stage.combiner in _ARG:
            return self._arg(stage)
        buffer = self._lanes_of(local)
        combine = _Combiner(stage.combiner, local.dtype, self.p)

        def add(env: Env) -> Stmt:
            return self._vector(
                lambda lane, inside: _computed(
                    self.p,
                    stage.value,
                    inside,
                    local.dtype,
                    lambda x: self.b.store(buffer, lane, combine(self.b.load(buffer, lane), x)),
                ),
                env,
            )

        clear = self._vector(lambda lane, _: self.b.store(buffer, lane, combine.identity))
        return self.b.seq(clear, self._window(add))

    def _arg(self, stage: Stage) -> Stmt:
        """The position of each row's largest or smallest element, as `_Row._arg` has it."""
        local = stage.local
        assert local is not None
        dtype = stage.value.dtype
        best, positions = self.b.local(self.width, _held(dtype), "best"), self._lanes_of(local)
        self.allocated.append(best)
        first = {v: as_index(0) for v in self.reduced}

        def start(lane: Index, env: Env) -> Stmt:
            return _computed(self.p, stage.value, env, dtype, lambda value: self.b.store(best, lane, value))

        def element(env: Env) -> Stmt:
            linear = as_index(0)
            for variable in self.reduced:
                linear = linear * variable.extent + env[variable]
            position = tirx.Cast("int64", self.b.index(linear))

            def update(lane: Index, value: TirExpr) -> Stmt:
                old, at = self.b.load(best, lane), self.b.load(positions, lane)
                wins = _beats(stage.combiner, value, old, dtype)
                return self.b.seq(
                    self.b.store(positions, lane, tirx.Select(wins, position, at)),
                    self.b.store(best, lane, tirx.Select(wins, value, old)),
                )

            return self._vector(
                lambda lane, inside: _computed(self.p, stage.value, inside, dtype, lambda value: update(lane, value)),
                env,
            )

        zero = self._vector(lambda lane, _: self.b.store(positions, lane, tirx.IntImm("int64", 0)))
        return self.b.seq(zero, self._vector(start, {**self.env, **first}), self._window(element))


def _computed(printer: Printer, expr: Expr, env: Env, dtype: str, use: Callable[[TirExpr], Stmt]) -> Stmt:
    """`use` of a value as locals hold it; guards that no lane decides become branches."""
    return printer.cases(
        [expr], env, lambda exprs: printer.evaluate(exprs, env, lambda values: use(_hold(values[0], dtype)))
    )


def _beats(combiner: str, value: TirExpr, old: TirExpr, dtype: str) -> TirExpr:
    """Whether a later element replaces the best so far: a NaN does, unless that is one."""
    wins = tirx.GT(value, old) if combiner == "argmax" else tirx.LT(value, old)
    if dtype not in ("float32", "float64"):
        return wins
    return tirx.Or(wins, tirx.And(is_nan(value, dtype), tirx.Not(is_nan(old, dtype))))


class _Combiner:
    """How two partial results of a reduction become one; on values as locals hold them (bool as uint8)."""

    def __init__(self, name: str, dtype: str, printer: Printer) -> None:
        self.name, self.dtype, self.printer = name, dtype, printer

    @property
    def identity(self) -> TirExpr:
        return tvm.tirx.const(self._identity(), _held(self.dtype))

    def _identity(self) -> float | int:
        if self.name in ("sum", "any"):
            return 0
        if self.name in ("prod", "all"):
            return 1
        lowest = self.name == "max"
        if self.dtype in ("float32", "float64"):
            return -math.inf if lowest else math.inf
        if self.dtype == "bool":
            return 0 if lowest else 1
        bits = int(tvm.DataType(self.dtype).bits)
        if str(self.dtype).startswith("u"):
            return 0 if lowest else int(2**bits - 1)
        return -int(2 ** (bits - 1)) if lowest else int(2 ** (bits - 1) - 1)

    def __call__(self, a: TirExpr, b: TirExpr) -> TirExpr:
        match self.name:
            case "sum":
                return a + b
            case "prod":
                return a * b
            case "any":
                return tirx.Max(a, b)
            case "all":
                return tirx.Min(a, b)
        if self.dtype not in ("float32", "float64"):
            return tirx.Max(a, b) if self.name == "max" else tirx.Min(a, b)
        # NaN wins: a comparison with NaN is false, so `a` must be kept only where it beats b or is NaN itself.
        beats = tirx.GT(a, b) if self.name == "max" else tirx.LT(a, b)
        return tirx.Select(tirx.Or(beats, is_nan(a, self.dtype)), a, b)


def _held(dtype: str) -> str:
    """The dtype a local holds values of `dtype` in."""
    return "uint8" if dtype == "bool" else dtype


def _hold(value: TirExpr, dtype: str) -> TirExpr:
    if dtype == "bool":
        return tirx.Select(value, tirx.IntImm("uint8", 1), tirx.IntImm("uint8", 0))
    return value


def _held_value(value: TirExpr, dtype: str) -> TirExpr:
    return tirx.NE(value, tirx.IntImm("uint8", 0)) if dtype == "bool" else value
