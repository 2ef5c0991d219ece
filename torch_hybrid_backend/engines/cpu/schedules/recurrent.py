"""Recurrent layers: in each step a product of the state with packed weights, and the gates' arithmetic on its sums in registers.

Weights lie as (block of units, k, gate, unit): a task reads those of its blocks as one stream, which stays in its second-level cache from
step to step where it fits. Steps:

1. The first state, and the first cell, are copied to where steps read them.
2. For every step, one after the other, threads share the blocks. A tile is some rows of the batch by all gates of a block.
   Several tiles take the weights in pieces, so that memory is read once for all of them.
3. The sums go through the arithmetic of the gates to the next state.

A step of B rows and H units with G gates is B G H^2 multiply-adds, and reads G H^2 weights: with a few rows, caches and memory are the limit.
"""

from __future__ import annotations

from functools import partial

from torch_hybrid_backend.engines.cpu.schedules.axes import Env, vectors
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import RegisterTile, partials
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES, Target
from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.kernels import RecurrentKernel
from torch_hybrid_backend.sizes.size import ceil_div, known_int, size_hint

# Multiply-adds of a step below which one thread computes it: about 2 us from the second-level cache, where a launch takes up to 1 us.
_SHARED = 32_768
_MOST_ROWS = 8
# Rows that read weights from memory once, as tiles; and steps of k that they take together, whose weights are 16 KiB with four gates.
_TILES, _PIECE = 4, 64


def emit(kernel: RecurrentKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The loops of one direction of a layer. float32; the number of units is known."""
    return _Recurrent(kernel, builder, printer, target).emit()


class _Recurrent:
    def __init__(self, kernel: RecurrentKernel, builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.b, self.p = kernel, builder, printer
        self.steps, self.batch, self.unit = kernel.domain
        self.units, self.lanes, self.gates = known_int(self.unit.extent), target.lanes, len(kernel.products)
        self.blocks = -(-self.units // self.lanes)
        self.weight = printer.arguments[kernel.weight][0]
        is_shared = size_hint(self.batch.extent) * self.gates * self.units**2 >= _SHARED
        self.tasks = min(target.cores, self.blocks) if is_shared else 1
        # Besides the sums, registers hold a vector of each gate's weights, and an element of the state.
        self.rows = max(1, min(_MOST_ROWS, (target.isa.registers - self.gates - 1) // self.gates))

    def emit(self) -> Stmt:
        return self.b.seq(self._begin(), self.b.loop(self.steps.extent, self._step, name="step"))

    def _begin(self) -> Stmt:
        def row(at: Index) -> Stmt:
            def along(base: Index, lane: Index, _: int) -> Stmt:
                return self.p.stores(self.kernel.begin, {self.batch: at, self.unit: base + lane})

            return vectors(self.b, self.p, self.units, self.lanes, along)

        return self.b.loop(self.batch.extent, row, name="row")

    def _step(self, step: Index) -> Stmt:
        def task(number: Index) -> Stmt:
            first, end = number * self.blocks // self.tasks, (number + 1) * self.blocks // self.tasks
            count = self.b.index(end) - self.b.index(first)
            most = ceil_div(self.blocks, self.tasks)
            return self.b.loop_until(count, most, lambda inner: self._block(step, first + inner), "block")

        return self.b.loop(self.tasks, task, "parallel", "task")

    def _block(self, step: Index, block: Index) -> Stmt:
        """The new states of a block of units."""
        b, batch = self.b, self.batch.extent
        if not isinstance(batch, int):
            return b.loop(batch, lambda row: self._rows_of(step, block, row, 1), name="row")
        together = min(batch, self.rows * _TILES)
        whole, rest = divmod(batch, together)
        return b.seq(
            b.loop(whole, lambda n: self._rows_of(step, block, n * together, together), name="rows"),
            self._rows_of(step, block, as_index(whole * together), rest) if rest else None,
        )

    def _rows_of(self, step: Index, block: Index, first: Index, rows: int) -> Stmt:
        """The new states of a block for `rows` rows: as one tile, or several, which go through the weights piece by piece together."""
        b, lanes = self.b, self.lanes
        tiles = -(-rows // self.rows)
        height = -(-rows // tiles)
        sums = b.local(rows * self.gates * lanes, "float32", "sums")
        if tiles == 1:
            products = self._tile(step, block, first, rows, sums, 0, as_index(0), self.units, None)
        else:
            pieces, rest = divmod(self.units, _PIECE)
            starts = [(row, min(height, rows - row)) for row in range(0, rows, height)]

            def piece(k: Index, depth: int) -> Stmt:
                each = [self._tile(step, block, first, n, sums, row, k, depth, _PIECE) for row, n in starts]
                return b.seq(*each)

            zero = b.loop(rows * self.gates, lambda n: self._zero(sums, n * lanes), name="sum")
            whole = b.loop(pieces, lambda n: piece(n * _PIECE, _PIECE), name="piece") if pieces else None
            products = b.seq(zero, whole, piece(as_index(pieces * _PIECE), rest) if rest else None)
        units = b.loop(rows, lambda row: self._units(step, block, first + row, sums, row), name="row")
        return b.seq(b.alloc(sums), products, units)

    def _zero(self, sums: TirBuffer, place: Index) -> Stmt:
        return self.p.vector_loop(self.lanes, lambda lane: self.b.store(sums, place + lane, tir.const(0, "float32")))

    def _tile(
        self,
        step: Index,
        block: Index,
        first: Index,
        rows: int,
        sums: TirBuffer,
        row_of_sums: int,
        start: Index,
        depth: int,
        ahead: int | None,
    ) -> Stmt:
        """sums[row_of_sums ...] = products of `rows` states over k from `start` on; added to what is there where weights come in pieces, and
        those `ahead` are asked for meanwhile."""
        b, lanes = self.b, self.lanes
        tile = RegisterTile(
            b, self.p, rows, self.gates, lanes, "float32", RegisterTile.ways_for(rows * self.gates, depth)
        )
        states, place = self.p.arguments[self.kernel.states][0], row_of_sums * self.gates * lanes

        def at(k: Index) -> Index:
            return (block * self.units + start + k) * (self.gates * lanes)

        def product(k: Index, way: int) -> Stmt | None:
            def state(row: int, _: Index) -> TirExpr:
                index = (step, first + row_of_sums + row, start + k)
                return b.load(states, self.p.offset(self.kernel.states, index, {}))

            def weight(gate: int, lane: Index) -> TirExpr:
                return b.load(self.weight, at(k) + gate * lanes + lane)

            return tile.accumulate(partials(state, rows), partials(weight, self.gates), way)

        def ask(i: Index) -> Stmt:
            unrolled = tile.unrolled(depth)
            lines = range(0, unrolled * self.gates * lanes, LINE_BYTES // 4)
            following = at(i * unrolled) + (ahead or 0) * (self.gates * lanes)
            return b.seq(*[b.prefetch(self.weight, b.index(following + line), 1) for line in lines])

        begin = tile.clear() if ahead is None else tile.restore(sums, place)
        if ahead is not None and tile.ways > 1:
            begin = b.seq(tile.clear(), begin)
        steps = tile.reduce(depth, product, None if ahead is None else ask)
        return b.seq(tile.declare(), begin, steps, tile.spill(sums, place))

    def _units(self, step: Index, block: Index, row: Index, sums: TirBuffer, place: Index) -> Stmt:
        """The arithmetic of a block's gates for one row of the batch; the last block may have fewer units than lanes."""
        rest = self.units % self.lanes
        whole = self._lanes(step, block, row, sums, place, self.lanes)
        if not rest:
            return whole
        last = self._lanes(step, block, row, sums, place, rest)
        return self.b.when(self.b.equal(block, self.blocks - 1), last, whole) if self.blocks > 1 else last

    def _lanes(self, step: Index, block: Index, row: Index, sums: TirBuffer, place: Index, count: int) -> Stmt:
        parts: list[Stmt] = []
        for start, width in lane_chunks(count, self.lanes):

            def unit(lane: Index, start: int = start) -> Stmt:
                for gate, product in enumerate(self.kernel.products):
                    value = self.b.load(sums, (place * self.gates + gate) * self.lanes + start + lane)
                    self.p.locals[product] = partial(_given, value)
                env: Env = {self.steps: step, self.batch: row, self.unit: block * self.lanes + start + lane}
                return self.p.stores(self.kernel.stores, env)

            parts.append(self.p.vector_loop(width, unit))
        return self.b.seq(*parts)


def _given(value: TirExpr, _: tuple[Index, ...]) -> TirExpr:
    return value
