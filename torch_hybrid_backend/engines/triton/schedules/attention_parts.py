"""Parts that the schedules of attention and of its gradients share: heads, rows, scores, and the keys that rows can see."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.kernels import ScoreKernel
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules.tiles import power_of_2
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.attention_scores import Visible, scaled, simplified, visible
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.sizes.size import Dim, Size, product, size_hint

MIN_TILE = 16  # of `tl.dot`
LARGE_TILE = 512
LOG2_E = math.log2(math.e)
_FAR = 1 << 30


def padded_width(variable: LoopVar) -> int:
    """The extent of a tile's dimension that holds a whole head's width. Raises ScheduleError where that is only known at run time."""
    if isinstance(variable.extent, Size):
        raise ScheduleError("attention needs head widths that are known when it is compiled")
    return max(MIN_TILE, power_of_2(variable.extent))


class Rows:
    """The queries of one program: rows of one head, or, packed, of all heads that read the same keys, one head after the other.

    `share`: how many heads that is. `heads`: the variable of programs along heads, and `row`: of their rows, `share` times as many as there
    are queries.
    """

    def __init__(self, kernel: ScoreKernel, packed: bool) -> None:
        *lead, s, _ = kernel.q_vars
        self.share = kernel.share if packed else 1
        self.queries = s.extent
        self._lead = [v.extent for v in lead]
        own = [*self._lead[:-1], _divided(self._lead[-1], self.share)]
        self.heads = LoopVar("head", product(own))
        self.row = LoopVar("i", s.extent * self.share)
        self._own = own

    def place(self) -> tuple[Index, ...]:
        """(*lead, s) in terms of `heads` and `row`."""
        rest, places = index_of(self.heads), list[Index]()
        for extent in reversed(self._own):
            places.append(as_index(0) if extent == 1 else rest % extent)
            rest = rest // extent
        lead = places[::-1]
        row = index_of(self.row)
        if self.share == 1:
            return *lead, row
        member = as_index(0) if self.row.extent == 1 else row // self.queries
        lead[-1] = lead[-1] * self.share + member
        return *lead, as_index(0) if self.queries == 1 else row % self.queries

    def env(self, variables: Sequence[LoopVar], *columns: LoopVar) -> dict[LoopVar, Index]:
        """The variables (*lead, s, ...) of an operand; one of a single value is the same for all heads."""
        places = (*self.place(), *map(index_of, columns))
        return {v: as_index(0) if v.extent == 1 else place for v, place in zip(variables, places, strict=True)}

    def key_env(self, variables: Sequence[LoopVar], key: LoopVar, column: LoopVar) -> dict[LoopVar, Index]:
        """The variables (*lead, t, ...) of keys or values: the same for all heads of a program."""
        lead = list(self.place()[:-1])
        if self.share > 1:
            rest = index_of(self.heads)
            lead[-1] = (as_index(0) if self._own[-1] == 1 else rest % self._own[-1]) * self.share
        places = (*lead, index_of(key), index_of(column))
        return {v: as_index(0) if v.extent == 1 else place for v, place in zip(variables, places, strict=True)}


def _divided(extent: Dim, share: int) -> Dim:
    return extent if share == 1 else extent // share


class Scores:
    """The scores of a kernel in base 2. `variable`: what its innermost loop runs along, the number of the key or of the query."""

    def __init__(self, kernel: ScoreKernel, variable: LoopVar, dtype: str) -> None:
        self.type = DTYPES[dtype][0]
        self.exp2 = "libdevice.exp2" if dtype == "float64" else "tl.exp2"
        self.log2 = "libdevice.log2" if dtype == "float64" else "tl.log2"
        self.visible: Visible = visible(kernel.score, variable)
        self._anywhere = scaled(kernel.score, LOG2_E)
        self._inside = scaled(simplified(kernel.score, self.visible.decided), LOG2_E)

    def expr(self, *, whole: bool) -> Expr:
        """`whole`: in blocks where all conditions that are decided by the loop's bounds hold."""
        return self._inside if whole else self._anywhere


@contextmanager
def along(
    printer: Printer, tile: Tile, dim: int, variable: LoopVar, start: str, *, whole: bool
) -> Iterator[dict[int, Value]]:
    """An axis as by `tiles.axis`; with `whole` every point is known to exist."""
    name = variable.name
    printer.lines.add(f"{name} = {start} + {tile.arange(dim)}")
    printer.variable(variable, Value.along(name, dim))
    if whole:
        yield {}
        return
    printer.lines.add(f"{name}_in = {name} < {printer.size(variable.extent)}")
    yield {dim: Value.along(f"{name}_in", dim)}


class Visit:
    """Writes loops over the part of an axis of the scores that the other axis' tile can see, in blocks.

    Whole blocks, where every element exists and every condition that decides about the axis holds, have a loop of their own, without masks:

        begin ... inner      some conditions fail: a sliding window's beginning
        inner ... outer      whole blocks
        outer ... end        some conditions fail, or elements are missing

    `extent`: of the axis; `block`, `size`: the name and the number of a block's elements.
    """

    def __init__(self, printer: Printer, seen: Visible, extent: Dim, block: str, size: int) -> None:
        self._printer = printer
        self._seen = seen
        self._extent = extent
        self._block = block
        self._size = size
        self._is_even = isinstance(extent, int) and extent % size == 0
        self._from_zero = not (seen.bounds.lows or seen.inner.lows)
        self._is_all = self._from_zero and not (seen.bounds.highs or seen.inner.highs)

    def find(self, in_tile: Mapping[int, Value]) -> None:
        """Writes the limits for the tile that the printer is over; `in_tile`: which of its elements exist."""
        add, seen, block = self._printer.lines.add, self._seen, self._block
        extent = self._printer.size(self._extent)
        if self._is_all:
            return
        add("begin = 0")
        add(f"end = {extent}")
        for low in seen.bounds.lows:
            add(f"begin = tl.maximum(begin, {self._extreme('min', low, in_tile)})")
        for high in seen.bounds.highs:
            add(f"end = tl.minimum(end, {self._extreme('max', high, in_tile)} + 1)")
        if not self._from_zero:
            add(f"begin = begin // {block} * {block}")
            add("inner = begin")
        add("outer = end")
        for low in seen.inner.lows:
            add(f"inner = tl.maximum(inner, {self._extreme('max', low, in_tile)})")
        for high in seen.inner.highs:
            add(f"outer = tl.minimum(outer, {self._extreme('min', high, in_tile)} + 1)")

    def divide(self, part: str, parts: int) -> None:
        """Leaves the part of one of several programs that share the axis."""
        add, block = self._printer.lines.add, self._block
        if self._is_all:
            add(f"end = {self._printer.size(self._extent)}")
            add("outer = end")
            self._is_all = False
        if self._from_zero:
            add("begin = 0")
            add("inner = 0")
        add(f"share = (tl.maximum(end - begin, 0) + {parts} * {block} - 1) // ({parts} * {block}) * {block}")
        add(f"begin = begin + {part} * share")
        add("end = tl.minimum(end, begin + share)")
        self._from_zero = False

    def loops(self, body: Callable[[bool], None]) -> None:
        """Writes `body(whole)` in each of the loops; `start` is the number of a block's first element."""
        add, block, seen = self._printer.lines.add, self._block, self._seen
        first, behind = "inner", "end"
        if self._is_all:
            behind = self._printer.size(self._extent)
            add(f"outer = ({behind}) // {block} * {block}")
        else:
            add(f"outer = tl.minimum(outer, end) // {block} * {block}")
        if self._from_zero:
            first = "0"
        else:
            add("inner = tl.minimum(tl.maximum(inner, begin), tl.maximum(end, begin))")
            add(f"inner = (inner + {block} - 1) // {block} * {block}")
            add("outer = tl.maximum(outer, inner)")
        if seen.inner.lows:
            self._loop("begin", "inner", body, whole=False)
        if not isinstance(self._extent, int) or self._extent >= self._size:
            self._loop(first, "outer", body, whole=True)
        if not self._is_even or seen.bounds.highs or seen.inner.highs:
            self._loop("outer", behind, body, whole=False)

    def _loop(self, first: str, behind: str, body: Callable[[bool], None], *, whole: bool) -> None:
        with self._printer.lines.block(f"for start in range({first}, {behind}, {self._block}):"):
            start = "start + tl.zeros([], tl.int64)" if self._printer.is_wide else "start"
            self._printer.lines.add(f"start = tl.multiple_of({start}, {self._block})")
            body(whole)

    def is_filled(self, whole: bool) -> bool:
        """True if every element of a block exists."""
        return whole or self._is_even

    def _extreme(self, which: str, bound: Expr, in_tile: Mapping[int, Value]) -> str:
        """The least or the greatest value of a bound in a tile, as a scalar of 32 bits."""
        value = self._printer.expr(bound)
        # No less than -1: behind it begins element 0, and division rounds towards zero.
        text = f"tl.minimum(tl.maximum({value.text}, -1), {_FAR}).to(tl.int32)"
        if not value.dims:
            return text
        masks = [mask.text for dim, mask in in_tile.items() if dim in value.dims]
        if masks:
            text = f"tl.where({' & '.join(masks)}, {text}, {_FAR if which == 'min' else -1})"
        return f"tl.{which}({text})"


def row_tile(target: Target, rows: Dim, most: int) -> int:
    """The number of rows of a tile: as many as there are, and no more than `most`."""
    if target.has_large_tiles:
        most = LARGE_TILE
    return max(MIN_TILE, min(most, power_of_2(max(1, size_hint(rows)))))
