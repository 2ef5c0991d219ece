"""Row kernels whose vector axis is reduced: one task runs along a row, or all threads share a long one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch_hybrid_backend.engines.cpu.schedules.axes import Env, Flat, chunks, vectors
from torch_hybrid_backend.engines.cpu.schedules.reduction.parts import (
    WAYS,
    Combiner,
    computed,
    element_of,
)
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.storage import storage_dtype
from torch_hybrid_backend.loops.index import Index, LoopVar
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Stage
from torch_hybrid_backend.sizes.size import Dim, Size, product, size_hint

if TYPE_CHECKING:
    from torch_hybrid_backend.engines.cpu.schedules.reduction.rows import Rows

# Elements that are worth a thread of their own: waking it costs some microseconds, in which one core adds up this many.
PIECE = 16_384


class Row:
    """The stages of one row, along it."""

    def __init__(self, rows: Rows, env: Env, rest: Sequence[LoopVar], flat: Flat) -> None:
        self.rows, self.b, self.p = rows, rows.b, rows.p
        self.env, self.rest, self.flat = env, list(rest), flat
        self.allocated: list[TirBuffer] = []

    def emit(self) -> Stmt:
        stages = [self._stage(stage) for stage in self.rows.kernel.stages]
        return self.b.seq(*(self.b.alloc(buffer) for buffer in self.allocated), *stages)

    def _local(self, size: Dim, dtype: str, name: str) -> TirBuffer:
        buffer = self.b.local(size, storage_dtype(dtype), name)
        self.allocated.append(buffer)
        return buffer

    def _stage(self, stage: Stage) -> Stmt:
        match stage.kind:
            case "reduce":
                return self._reduce(stage)
            case "scalar":
                assert stage.local is not None
                local = self._scalar(stage.local)
                return computed(
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
        self.p.locals[local] = lambda _: self.p.widen(self.b.load(buffer, 0), local.dtype)
        return buffer

    def _each(self, body: Callable[[Env], Stmt]) -> Stmt:
        """`body` at every element of the row, in vectors along the flat axis."""

        def inside(place: tuple[Index, ...]) -> Stmt:
            env = {**self.env, **dict(zip(self.rest, place, strict=True))}
            if not self.flat.variables:
                return body(env)
            return self._vectors(env, 0, self.flat.extent, body)

        return self.b.nest([v.extent for v in self.rest], inside)

    def _vectors(self, env: Env, start: Index | int, extent: Dim, body: Callable[[Env], Stmt]) -> Stmt:
        """`body` at positions start .. start + extent - 1 of the vector axis."""
        return vectors(
            self.b,
            self.p,
            extent,
            self.rows.target.lanes,
            lambda base, lane, width: body({**env, **self.flat.env(base + lane + start)}),
        )

    def _map(self, stage: Stage) -> Stmt:
        local = stage.local
        assert local is not None
        order = [*self.rest, *self.flat.variables]
        buffer = self._local(product(v.extent for v in order), local.dtype, "row")
        return self._each(element_of(self.p, self.b, self.rows.kernel.domain, stage, buffer, order))

    def _reduce(self, stage: Stage) -> Stmt:
        local = stage.local
        assert local is not None
        result = self._scalar(local)
        combine = Combiner(stage.combiner, local.dtype, self.p)
        if isinstance(self.extent, int) and self.extent < 2:
            return self._one_by_one(stage, result, combine)
        return self._partial(stage, combine, 0, self.extent, lambda value: self.b.store(result, 0, value))

    @property
    def extent(self) -> Dim:
        """Elements of the vector axis."""
        return self.flat.extent if self.flat.variables else 1

    def _one_by_one(self, stage: Stage, result: TirBuffer, combine: Combiner) -> Stmt:
        """Compute one element at a time: short rows, and values that cannot be computed in vectors."""
        order = [*self.rest, *self.flat.variables]

        def element(place: tuple[Index, ...]) -> Stmt:
            env = {**self.env, **dict(zip(order, place, strict=True))}
            return computed(
                self.p,
                stage.value,
                env,
                combine.dtype,
                lambda value: self.b.store(result, 0, combine(self.b.load(result, 0), value)),
            )

        return self.b.seq(self.b.store(result, 0, combine.identity), self.b.nest([v.extent for v in order], element))

    def _partial(
        self, stage: Stage, combine: Combiner, start: Index | int, extent: Dim, use: Callable[[TirExpr], Stmt]
    ) -> Stmt:
        """`use` of what positions start .. start + extent - 1 of the vector axis, at every point of `rest`, combine to."""
        lanes = self.rows.target.lanes
        width = 1 << (extent.bit_length() - 1) if isinstance(extent, int) and extent < lanes else lanes
        ways = WAYS if size_hint(extent) >= WAYS * width else 1
        accumulators = self.b.local(ways * width, storage_dtype(combine.dtype), "acc")

        def clear(lane: Index) -> Stmt:
            return self.b.seq(*(self.b.store(accumulators, lane + w * width, combine.identity) for w in range(ways)))

        def step_at(env: Env, base: Index | int, lane: Index, way: int) -> Stmt:
            place = lane + way * width
            return computed(
                self.p,
                stage.value,
                {**env, **self.flat.env(lane + base + start)},
                combine.dtype,
                lambda value: self.b.store(accumulators, place, combine(self.b.load(accumulators, place), value)),
            )

        def along(place: tuple[Index, ...]) -> Stmt:
            env = {**self.env, **dict(zip(self.rest, place, strict=True))}
            whole = extent // (ways * width)

            def vector(base: Index, way: int, most: int = width) -> Stmt:
                return self.p.vector_loop(min(most, width), lambda lane: step_at(env, base, lane, way))

            parts = [
                self.b.loop(
                    whole, lambda v: self.b.seq(*(vector(v * (ways * width) + w * width, w) for w in range(ways)))
                )
            ]
            done = whole * ways * width
            # Less than `ways` vectors are left; of a row whose length only the running kernel knows, `ways` is a power of two too.
            for chunk in chunks(self.b, extent - done, width if isinstance(extent, int) else ways * width // 2):
                left = (vector(chunk.start + (done + first), 0, chunk.width) for first in range(0, chunk.width, width))
                parts.append(chunk.around(self.b, self.b.seq(*left)))
            return self.b.seq(*parts)

        return self.b.seq(
            self.b.alloc(accumulators),
            self.p.vector_loop(width, clear),
            self.b.nest([v.extent for v in self.rest], along),
            self._fold(accumulators, combine, ways * width),
            use(self.b.load(accumulators, 0)),
        )

    def _fold(self, accumulators: TirBuffer, combine: Combiner, size: int) -> Stmt:
        """Combines the accumulators, a power of two of them, into the first: half of them with the other half, and so on."""

        def onto_first(half: int, lane: Index) -> Stmt:
            both = self.b.load(accumulators, lane), self.b.load(accumulators, lane + half)
            return self.b.store(accumulators, lane, combine(*both))

        halves = []
        while size > 1:
            size //= 2
            halves.append(self.p.vector_loop(size, partial(onto_first, size)))
        return self.b.seq(*halves)


class SplitRow(Row):
    """The stages of one row that is so long that all threads share it, stage by stage.

    Every thread reduces a piece of whole vectors; what the pieces gave, and what is left of the row, is combined one after the other.
    """

    @staticmethod
    def pieces(rows: Rows, rest: Sequence[LoopVar], flat: Flat) -> int:
        """The number of pieces that the rows are cut into, at most one a core; 1 where pieces do not pay."""
        cores, kept = rows.target.cores, product(v.extent for v in rows.kept)
        if rest or not flat.variables or isinstance(flat.extent, Size) or isinstance(kept, Size) or kept >= cores:
            return 1
        return max(1, min(cores, flat.extent // max(PIECE, 2 * WAYS * rows.target.lanes)))

    def __init__(self, rows: Rows, env: Env, flat: Flat, count: int) -> None:
        super().__init__(rows, env, (), flat)
        unit = WAYS * rows.target.lanes
        self.count, self.piece = count, int(flat.extent) // count // unit * unit

    def _each(self, body: Callable[[Env], Stmt]) -> Stmt:
        done = self.count * self.piece
        whole = self.b.loop(
            self.count, lambda part: self._vectors(self.env, part * self.piece, self.piece, body), "parallel"
        )
        left = int(self.flat.extent) - done
        return self.b.seq(whole, self._vectors(self.env, done, left, body) if left else None)

    def _reduce(self, stage: Stage) -> Stmt:
        local = stage.local
        assert local is not None
        result = self._scalar(local)
        combine = Combiner(stage.combiner, local.dtype, self.p)
        partial = self._local(self.count, local.dtype, "partial")

        def piece(part: Index) -> Stmt:
            return self._partial(
                stage, combine, part * self.piece, self.piece, lambda value: self.b.store(partial, part, value)
            )

        def fold(value: TirExpr) -> Stmt:
            return self.b.store(result, 0, combine(self.b.load(result, 0), value))

        done = self.count * self.piece
        left = int(self.flat.extent) - done
        return self.b.seq(
            self.b.loop(self.count, piece, "parallel"),
            self.b.store(result, 0, combine.identity),
            self.b.loop(self.count, lambda part: fold(self.b.load(partial, part))),
            self._partial(stage, combine, done, left, fold) if left else None,
        )
