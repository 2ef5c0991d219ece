"""Matmul with a quantized weight: C[m, n] = sum over k of A[m, k] * (Q[k, n] - zero[g, n]) * scale[g, n], g = k // group, Q of 8 or 4 bits.

Pattern: a `Quantized` weight. Sums are as exact as those of the dequantized weight, but where it says that rows may be rounded
(`row_parts`). The weight comes from memory once, as it is packed: a sequential stream for each task, which has a share of the panels.

Few rows (decoding): integers become float32 in registers and are multiplied there; a group's sum is multiplied by its scale. (So activations
above 1e36 may be infinite too early.) 16 weights of 8 bits are a widening load, a conversion and a multiply-add; of 4 bits a shift, a mask, a
conversion and a multiply-add. Rows are divided by a nibble's unit (`quantized_weight`) when they are copied: exactly, but for what is below
1e-30. With AVX-512 a core takes 25 G weights a second so, of either kind (Zen 4, one core, weights in its cache): for two cores as much as
32 GB/s of nibbles with scales, which is what memory has, so that neither waits for the other alone. Up to three rows, six of one byte a number,
are products of integers where the processor has vpdpbusd (`integer_rows`): 58 G weights of 4 bits a second. Weights of 8 bits lie in words of
four along k for that.

More rows, where the processor has vpdpbusd and registers for the sums of two rows: a task writes a block of rows, as many as fit half its
second-level cache, as integers once, then runs tiles of a few rows (`integer_tiles`) by two vectors of columns over the panels. A dot product
is four multiply-adds a lane: three stand for four multiply-adds of float32; two where rows have 16 bits, one where they have 8. Should a number
be none that integers hold, the task multiplies its rows as float32, one by one.

Many rows elsewhere: a task dequantizes a part of a panel's k into scratch that stays in its cache, then runs all tiles of rows over it
(those of `packed`); between the parts of k sums wait in memory. That costs five instructions for each vector of weights, against a
multiply-add a row.

Source: Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008; scales of groups: Frantar et al., "GPTQ", 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch_hybrid_backend.engines.cpu.dot_products import ROW_PARTS, row_dot_product, row_group
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.schedules.axes import offsets_of, step
from torch_hybrid_backend.engines.cpu.schedules.matmul.integer_rows import IntegerRows
from torch_hybrid_backend.engines.cpu.schedules.matmul.integer_tiles import IntegerForm, IntegerTiles, integer_tiles
from torch_hybrid_backend.engines.cpu.schedules.matmul.packed import MatMul
from torch_hybrid_backend.engines.cpu.schedules.matmul.quantized_weight import QuantizedWeight
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import (
    RegisterTile,
    by_height,
    by_part,
    partials,
    tile_start,
)
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import Quantized
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, known_int

# Steps of k that are dequantized at once, roughly: 64 KiB of a panel of 32 columns.
_DEPTH = 512

# (total, panel, group): total += the rows of a task times a group of a panel.
AddGroup = Callable[[RegisterTile, Index, Index], Stmt]


def emit(kernel: CpuMatMulKernel[Quantized], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body. A and accumulator float32; more than a vector of columns; K and N are known."""
    return _Dequantized(kernel, builder, printer, target).emit()


class _Dequantized(MatMul):
    """The emission of one kernel."""

    def __init__(self, kernel: CpuMatMulKernel[Quantized], builder: Builder, printer: Printer, target: Target) -> None:
        self.quantized = kernel.weight
        super().__init__(kernel, self.quantized.width, builder, printer, target)
        self.weight = QuantizedWeight(kernel, builder, printer, self.lanes)
        self.depth_of_all, self.count, self.groups = self.weight.depth, known_int(self.panels), self.weight.groups
        whole = max(1, _DEPTH // self.quantized.group) * self.quantized.group
        self.depth = min(self.depth_of_all, whole if self.groups > 1 else _DEPTH)
        self.parts = -(-self.depth_of_all // self.depth)

    def emit(self) -> Stmt:
        m = self.m.extent
        tiles = self._integer_tiles(m)
        if isinstance(m, Size):
            if tiles is None:
                return by_height(self.builder, m, self._most_rows(), self.vectors, self._of_height)
            few = by_height(self.builder, m, tiles.height - 1, self.vectors, self._of_few)
            return self.builder.when(self.builder.size(m) >= tiles.height, self._in_integers(tiles), few)
        if m <= self._few() and (tiles is None or self._integers(m, self._few_row_parts) is not None):
            return self._streamed(m)
        return self._unpacked_static(m) if tiles is None else self._in_integers(tiles)

    def _few(self) -> int:
        """Rows up to which a group's sums, and the sums of groups, have registers."""
        return max(1, (self.target.isa.registers - 6) // (2 * self.vectors))

    def _of_few(self, rows: int) -> Stmt:
        """All rows, fewer than a tile of integers, in streams of `rows`, where their number is only known at run time."""

        def stream(number: Index) -> Stmt:
            first, begin = tile_start(self.builder, self.m.extent, rows, number)
            return self.builder.seq(begin, self._streamed(rows, first))

        return self.builder.loop(ceil_div(self.m.extent, rows), stream, name="row")

    def _of_height(self, rows: int) -> Stmt:
        """All rows, in tiles of `rows`, where their number is only known at run time; one row is a tile by itself."""
        if rows == 1:
            return self._of_few(1)
        b, parts, fitting = self.builder, ceil_div(self.m.extent, rows), self._fitting(rows)

        def tiles(block: Index, tile: Callable[[Index, Index, int], Stmt]) -> Stmt:
            def at(inner: Index) -> Stmt:
                first, begin = tile_start(b, self.m.extent, rows, block * fitting + inner)
                return b.seq(begin, tile(inner, first, rows))

            held = tir.minimum(b.size(parts) - b.index(block * fitting), tir.const(fitting, "int32"))
            return b.loop_until(held, fitting, at, "tile")

        return self._unpacked(ceil_div(parts, fitting), fitting * rows, rows, tiles)

    def _unpacked_static(self, m: int) -> Stmt:
        b, order = self.builder, self._order()

        def tiles(block: Index, tile: Callable[[Index, Index, int], Stmt]) -> Stmt:
            def at(inner: Index) -> Stmt:
                part = block * order.per_block + inner
                return by_part(b, order.rows, part, lambda first, rows: tile(inner, first, rows))

            return b.loop(order.per_block, at, name="tile")

        return self._unpacked(order.blocks, order.per_block * order.rows.size, order.rows.size, tiles)

    def _fitting(self, rows: int) -> int:
        return max(1, self.target.l2_bytes // 2 // (rows * self.depth * 4))

    # Few rows.

    def _streamed(self, rows: int, row: Index | None = None) -> Stmt:
        """`rows` rows from `row` on (the first), all panels: each task copies the rows, then goes through its share of the panels."""
        b, first_row = self.builder, as_index(0) if row is None else row
        tasks = min(self.target.cores, self.count)
        copied = b.workspace(rows * self.depth_of_all, "float32", "copied")
        integers = self._integer_rows(rows)

        def task(number: Index) -> Stmt:
            first, end = number * self.count // tasks, (number + 1) * self.count // tasks
            held = b.variable("count", "int32")

            def panels(groups: int, add_group: AddGroup) -> Stmt:
                def panel(inner: Index) -> Stmt:
                    at, bind = b.bound(b.index(first) + b.index(inner), self.count, "panel")

                    def sums(own: Index, columns: int) -> Stmt:
                        return self._sums(groups, add_group, rows, first_row, own, columns)

                    return b.seq(bind, self._by_width(at, sums))

                return b.loop_until(held, -(-self.count // tasks), panel, "panel")

            products = panels(self.groups, partial(self._add_group, copied))
            if integers is not None:
                exact = panels(integers.groups, partial(self._add_integer_group, integers))
                split = b.seq(integers.declare(), integers.split(copied))
                products = b.seq(split, b.when(integers.holds, exact, products))
            return b.seq(
                b.bind(held, b.index(end) - b.index(first)),
                b.alloc_on_heap(copied),
                *self.weight.table(),
                b.loop(rows, lambda r: self._copy(copied, r, first_row + r), name="row"),
                products,
            )

        return b.loop(tasks, task, "parallel", "task")

    def _by_width(self, panel: Index, body: Callable[[Index, int], Stmt]) -> Stmt:
        """`body(panel, columns)`: the last panel may have fewer."""
        last = known_int(self.last)
        if last == self.width or self.count == 1:
            return body(panel, last)
        is_whole = self.builder.index(panel) < tir.const(self.count - 1, "int32")
        return self.builder.when(is_whole, body(panel, self.width), body(as_index(self.count - 1), last))

    def _copy(self, copied: TirBuffer, to: Index, row: Index) -> Stmt:
        """copied[to, k] = A[row, k] / unit."""
        b = self.builder
        along_k = all(step(offset, self.kernel.k) in (0, 1) for offset in offsets_of(self.printer, [self.kernel.a]))
        whole = self.depth_of_all // self.lanes if along_k else 0

        def element(k: Index) -> Stmt:
            value = self._a(as_index(0), row, k)
            value = value if self.weight.unit == 1 else value * tir.const(1 / self.weight.unit, "float32")
            return b.store(copied, to * self.depth_of_all + k, value)

        def vector(i: Index) -> Stmt:
            return self.printer.vector_loop(self.lanes, lambda lane: element(i * self.lanes + lane))

        left = self.depth_of_all - whole * self.lanes
        rest = b.loop(left, lambda k: element(k + whole * self.lanes), name="k") if left else None
        return b.seq(b.loop(whole, vector, name="k") if whole else None, rest)

    def _integers(self, rows: int, parts: int) -> IntegerForm | None:
        """The integer product of a tile of `rows` rows of `parts` bytes; None where everything is float32."""
        group = min(self.quantized.group, self.depth_of_all)
        if self.quantized.table is not None or self.weight.per_word == 1:
            return None
        dot, own = row_dot_product(group, rows, self.vectors, parts, self.target), row_group(group, parts, self.target)
        return None if dot is None or own is None else IntegerForm(dot, own, parts)

    @property
    def _few_row_parts(self) -> int:
        """Bytes of a number of few rows: two would not be faster than three where memory is the limit."""
        return 1 if self.quantized.row_parts == 1 else ROW_PARTS

    def _integer_rows(self, rows: int) -> IntegerRows | None:
        form = self._integers(rows, self._few_row_parts)
        return None if form is None else self._as_integers(form, rows)

    def _as_integers(self, form: IntegerForm, rows: int) -> IntegerRows:
        return IntegerRows(
            form.dot,
            self.builder,
            self.printer,
            self.lanes,
            rows,
            self.depth_of_all,
            form.group,
            self.weight.unit,
            self.quantized.bits,
            form.parts,
        )

    # Many rows, as integers.

    def _integer_tiles(self, m: Dim) -> IntegerTiles | None:
        """The integer tiles of `m` rows (a tile or more where their number is known only at run time); None where rows stay float32."""
        form = self._integers(1, self.quantized.row_parts)
        if form is None:
            return None
        return integer_tiles(self.builder, m, form, self.depth_of_all, self.vectors, self.count, self.target)

    def _in_integers(self, tiles: IntegerTiles) -> Stmt:
        """Blocks of rows, each written as integers once, by panels."""
        b, shares = self.builder, tiles.shares
        rows = self._as_integers(tiles.form, tiles.per_block * tiles.height)
        copied = b.workspace(self.depth_of_all, "float32", "copied")

        def task(position: tuple[Index, ...]) -> Stmt:
            block, share = position
            first, end = share * self.count // shares, (share + 1) * self.count // shares
            held = b.variable("count", "int32")
            each_tile = partial(tiles.each, block)

            def each_panel(body: Callable[[Index, int], Stmt]) -> Stmt:
                def panel(inner: Index) -> Stmt:
                    at, bind = b.bound(b.index(first) + b.index(inner), self.count, "panel")
                    return b.seq(bind, self._by_width(at, body))

                most = -(-self.count // shares) if isinstance(shares, int) else self.count
                return b.loop_until(held, most, panel, "panel")

            def write_rows(inner: Index, row: Index, count: int) -> Stmt:
                def one(r: Index) -> Stmt:
                    return b.seq(
                        self._copy(copied, as_index(0), row + r), rows.split_row(copied, inner * tiles.height + r)
                    )

                return b.loop(count, one, name="row")

            def product(panel: Index, columns: int) -> Stmt:
                def tile(inner: Index, row: Index, count: int) -> Stmt:
                    add = partial(self._add_integer_group, rows, first=inner * tiles.height)
                    return self._sums(rows.groups, add, count, row, panel, columns)

                return each_tile(tile)

            def in_floats(inner: Index, row: Index, count: int) -> Stmt:
                def one(r: Index) -> Stmt:
                    def sums(panel: Index, columns: int) -> Stmt:
                        return self._sums(self.groups, partial(self._add_group, copied), 1, row + r, panel, columns)

                    return b.seq(self._copy(copied, as_index(0), row + r), each_panel(sums))

                return b.loop(count, one, name="row")

            return b.seq(
                b.bind(held, b.index(end) - b.index(first)),
                b.alloc_on_heap(copied),
                rows.declare(),
                each_tile(write_rows),
                b.when(rows.holds, each_panel(product), each_tile(in_floats)),
            )

        return b.fused((tiles.blocks, shares), task, name="task")

    def _sums(self, count: int, add_group: AddGroup, rows: int, row: Index, panel: Index, columns: int) -> Stmt:
        """Multiply one panel by the rows of a task, in `count` groups of k, and store the results."""
        b, vectors = self.builder, -(-columns // self.lanes)
        total = RegisterTile(b, self.printer, rows, vectors, self.lanes, self.dtype)
        groups = b.loop(count, lambda number: add_group(total, panel, number), name="group")
        write = self._write(total, as_index(0), row, panel * self.width, columns)
        return b.seq(total.declare(), total.clear(), groups, write)

    def _add_group(self, copied: TirBuffer, total: RegisterTile, panel: Index, number: Index) -> Stmt:
        """total += the copied rows times a group of a panel, in float32."""
        b, rows, vectors = self.builder, total.rows, total.vectors
        start = number * self.quantized.group
        # A multiply-add comes with two operations or three: half as many in flight as elsewhere keep it busy.
        ways = min(2, RegisterTile.ways_for(rows * vectors, self.quantized.group))
        tile = RegisterTile(b, self.printer, rows, vectors, self.lanes, self.dtype, ways)
        size = min(self.quantized.group, self.depth_of_all)
        # Whole words, and of bytes as many as give every copy its share.
        steps = max(self.weight.per_word, min(8, size))

        def some(i: Index, count: int) -> Stmt:
            k = start + i * steps
            word = self.weight.words_before(panel, k)

            def products(j: int) -> Stmt | None:
                here, place = j % self.weight.per_word, word + j // self.weight.per_word * self.width

                def a(r: int, _: Index) -> TirExpr:
                    return b.load(copied, k + (r * self.depth_of_all + j))

                def w(vector: int, lane: Index) -> TirExpr:
                    column = lane + vector * self.lanes
                    return self.weight.moved(self.weight.integer(place, here, column), panel, number, column)

                return tile.accumulate(partials(a, rows), partials(w, vectors), j % ways)

            return b.seq(self.weight.ahead(word, count // self.weight.per_word), *[products(j) for j in range(count)])

        whole, left = divmod(size, steps)

        def scaled(r: int, v: int, lane: Index) -> TirExpr:
            scale = self.weight.of_group(panel, number, lane + v * self.lanes, zero=False)
            return total.at(r, v, lane) + tile.at(r, v, lane) * scale

        return b.seq(
            tile.declare(),
            tile.clear(),
            b.loop(whole, lambda i: some(i, steps), name="k"),
            some(as_index(whole), left) if left else None,
            tile.merge(),
            total.fill(scaled),
        )

    def _add_integer_group(
        self, rows: IntegerRows, total: RegisterTile, panel: Index, number: Index, first: Index | None = None
    ) -> Stmt:
        """total += the rows times one of their groups of a panel, in sums of integers. `first`: of the rows; of few rows all are multiplied."""
        b, row = self.builder, as_index(0) if first is None else first
        word = self.weight.words_before(panel, number * rows.group)
        own = number * rows.group // self.quantized.group if self.groups > 1 else as_index(0)  # the weight's group

        def words(i: Index, vector: int) -> TirExpr:
            place = word + i * self.width + vector * self.lanes
            return b.load_vector(self.weight.array, place, self.lanes)

        def ahead(i: Index) -> Stmt | None:
            # Of many rows all but the first tile find the panel in the cache.
            return self.weight.ahead(word + i * self.width, 1)

        def use(sums: Callable[[int, int, Index], TirExpr]) -> Stmt:
            def scaled(r: int, v: int, lane: Index) -> TirExpr:
                column, value = lane + v * self.lanes, sums(r, v, lane)
                if self.quantized.zeros is not None:
                    value = value - rows.total(row + r, number) * self.weight.of_group(panel, own, column, zero=True)
                scale = self.weight.of_group(panel, own, column, zero=False)
                return total.at(r, v, lane) + value * (scale * rows.scale(row + r, number))

            return total.fill(scaled)

        return rows.group_sums(number, total.vectors, words, ahead, use, row, total.rows)

    # Many rows.

    def _unpacked(
        self, blocks: Dim, rows: int, tallest: int, tiles: Callable[[Index, Callable[[Index, Index, int], Stmt]], Stmt]
    ) -> Stmt:
        """Blocks of `rows` rows at most by panels, shared among tasks.

        `tiles(block, tile)` is `tile(number, first row, height)` for the tiles of a block, none higher than `tallest`.
        """
        b = self.builder
        items = blocks * self.count
        tasks = min(self.target.cores, items) if isinstance(items, int) else self.target.cores
        held = b.workspace(self.depth * self.width, "float32", "held")
        sums = b.workspace(rows * self.width, "float32", "sums")

        def task(number: Index) -> Stmt:
            first, end = (b.index(n) * b.size(items) // tir.const(tasks, "int32") for n in (number, number + 1))
            begin, count = b.variable("begin", "int32"), b.variable("count", "int32")

            def item(inner: Index) -> Stmt:
                at, bind = b.bound(begin + b.index(inner), items, "item")
                block, panel = at // self.count, at % self.count

                def tile(is_last: bool, size: int, part: Index) -> Callable[[Index, Index, int], Stmt]:
                    def of(number: Index, row: Index, height: int) -> Stmt:
                        place = number * (tallest * self.width)
                        return self._tile_over(held, sums, place, row, height, panel, part, size, is_last)

                    return of

                def over(part: Index, size: int, is_last: bool) -> Stmt:
                    return b.seq(self._dequantize(held, panel, part, size), tiles(block, tile(is_last, size, part)))

                last = over(as_index(self.parts - 1), self.depth_of_all - (self.parts - 1) * self.depth, True)
                if self.parts == 1:
                    return b.seq(bind, last)
                return b.seq(bind, b.loop(self.parts - 1, lambda p: over(p, self.depth, False), name="part"), last)

            return b.seq(
                b.bind(begin, first),
                b.bind(count, end - begin),
                *[b.alloc_on_heap(array) for array in ([held, sums] if self.parts > 1 else [held])],
                *self.weight.table(),
                b.loop_until(count, items, item, "item"),
            )

        return b.loop(tasks, task, "parallel", "task")

    def _dequantize(self, held: TirExpr, panel: Index, part: Index, size: int) -> Stmt:
        """held[k, column] = the weight, for `size` steps from part number `part` on."""
        b, group = self.builder, min(self.quantized.group, size)
        start = part * self.depth

        def of_group(inner: Index) -> Stmt:
            first = inner * group  # in the part
            number = (start + first) // self.quantized.group if self.groups > 1 else as_index(0)
            scale = b.local(self.width, "float32", "scale")

            def keep(v: int) -> Stmt:
                def of(lane: Index) -> Stmt:
                    column = lane + v * self.lanes
                    value = self.weight.of_group(panel, number, column, zero=False)
                    return b.store(scale, column, value * tir.const(1 / self.weight.unit, "float32"))

                return self.printer.vector_loop(self.lanes, of)

            def word(i: Index) -> Stmt:
                k = first + i * self.weight.per_word
                place = self.weight.words_before(panel, start + k)

                def put(j: int, v: int) -> Stmt:
                    def of(lane: Index) -> Stmt:
                        column = lane + v * self.lanes
                        value = self.weight.moved(self.weight.integer(place, j, column), panel, number, column)
                        return b.store(held, (k + j) * self.width + column, value * b.load(scale, column))

                    return self.printer.vector_loop(self.lanes, of)

                vectors = [put(j, v) for j in range(self.weight.per_word) for v in range(self.vectors)]
                return b.seq(self.weight.ahead(place, 1), *vectors)

            return b.seq(
                b.alloc(scale),
                *[keep(v) for v in range(self.vectors)],
                b.loop(group // self.weight.per_word, word, name="word"),
            )

        return b.loop(size // group, of_group, name="group")

    def _tile_over(
        self, held: TirExpr, sums: TirExpr, place: Index, row: Index, rows: int, panel: Index, part: Index, size: int,
        is_last: bool,
    ) -> Stmt:  # fmt: skip
        """A tile of rows over what is held of a panel: onto what waits at `place` of the sums; the stores after the last part."""
        b = self.builder
        ways = RegisterTile.ways_for(rows * self.vectors, size)
        tile = RegisterTile(b, self.printer, rows, self.vectors, self.lanes, self.dtype, ways)

        def products(k: Index, way: int) -> Stmt | None:
            def a(r: int, _: Index) -> TirExpr:
                return self._a(as_index(0), row + r, part * self.depth + k)

            def w(vector: int, lane: Index) -> TirExpr:
                return b.load(held, k * self.width + lane + vector * self.lanes)

            return tile.accumulate(partials(a, rows), partials(w, self.vectors), way)

        before = None
        if self.parts > 1:
            restored = tile.restore(sums, place)
            before = restored if is_last else b.when(b.index(part) > 0, restored)
        main = b.seq(tile.declare(), tile.clear(), before, tile.reduce(size, products))
        if not is_last:
            return b.seq(main, tile.spill(sums, place))
        columns = self._by_width(panel, lambda at, n: self._write(tile, as_index(0), row, at * self.width, n))
        return b.seq(main, columns)
