"""Prefetches of what a product's stores read besides its sums: a residual, the gate of a gated layer, a mask.

A tile reads a few columns of many rows: every line is a miss that no hardware prefetcher foresees, and an epilogue of many instructions has
few misses under way at once. So tiles ask for these lines while they multiply.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid_backend.engines.cpu.schedules.axes import Env, depends, step
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, LoopVar, Scalar
from torch_hybrid_backend.loops.ir import Load, loads_of
from torch_hybrid_backend.loops.kernels import Store


class Operands:
    """Operands of the stores of a product over (batch, row, column) that lie in memory along `column`, each row in lines of its own."""

    def __init__(self, printer: Printer, stores: Sequence[Store], domain: Sequence[LoopVar]) -> None:
        self.printer, self.domain = printer, domain
        _, row, column = domain
        found: dict[tuple[object, object], Load] = {}
        for load in (load for store in stores for load in loads_of(store.value) if load.buffer in printer.arguments):
            offset = printer.offset(load.buffer, load.index, {})
            if depends(offset, row) and step(offset, column) == 1 and not _is_read(offset):
                found[load.buffer, load.index] = load
        self.loads = list(found.values())

    def ahead(
        self, start: tuple[Index, Index, Index], rows: int, lines: int, width: int, turn: Index, turns: int
    ) -> Stmt | None:
        """Ask for a share of what the stores of a tile read, where it multiplies in `turns` turns; None if they read nothing.

        start: the tile's batch, first row and first column. lines: cache lines of each of its `rows` rows, `width` columns apart.
        """
        if not self.loads or turns < 1:
            return None
        b, asked = self.printer.builder, rows * lines
        share = -(-asked // turns)
        batch, row, column = start
        statements: list[Stmt] = []
        for i in range(share):
            # The last turns ask again for what is there already, where shares do not come out even.
            line, bind = b.bound(tir.minimum(b.index(turn * share + i), tir.const(asked - 1, "int32")), asked, "line")
            point = (batch, row + line // lines, column + line % lines * width)
            env = dict(zip(self.domain, point, strict=True))
            statements += [bind, *(self._prefetch(load, env) for load in self.loads)]
        return b.seq(*statements)

    def _prefetch(self, load: Load, env: Env) -> Stmt:
        b, (array, _) = self.printer.builder, self.printer.arguments[load.buffer]
        return b.prefetch(array, b.index(self.printer.offset(load.buffer, load.index, env)))


def _is_read(offset: Index) -> bool:
    """True if a place is read from a tensor itself."""
    return any(isinstance(leaf, Scalar) for leaf in offset.leaves())
