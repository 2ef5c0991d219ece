"""What an attention task works on: sizes, workspaces, packed keys and values."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from torch_hybrid_backend.engines.tvm.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.tvm.printer import Printer
from torch_hybrid_backend.engines.tvm.schedules.registers import lanes_of, zero
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tiles import lane_chunks, max_rows, split_at_most
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Buffer, Expr, compute_dtype
from torch_hybrid_backend.loops.kernels import AttentionKernel

# Up to this many keys, a tile's scores are kept whole (14 rows: 56 KiB); beyond, in blocks of half as many.
_KEYS = 1024


class AttentionParts:
    """Sizes, workspaces and packing of one attention kernel. Workspaces belong to a task: one (batch, head, piece of rows)."""

    def __init__(self, kernel: AttentionKernel, builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.builder, self.printer, self.target = kernel, builder, printer, target
        self.batch, self.heads, self.queries, self.width = (v.extent for v in kernel.domain)
        self.keys, self.depth = kernel.k_vars[2].extent, kernel.q_vars[3].extent
        self.dtype = compute_dtype(kernel.accumulator.dtype)
        self.lanes = lanes_of(target, self.dtype)
        self.panel_vectors = 2 if self.keys > self.lanes else 1
        self.panel = self.panel_vectors * self.lanes
        self.panels = -(-self.keys // self.panel)
        self.tail = self.keys - (self.panels - 1) * self.panel
        self.block_panels = self.panels if self.keys <= _KEYS else _KEYS // 2 // self.panel
        self.blocks = -(-self.panels // self.block_panels)
        # One vector more than the keys: rows a power of two apart would compete for the same lines of the cache.
        self.stride = self.block_panels * self.panel + self.lanes
        self.value_vectors = -(-self.width // self.lanes)
        self.rows = split_at_most(self.queries, max_rows(2, target))
        size = self.rows.size
        self.packed_k = self._workspace(self.panels * self.depth * self.panel, "kt")
        self.packed_v = self._workspace(self.panels * self.panel * self.value_vectors * self.lanes, "v")
        self.q = self._workspace(size * self.depth, "q")
        self.scores = self._workspace(size * self.stride, "scores")
        self.out = self._workspace(size * self.value_vectors * self.lanes, "out")
        self.maximum, self.sum = builder.local(size, self.dtype, "max"), builder.local(size, self.dtype, "sum")
        self._operand = Buffer((), self.dtype, "operand")

    def _workspace(self, size: int, name: str) -> TirBuffer:
        return tirx.decl_buffer((size,), self.dtype, self.builder.fresh(name), scope="global")

    def read(self, expr: Expr, variables: tuple[LoopVar, ...], *point: Index) -> TirExpr:
        return self.printer.expr(expr, dict(zip(variables, point, strict=True)))

    def vector(self, lanes: int, body: Callable[[Index], Stmt]) -> Stmt:
        return self.printer.vector_loop(lanes, body)

    def along(self, count: int, body: Callable[[Index], Stmt]) -> Stmt:
        """`body` for 0 .. count-1 in vectors."""
        b, whole = self.builder, count // self.lanes
        loop = b.loop(whole, lambda i: self.vector(self.lanes, lambda lane: body(i * self.lanes + lane)), name="v")
        rest = lane_chunks(count - whole * self.lanes, self.lanes)

        def last(start: int, width: int) -> Stmt:
            return self.vector(width, lambda lane: body(lane + (whole * self.lanes + start)))

        return b.seq(loop if whole else None, *[last(start, width) for start, width in rest])

    def fill(self, buffer: TirBuffer, start: Index, count: int, value: TirExpr) -> Stmt:
        return self.along(count, lambda i: self.builder.store(buffer, start + i, value))

    def pack_k(self, batch: Index, head: Index) -> Stmt:
        """kt[panel][d][key of the panel]; keys beyond the last are zero."""
        b, kernel = self.builder, self.kernel

        def of(panel: Index, count: int) -> Stmt:
            def at(d: Index) -> Stmt:
                start = panel * (self.depth * self.panel) + d * self.panel

                def one(i: Index) -> Stmt:
                    key = panel * self.panel + i
                    return b.store(self.packed_k, start + i, self.read(kernel.k, kernel.k_vars, batch, head, key, d))

                clear = self.fill(self.packed_k, start, self.panel, zero(self.dtype)) if count < self.panel else None
                return b.seq(clear, self.along(count, one))

            return b.loop(self.depth, at, name="d")

        whole = self.panels if self.tail == self.panel else self.panels - 1
        loop = b.loop(whole, lambda p: of(p, self.panel), name="p") if whole else None
        return b.seq(loop, of(as_index(whole), self.tail) if whole < self.panels else None)

    def pack_v(self, batch: Index, head: Index) -> Stmt:
        """v[key][padded width]; what is padded is zero, keys beyond the last too (their weights are zero, and 0 * NaN is not)."""
        b, kernel, padded = self.builder, self.kernel, self.value_vectors * self.lanes

        def row(t: Index) -> Stmt:
            def one(e: Index) -> Stmt:
                return b.store(self.packed_v, t * padded + e, self.read(kernel.v, kernel.v_vars, batch, head, t, e))

            last = t * padded + (padded - self.lanes)
            clear = self.fill(self.packed_v, last, self.lanes, zero(self.dtype)) if self.width < padded else None
            return b.seq(clear, self.along(self.width, one))

        beyond = self.panels * self.panel - self.keys
        start = as_index(self.keys * padded)
        rest = self.fill(self.packed_v, start, beyond * padded, zero(self.dtype)) if beyond else None
        return b.seq(b.loop(self.keys, row, name="t"), rest)
