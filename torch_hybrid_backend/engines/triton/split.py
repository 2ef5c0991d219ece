"""Split reductions: a row kernel with fewer rows than there are multiprocessors as several kernels, in which parts of a row run at once.

    parts      a program for each part of a row: what its elements are reduced to (`PartKernel`)
    combined   a program for each row: the parts' results as one, and what is computed once per row
    ...        parts and combined once more for each further pass over the rows
    map        what is computed of every element and of its row's results

A running sum is a part's totals, their running totals, and each part scanned from there.

Each result is combined in one order, without atomics: equal inputs give equal bits. Memory is read as often as by the looped kernel
(`schedules/reduction.py`), but by all multiprocessors: a sum of n elements reads n and a few thousand partial results. One program reads
some 10 to 50 GB/s, whatever the GPU's memory does (chunks of 8 KiB, a latency of some 600 ns): a sum of 2^20 float32 is 80 us or more
of it, against the 1 to 2 us that its bytes take at 2 to 4 TB/s and a second launch. None of this has been measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid_backend.codegen.anchors import arguments
from torch_hybrid_backend.engines.triton.schedules.one_pass import Passes, passes_of
from torch_hybrid_backend.engines.triton.schedules.reduction import PartKernel, looped_tile
from torch_hybrid_backend.engines.triton.schedules.tiles import blocks
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.fusion import replace_loads
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, buffers_of_expr, scalar_index
from torch_hybrid_backend.loops.kernels import Argument, Kernel, MapKernel, RowKernel, Stage, Store
from torch_hybrid_backend.loops.layout import Layout, contiguous
from torch_hybrid_backend.loops.ops import add, call, const, div, from_index, guard, mul, sub, where
from torch_hybrid_backend.sizes.size import Dim, product, size_hint

_WORTH = 1 << 15  # elements that one program would reduce: about 10 us, against a second launch
_LEAST = 1 << 13  # of a part
_PROGRAMS = 4  # for each multiprocessor: what they read at once hides the latency of memory


def split(kernel: Kernel, target: Target) -> Sequence[Kernel]:
    """The kernels that compute what `kernel` does, one after the other; itself where it has rows, or elements, enough or few. With sizes known
    only at run time their typical values decide, and it is right for all."""
    if not isinstance(kernel, RowKernel) or isinstance(kernel, PartKernel) or target.has_large_tiles:
        return (kernel,)
    rows = product([v.extent for d, v in enumerate(kernel.domain) if d not in kernel.axes])
    elements = product([kernel.domain[d].extent for d in kernel.axes])
    height, chunk = looped_tile(kernel, target)
    programs = size_hint(blocks(rows, height))
    work = size_hint(elements) * height
    parts = min(-(-_PROGRAMS * target.multiprocessors // max(programs, 1)), work // _LEAST)
    if 2 * programs > target.multiprocessors or work < _WORTH or parts < 2:
        return (kernel,)
    length = blocks(blocks(elements, parts), chunk) * chunk
    if isinstance(elements, int) and isinstance(length, int):
        parts = -(-elements // length)
    if parts < 2:
        return (kernel,)
    made = _Split(kernel, LoopVar("part", parts), length, elements)
    if not any(stage.kind == "scan" for stage in kernel.stages):
        return made.kernels()
    return made.scans() or (kernel,)


# How the results of two parts of a scan make one.
_PAIRWISE = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}


class _Split:
    """Makes the kernels of one. Owns the buffers between them."""

    def __init__(self, kernel: RowKernel, part: LoopVar, length: Dim, elements: Dim) -> None:
        self._kernel = kernel
        self._part = part
        self._length = length
        self._elements = elements
        self._passes: Passes = passes_of(kernel)
        self._layouts: dict[Buffer, Layout] = {a.buffer: a.layout for a in (*kernel.reads, *kernel.writes)}
        self._stage_of = {stage.local: stage for stage in kernel.stages if stage.local is not None}
        self._in_memory: dict[Buffer, Buffer] = {}  # what earlier kernels computed once per row
        kept = [v for d, v in enumerate(kernel.domain) if d not in kernel.axes]
        self._kept_variables = tuple(kept)
        self._kept: tuple[Index, ...] = tuple(map(index_of, kept))

    def kernels(self) -> list[Kernel]:
        stages, of = self._kernel.stages, self._passes.of
        last = max(of[stage] for stage in stages if stage.kind == "reduce")
        made: list[Kernel] = []
        for number in range(last + 1):
            reductions = [s for s in stages if s.kind == "reduce" and of[s] == number]
            partial = {s: self._buffer(s, (self._part.extent,)) for s in reductions}
            best = {s: self._buffer(s, (self._part.extent,), s.value.dtype) for s in reductions if _is_position(s)}
            full = [s for s in stages if s.kind == "store" and of[s] == number]
            made.append(self._parts(reductions, partial, best, full))
            once = [s for s in stages if s.kind in ("scalar", "store_scalar")]
            once = [s for s in once if of[s] == number + 1 or (of[s] == 0 and number == 0)]
            made.append(self._combined(number, partial, best, once))
        if stores := [s for s in stages if s.kind == "store" and of[s] > last]:
            made.append(self._mapped(stores))
        return made

    def scans(self) -> list[Kernel] | None:
        """A kernel of scans: the parts' totals; running totals over the parts; each part scanned, on from those before it. Memory is read twice
        and written once. None where a scan needs another one, or there is more than scans and what is mapped."""
        scans = [stage for stage in self._kernel.stages if stage.kind == "scan"]
        taken = {stage.kind for stage in self._kernel.stages} <= {"map", "scan", "store"}
        if not taken or any(stage.combiner not in _PAIRWISE or self._needs_scans(stage.value) for stage in scans):
            return None
        totals: list[Stage] = []
        total_stores: list[Stage] = []
        running: list[Stage] = []
        last: list[Stage] = []
        point, part = (*self._kept, index_of(self._part)), index_of(self._part)
        for stage in scans:
            assert stage.local is not None
            total, sums = (self._buffer(stage, (self._part.extent,)) for _ in range(2))
            of_part, of_parts, inside = (
                Buffer(shape, stage.local.dtype) for shape in (total.shape[:-1], total.shape, stage.local.shape)
            )
            totals.append(Stage("reduce", of_part, self._written(stage.value), stage.combiner))
            total_stores.append(_stored(self._part_store(total, of_part), "store_scalar"))
            running.append(Stage("scan", of_parts, total.at(point), stage.combiner))
            running.append(_stored(Store(sums, point, of_parts.at(point)), "store"))
            last.append(Stage("scan", inside, stage.value, stage.combiner))
            own = inside.at(tuple(map(index_of, self._kernel.domain)))
            before = sums.at((*self._kept, part - 1))
            is_behind = call("ge", from_index(part), const(1, "int64"))
            last.append(Stage("map", stage.local, guard(is_behind, call(_PAIRWISE[stage.combiner], before, own), own)))
        last += [stage for stage in self._kernel.stages if stage.kind != "scan"]
        kernel, axes = self._kernel, (len(self._kept),)
        parts = [*totals, *total_stores]
        return [
            PartKernel(*self._arguments(parts), kernel.domain, kernel.axes, tuple(parts), self._part, self._length),
            RowKernel(*self._arguments(running), (*self._kept_variables, self._part), axes, tuple(running)),
            PartKernel(*self._arguments(last), kernel.domain, kernel.axes, tuple(last), self._part, self._length),
        ]

    def _needs_scans(self, e: Expr) -> bool:
        needed = [self._stage_of[buffer] for buffer in buffers_of_expr(e) if buffer in self._stage_of]
        return any(stage.kind == "scan" or self._needs_scans(stage.value) for stage in needed)

    def _parts(
        self,
        reductions: Sequence[Stage],
        partial: dict[Stage, Buffer],
        best: dict[Stage, Buffer],
        full: Sequence[Stage],
    ) -> Kernel:
        """The values that each part of a row is reduced to; of a position also the element there. `full`: what this pass stores of every
        element."""
        stages: list[Stage] = []
        stores: list[Store] = []
        for stage in reductions:
            assert stage.local is not None
            value = self._written(stage.value)
            stages.append(Stage("reduce", stage.local, value, stage.combiner))
            stores.append(self._part_store(partial[stage], stage.local))
            if stage in best:
                extreme = Buffer(stage.local.shape, value.dtype)
                stages.append(Stage("reduce", extreme, value, stage.combiner.removeprefix("arg")))
                stores.append(self._part_store(best[stage], extreme))
        stages += [_stored(store, "store_scalar") for store in stores]
        stages += [_stored(self._rewritten(stage), "store") for stage in full]
        reads, writes = self._arguments(stages)
        kernel = self._kernel
        return PartKernel(reads, writes, kernel.domain, kernel.axes, tuple(stages), self._part, self._length)

    def _part_store(self, buffer: Buffer, local: Buffer) -> Store:
        return Store(buffer, (*self._kept, index_of(self._part)), local.at(self._kept))

    def _combined(
        self, number: int, partial: dict[Stage, Buffer], best: dict[Stage, Buffer], once: Sequence[Stage]
    ) -> Kernel:
        """The parts' results as the rows', and the stages `once` per row; what later kernels need goes to memory."""
        point = (*self._kept, index_of(self._part))
        stages: list[Stage] = []
        for stage, buffer in partial.items():
            local = stage.local
            assert local is not None
            if stage in best:
                where_ = Buffer(local.shape, "int64")
                stages.append(Stage("reduce", where_, best[stage].at(point), stage.combiner))
                at = scalar_index(where_.at(self._kept), 0, self._part.extent - 1)
                stages.append(Stage("scalar", local, buffer.at((*self._kept, at))))
            else:
                stages.append(Stage("reduce", local, self._of_part(stage, partial), stage.combiner))
        own = {stage.local for stage in (*partial, *once)}
        for stage in once:
            if stage.store is None:
                stages.append(Stage(stage.kind, stage.local, self._written(stage.value, own)))
            else:
                stages.append(_stored(self._rewritten(stage, own), stage.kind))
        for stage in (*partial, *once):
            if stage.local is not None and self._is_needed_after(stage.local, number):
                buffer = self._in_memory[stage.local] = self._buffer(stage)
                stages.append(_stored(Store(buffer, self._kept, stage.local.at(self._kept)), "store_scalar"))
        reads, writes = self._arguments(stages)
        return RowKernel(
            reads, writes, (*self._kept_variables, self._part), (len(self._kept_variables),), tuple(stages)
        )

    def _of_part(self, stage: Stage, partial: dict[Stage, Buffer]) -> Expr:
        """The value that a part adds to the result of a reduction."""
        point = (*self._kept, index_of(self._part))
        own = partial[stage].at(point)
        joined = self._passes.joined.get(stage)
        if joined is None:
            return own
        base = partial[joined.base].at(point)
        centre = self._written(joined.centre, {joined.base.local})
        if joined.kind == "exponentials":
            return mul(own, call("exp", sub(base, centre)))
        # Of Chan, Golub and LeVeque: what the part's mean is away from the row's, for each of its elements. The last parts may have none.
        kind = own.dtype
        behind = mul(from_index(index_of(self._part), kind), const(self._length, kind))
        count = call("min", sub(const(self._elements, kind), behind), const(self._length, kind))
        mean = div(base, call("max", count, const(1, kind)))
        zero = const(0, own.dtype)
        far = where(call("gt", count, zero), sub(mean, centre), zero)
        return add(own, mul(count, mul(far, far)))

    def _mapped(self, stores: Sequence[Stage]) -> Kernel:
        """The stores of every element in the end."""
        stages = [_stored(self._rewritten(stage), "store") for stage in stores]
        reads, writes = self._arguments(stages)
        return MapKernel(reads, writes, self._kernel.domain, tuple(s.store for s in stages if s.store is not None))

    def _written(self, e: Expr, own: set[Buffer | None] | None = None) -> Expr:
        """An expression of the kernel for one of the new ones: results of earlier kernels are loads from memory; anything else that is
        mapped or computed once per row stands where it is used. `own`: what the new kernel has itself."""

        def of(load: Load) -> Expr | None:
            if own is not None and load.buffer in own:
                return None
            if (buffer := self._in_memory.get(load.buffer)) is not None:
                return buffer.at(load.index)
            stage = self._stage_of.get(load.buffer)
            return self._written(stage.value, own) if stage is not None and stage.kind in ("map", "scalar") else None

        return replace_loads(e, of)

    def _rewritten(self, stage: Stage, own: set[Buffer | None] | None = None) -> Store:
        assert stage.store is not None
        return Store(stage.store.buffer, stage.store.index, self._written(stage.store.value, own))

    def _is_needed_after(self, local: Buffer, number: int) -> bool:
        """True if a stage reads it that runs behind the pass `number` and what belongs to it."""
        of = self._passes.of
        for stage in self._kernel.stages:
            last = number + 1 if stage.kind in ("scalar", "store_scalar") else number
            if local in buffers_of_expr(stage.value) and (stage.kind == "map" or of[stage] > last):
                return True
        return False

    def _buffer(self, stage: Stage, parts: tuple[Dim, ...] = (), dtype: str = "") -> Buffer:
        """Memory for what a stage computes once per row, or once per part of one."""
        assert stage.local is not None
        shape = (*(v.extent for v in self._kept_variables), *parts)
        buffer = Buffer(shape, dtype or stage.local.dtype)
        self._layouts[buffer] = contiguous(shape)
        return buffer

    def _arguments(self, stages: Sequence[Stage]) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
        """The arguments that a kernel of these stages reads and writes."""
        reads = arguments([stage.value for stage in stages], [], frozenset(), self._layouts)
        written = [stage.store.buffer for stage in stages if stage.store is not None]
        return reads, tuple(Argument(buffer, self._layouts[buffer]) for buffer in written)


def _stored(store: Store, kind: str) -> Stage:
    return Stage(kind, None, store.value, store=store)


def _is_position(stage: Stage) -> bool:
    return stage.combiner.startswith("arg")
