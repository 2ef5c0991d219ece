"""Operands and memory of an attention task: sizes, workspaces, packed keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch_hybrid_backend.engines.cpu.schedules.axes import is_free_of, vectors
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import lanes_of
from torch_hybrid_backend.engines.cpu.schedules.transposition import transposed
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import max_rows
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.cache_updates import CacheUpdate, cache_update
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar, Scalar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, compute_dtype, indices, parts
from torch_hybrid_backend.loops.kernels import AttentionKernel
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, known_int, size_hint

# Up to this many keys, a tile's scores are kept whole (14 rows: 56 KiB); beyond, in blocks of half as many.
_KEYS = 1024
FEW_QUERIES = 8  # of a decoder, or of heads that share keys
# The dtype of keys in memory of which squares are packed, by the elements of a group (VNNI layout).
_PACKED = {1: "float32", 2: "bfloat16", 4: "int8"}


class AttentionParts:
    """Sizes, workspaces and packing of one attention kernel. Workspaces belong to a task: one (batch, head, piece of rows)."""

    # Neighbouring elements that a packed element holds (VNNI layout): along the head of keys, along the keys of values.
    group = 1

    def __init__(self, kernel: AttentionKernel, builder: Builder, printer: Printer, target: Target) -> None:
        self.kernel, self.builder, self.printer, self.target = kernel, builder, printer, target
        self.batch, self.heads, self.queries = (v.extent for v in kernel.domain[:3])
        # Of a cache with a new position the cache is packed, and then what is new.
        self.key_update = cache_update(kernel.k, kernel.k_vars[2]) if self.group == 1 else None
        self.value_update = cache_update(kernel.v, kernel.v_vars[2]) if self.group == 1 else None
        self.packed_keys: Expr = kernel.k if self.key_update is None else self.key_update.cache
        self.packed_values: Expr = kernel.v if self.value_update is None else self.value_update.cache
        # Heads of queries whose queries are rows of one task, for they read the same keys and values; parts of the keys with a task each.
        (self.shared, self.key_parts), self.queries_of_head = self._sharing(), self.queries
        if self.shared > 1:
            self.heads, self.queries = self.heads // self.shared, self.queries * self.shared
        self.width = known_int(kernel.domain[3].extent)
        self.keys, self.depth = kernel.k_vars[2].extent, kernel.q_vars[3].extent
        self.dtype = compute_dtype(kernel.accumulator.dtype)
        self.packed_dtype = self.dtype if self.group == 1 else "int32"
        self.lanes = lanes_of(target, self.dtype)
        self.panel_vectors = self._panel_vectors()
        self.panel = self.panel_vectors * self.lanes
        self.panels = ceil_div(self.keys, self.panel)
        self.whole_panels = self.keys // self.panel
        self.tail = self.keys - self.whole_panels * self.panel  # keys of the panel that is not whole
        self.block_panels = self._panels_of_block()
        self.blocks = ceil_div(self.panels, self.block_panels)
        self.is_online = self.blocks != 1 or self.key_parts != 1
        # More than the keys: rows a power of two apart would compete for the same lines of the cache.
        self.stride = self.block_panels * self.panel + self._behind_row()
        self.value_vectors = -(-self.width // self.lanes)
        self.most_rows = self._most_rows()
        # Rows of the tallest tile of queries.
        self.tallest = min(self.queries, self.most_rows) if isinstance(self.queries, int) else self.most_rows
        self.key_rows = self._key_rows()
        self.packed_k = self._workspace(self.panels * self.key_rows * self.panel, "kt", self.packed_dtype)
        self.packed_v = self._workspace(
            self.panels * self.panel // self.group * self.value_vectors * self.lanes, "v", self.packed_dtype
        )
        self.q = self._workspace(self.tallest * self.depth, "q")
        self.scores = self._workspace(self.tallest * self.stride, "scores")
        self.out = self._workspace(self.tallest * self.value_vectors * self.lanes, "out")
        self.maximum, self.sum = (builder.local(self.tallest, self.dtype, name) for name in ("max", "sum"))
        self._operand = Buffer((), self.dtype, "operand")

    def _sharing(self) -> tuple[int, int]:
        """The number of neighbouring heads of a task, as many as leave every core a task, and of parts of the keys."""
        batch, heads = size_hint(self.batch), self.heads
        fitting = (n for n in self._heads_together() if batch * size_hint(heads // n) >= self.target.cores)
        return max(fitting, default=1), 1

    def _heads_together(self) -> list[int]:
        """Numbers of neighbouring heads that may be rows of one task: their queries are few, and they read the same keys and values."""
        kernel = self.kernel
        heads, queries = self.heads, self.queries
        if kernel.causal or not isinstance(heads, int) or not isinstance(queries, int) or queries > FEW_QUERIES:
            return [1]
        alike = math.gcd(_heads_alike(kernel.k, kernel.k_vars[1]), _heads_alike(kernel.v, kernel.v_vars[1]))
        # More rows than few pay for packed keys, where packing is fast.
        operands = (self.packed_keys, self.packed_values)
        if not all(isinstance(e, Load) and e.buffer.dtype == "float32" for e in operands):
            alike = math.gcd(alike, FEW_QUERIES // queries)
        return [n for n in range(1, alike + 1) if alike % n == 0 and heads % n == 0]

    def place(self, head: Index, row: Index) -> tuple[Index, Index]:
        """The head and the query of a row of a task of `head`."""
        if self.shared == 1:
            return head, row
        return head * self.shared + row // self.queries_of_head, row % self.queries_of_head

    def _behind_row(self) -> int:
        """Elements between a row of scores and the next."""
        return self.lanes

    def _most_rows(self) -> int:
        """The most rows of a tile of queries."""
        return max_rows(2, self.target)

    def _key_rows(self) -> Dim:
        """The rows of a packed panel of keys."""
        return self.depth // self.group

    def _panel_vectors(self) -> int:
        return 1 if isinstance(self.keys, int) and self.keys <= self.lanes else 2

    def _panels_of_block(self) -> int:
        if isinstance(self.panels, Size) or isinstance(self.keys, Size):
            return _KEYS // self.panel
        return max(self.panels, 1) if self.keys <= _KEYS else _KEYS // 2 // self.panel

    def _workspace(self, size: Dim, name: str, dtype: str | None = None) -> TirBuffer:
        """An array of the kernel's compute dtype, or of `dtype`."""
        own = dtype or self.dtype
        return self.builder.workspace(size, own, name)

    def read(self, expr: Expr, variables: tuple[LoopVar, ...], *point: Index) -> TirExpr:
        return self.printer.expr(expr, dict(zip(variables, point, strict=True)))

    def vector(self, lanes: int, body: Callable[[Index], Stmt]) -> Stmt:
        return self.printer.vector_loop(lanes, body)

    def along(self, count: Dim, body: Callable[[Index], Stmt]) -> Stmt:
        """`body` for 0 .. count-1 in vectors."""
        return vectors(self.builder, self.printer, count, self.lanes, lambda base, lane, _: body(base + lane))

    def fill(self, buffer: TirBuffer, start: Index, count: Dim, value: TirExpr) -> Stmt:
        return self.along(count, lambda i: self.builder.store(buffer, start + i, value))

    def by_panel(self, panel: Index, body: Callable[[Dim], Stmt | None]) -> Stmt | None:
        """`body(keys)` of a panel, with how many keys it holds: two variants where that depends on the panel."""
        if self.tail == 0:
            return body(self.panel)
        if self.whole_panels == 0:
            return body(self.tail)
        whole, ragged = body(self.panel), body(self.tail)
        if ragged is None:
            assert whole is None
            return None
        is_ragged = self.builder.index(panel) >= self.builder.size(self.whole_panels)
        return self.builder.when(is_ragged, ragged, whole)

    def by_length(self, panel: Index, body: Callable[[Dim], Stmt | None]) -> Stmt | None:
        """`by_panel` where that saves work: a ragged panel of a length known only at run time is computed whole, and masked."""
        return body(self.panel) if isinstance(self.tail, Size) else self.by_panel(panel, body)

    def vectors_of(self, keys: Dim) -> int:
        """Vectors of a panel that hold its first `keys` keys."""
        return -(-keys // self.lanes) if isinstance(keys, int) else self.panel_vectors

    def pack_k(self, batch: Index, head: Index) -> Stmt:
        """kt[panel][d][key of the panel]; keys beyond the last are zero, or as the last."""
        b = self.builder
        squares = self._squares()
        whole = self.whole_panels

        def at(panel: Index, count: Dim, d: Index) -> Stmt:
            start = panel * (self.key_rows * self.panel) + d * self.panel

            def one(i: Index) -> Stmt:
                return b.store(self.packed_k, start + i, self._of_key(batch, head, panel * self.panel + i, d))

            nothing = tir.const(0, self.packed_dtype)
            clear = self.fill(self.packed_k, start, self.panel, nothing) if count != self.panel else None
            return b.seq(clear, self.along(count, one))

        def of(panel: Index, count: Dim) -> Stmt:
            done = squares * self.lanes if isinstance(count, int) else 0
            in_squares = (
                self._transpose(batch, head, panel, count, squares) if done and isinstance(count, int) else None
            )
            left = self.depth // self.group - done
            return b.seq(
                in_squares, b.loop(left, lambda d: at(panel, count, d + done), name="d") if left != 0 else None
            )

        loop = b.loop(whole, lambda p: of(p, self.panel), name="p") if whole != 0 else None
        if isinstance(self.tail, Size):
            rest = b.when(b.size(self.tail) > 0, of(as_index(whole), self.tail))
        else:
            rest = of(as_index(whole), self.tail) if self.tail else None
        return b.seq(loop, rest, self._pack_new_key(batch, head))

    def _pack_new_key(self, batch: Index, head: Index) -> Stmt | None:
        def put(key: Index, new: Callable[[Index], TirExpr]) -> Stmt:
            start = key // self.panel * (self.key_rows * self.panel) + key % self.panel
            return self.builder.loop(
                self.depth, lambda d: self.builder.store(self.packed_k, start + d * self.panel, new(d)), name="d"
            )

        return self._with_new(self.key_update, self.kernel.k_vars, batch, head, put)

    def _with_new(
        self, update: CacheUpdate | None, variables: tuple[LoopVar, ...], batch: Index, head: Index,
        put: Callable[[Index, Callable[[Index], TirExpr]], Stmt],
    ) -> Stmt | None:  # fmt: skip
        """`put(key, new)` for the position of an update, where it is one of the cache's; new(d): element d of what is new."""
        if update is None:
            return None
        b, none = self.builder, as_index(0)
        position = b.variable("position", "int64")
        key, bind = b.bound(tir.cast(position, "int32"), self.keys, "key")
        inside = tir.logical_and(position >= tir.const(0, "int64"), position < tir.cast(b.size(self.keys), "int64"))
        written = put(key, lambda d: self.read(update.new, variables, batch, head, none, d))
        value = tir.cast(self.read(update.position, variables, batch, head, none, none), "int64")
        return b.seq(b.bind(position, value), b.when(inside, b.seq(bind, written)))

    def _of_key(self, batch: Index, head: Index, key: Index, d: Index) -> TirExpr:
        """Element `d` of a packed key."""
        return self.read(self.packed_keys, self.kernel.k_vars, batch, head, key, d)

    def _squares(self) -> int:
        """The number of squares of `lanes` packed elements along a head's dimension can be loaded as vectors of keys and transposed."""
        k, d = self.packed_keys, self.kernel.k_vars[3]
        dtype = _PACKED[self.group]
        if not isinstance(k, Load) or k.buffer.dtype != dtype or self.lanes % 4 or not isinstance(d.extent, int):
            return 0
        terms = self.printer.offset(k.buffer, k.index, {}).terms
        is_dense = all(coefficient == 1 if atom == d else is_free_of(atom, d) for atom, coefficient in terms)
        return d.extent // self.group // self.lanes if is_dense else 0

    def _transpose(self, batch: Index, head: Index, panel: Index, count: int, squares: int) -> Stmt:
        """The first `squares * lanes` elements of a panel's first `count` keys; in vectors of which some exist, the others are as the last."""
        b, k, lanes = self.builder, self.packed_keys, self.lanes
        assert isinstance(k, Load)
        array = self.printer.arguments[k.buffer][0]

        def square(number: Index, vector: int) -> Stmt:
            starts = []
            for lane in range(lanes):
                key, d = panel * self.panel + min(vector * lanes + lane, count - 1), number * (lanes * self.group)
                env = dict(zip(self.kernel.k_vars, (batch, head, key, d), strict=True))
                starts.append(self.printer.offset(k.buffer, k.index, env))
            first = panel * (self.key_rows * self.panel) + number * (lanes * self.panel) + vector * lanes
            return self.transposed_square(array, starts, first)

        vectors = range(self.vectors_of(count))
        return b.loop(squares, lambda number: b.seq(*(square(number, v) for v in vectors)), name="d")

    def transposed_square(self, array: TirBuffer, starts: list[Index], first: Index) -> Stmt:
        """kt[first + j * panel ...] = packed element j from each of `starts` on in `array`, of as many as there are lanes."""
        b, lanes, dtype = self.builder, self.lanes, f"{self.packed_dtype}x{self.lanes}"
        rows, loads = [], []
        for start in starts:
            row = b.variable("row", dtype)
            value = b.load_vector(array, start, lanes * self.group)
            loads.append(b.bind(row, value if self.group == 1 else tir.reinterpret(value, dtype)))
            rows.append(row)
        stores = [
            b.store_vector(self.packed_k, first + j * self.panel, value, lanes)
            for j, value in enumerate(transposed(rows))
        ]
        return b.seq(*loads, *stores)

    def pack_v(self, batch: Index, head: Index) -> Stmt:
        """v[key][padded width]; what is padded is zero, keys beyond the last too where they are read (0 * NaN is not 0)."""
        b, kernel, padded = self.builder, self.kernel, self.value_vectors * self.lanes

        def row(t: Index) -> Stmt:
            def one(e: Index) -> Stmt:
                value = self.read(self.packed_values, kernel.v_vars, batch, head, t, e)
                return b.store(self.packed_v, t * padded + e, value)

            last = t * padded + (padded - self.lanes)
            clear = (
                self.fill(self.packed_v, last, self.lanes, tir.const(0, self.dtype)) if self.width < padded else None
            )
            return b.seq(clear, self.along(self.width, one))

        beyond = self.panels * self.panel - self.keys
        start = as_index(self.keys * padded)
        is_read = isinstance(self.tail, Size)
        rest = (
            self.fill(self.packed_v, start, beyond * padded, tir.const(0, self.dtype))
            if is_read and beyond != 0
            else None
        )

        def put(key: Index, new: Callable[[Index], TirExpr]) -> Stmt:
            return self.along(self.width, lambda e: b.store(self.packed_v, key * padded + e, new(e)))

        return b.seq(
            b.loop(self.keys, row, name="t"), rest, self._with_new(self.value_update, kernel.v_vars, batch, head, put)
        )


def _heads_alike(e: Expr, head: LoopVar) -> int:
    """The number of neighbouring heads that read the same keys: the divisor of the head in the indices; all heads where no index has the
    head."""
    alike = known_int(head.extent)
    for part in parts([e], within_indices=True):
        for index in indices(part):
            for atom, _ in index.terms:
                if isinstance(atom, FloorDiv) and atom.numerator == index_of(head) and isinstance(atom.divisor, int):
                    alike = math.gcd(alike, atom.divisor)
                elif isinstance(atom, Scalar):
                    continue  # what it is computed of is among the parts
                elif not is_free_of(atom, head):
                    return 1
    return alike
