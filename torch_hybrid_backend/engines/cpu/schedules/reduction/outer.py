"""Row kernels whose vector axis is kept: one task handles a vector of neighbouring rows, a lane each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_hybrid_backend.engines.cpu.schedules.axes import Env, Flat, depends, flatten, offsets_of, step
from torch_hybrid_backend.engines.cpu.schedules.reduction.parts import (
    EXTREMES,
    WAYS,
    Combiner,
    beats,
    computed,
    element_of,
)
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.storage import storage_dtype
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Stage
from torch_hybrid_backend.sizes.size import Size, product, size_hint

if TYPE_CHECKING:
    from torch_hybrid_backend.engines.cpu.schedules.reduction.rows import Rows

# Windows of at most this many elements are unrolled.
UNROLLED = 16


class VectorOfRows:
    """The stages of `width` neighbouring rows, a lane each."""

    def __init__(self, rows: Rows, env: Env, inner: LoopVar, base: Index, width: int) -> None:
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
                    lambda lane, env: computed(
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
        if self._is_long:
            return self.b.nest(extents, lambda place: body({**self.env, **dict(zip(self.reduced, place, strict=True))}))
        points: list[Env] = [{}]
        for variable in self.reduced:
            points = [{**p, variable: as_index(i)} for p in points for i in range(int(variable.extent))]
        return self.b.seq(*(body({**self.env, **p}) for p in points))

    def _lanes_of(self, local: Buffer) -> TirBuffer:
        buffer = self.b.local(self.width, storage_dtype(local.dtype), "lanes")
        self.allocated.append(buffer)
        self.p.locals[local] = lambda index: self.p.widen(self.b.load(buffer, self._lane(index, local)), local.dtype)
        return buffer

    def _lane(self, index: tuple[Index, ...], local: Buffer) -> Index:
        """The lane a kept index stands for."""
        position = self.rows.kept.index(self.inner)
        return index[position] - self.base

    def _map(self, stage: Stage) -> Stmt:
        local = stage.local
        assert local is not None
        size = product(v.extent for v in self.reduced)
        buffer = self.b.local(size * self.width, storage_dtype(local.dtype), "row")
        self.allocated.append(buffer)
        lane = self.rows.kernel.domain.index(self.inner)

        def place(row: Index, index: tuple[Index, ...]) -> Index:
            return row * self.width + index[lane] - self.base

        element = element_of(self.p, self.b, self.rows.kernel.domain, stage, buffer, self.reduced, place)
        return self._each(lambda _, env: element(env))

    def _reduce(self, stage: Stage) -> Stmt:
        local = stage.local
        assert local is not None
        if stage.combiner in EXTREMES:
            return self._arg(stage)
        buffer = self._lanes_of(local)
        combine = Combiner(stage.combiner, local.dtype, self.p)
        flat, rest = self._flat_window(stage)
        ways = WAYS if size_hint(flat.extent) >= WAYS and self._is_long else 1
        accumulators = buffer
        if ways > 1:
            accumulators = self.b.local(ways * self.width, storage_dtype(local.dtype), "acc")
            self.allocated.append(accumulators)

        def add(env: Env, way: int = 0) -> Stmt:
            def combined(lane: Index, inside: Env) -> Stmt:
                place = lane + way * self.width

                def put(x: TirExpr) -> Stmt:
                    return self.b.store(accumulators, place, combine(self.b.load(accumulators, place), x))

                return computed(self.p, stage.value, inside, local.dtype, put)

            return self._vector(combined, env)

        def clear(way: int) -> Stmt:
            return self._vector(lambda lane, _: self.b.store(accumulators, lane + way * self.width, combine.identity))

        clears = [clear(way) for way in range(ways)]
        if ways == 1:
            return self.b.seq(*clears, self._window(add))

        def along(place: tuple[Index, ...]) -> Stmt:
            env = {**self.env, **dict(zip(rest, place, strict=True))}
            whole = flat.extent // ways

            def several(v: Index) -> Stmt:
                return self.b.seq(*(add({**env, **flat.env(v * ways + way)}, way) for way in range(ways)))

            left = flat.extent - whole * ways
            return self.b.seq(
                self.b.loop(whole, several),
                self.b.loop(left, lambda i: add({**env, **flat.env(i + whole * ways)})) if left != 0 else None,
            )

        def folded(lane: Index, _: Env) -> Stmt:
            parts = [self.b.load(accumulators, lane + way * self.width) for way in range(ways)]
            while len(parts) > 1:
                parts = [combine(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
            return self.b.store(buffer, lane, parts[0])

        return self.b.seq(*clears, self.b.nest([v.extent for v in rest], along), self._vector(folded))

    @property
    def _is_long(self) -> bool:
        """True if a window is more than is unrolled."""
        total = product(v.extent for v in self.reduced)
        return isinstance(total, Size) or total > UNROLLED

    def _flat_window(self, stage: Stage) -> tuple[Flat, list[LoopVar]]:
        """The reduced dimensions that are walked as one, innermost, and the others; as the values lie in memory."""
        offsets = offsets_of(self.p, [stage.value])
        order = sorted(self.reduced, key=lambda v: -max((step(o, v) for o in offsets), default=0))
        if not order:
            return Flat(()), []
        flat = flatten(order[-1], order[:-1], [o for o in offsets if depends(o, order[-1])], [stage.value])
        return flat, [v for v in order if v not in flat.variables]

    def _arg(self, stage: Stage) -> Stmt:
        """The position of each row's largest or smallest element: the first of equals, a NaN before everything."""
        local = stage.local
        assert local is not None
        dtype = stage.value.dtype
        best, positions = self.b.local(self.width, storage_dtype(dtype), "best"), self._lanes_of(local)
        self.allocated.append(best)
        first = {v: as_index(0) for v in self.reduced}

        def start(lane: Index, env: Env) -> Stmt:
            return computed(self.p, stage.value, env, dtype, lambda value: self.b.store(best, lane, value))

        def element(env: Env) -> Stmt:
            linear = as_index(0)
            for variable in self.reduced:
                linear = linear * variable.extent + env[variable]
            position = tir.cast(self.b.index(linear), "int64")

            def update(lane: Index, value: TirExpr) -> Stmt:
                old, at = self.b.load(best, lane), self.b.load(positions, lane)
                wins = beats(stage.combiner, value, old, dtype)
                return self.b.seq(
                    self.b.store(positions, lane, tir.select(wins, position, at)),
                    self.b.store(best, lane, tir.select(wins, value, old)),
                )

            return self._vector(
                lambda lane, inside: computed(self.p, stage.value, inside, dtype, lambda value: update(lane, value)),
                env,
            )

        zero = self._vector(lambda lane, _: self.b.store(positions, lane, tir.const(0, "int64")))
        return self.b.seq(zero, self._vector(start, {**self.env, **first}), self._window(element))
