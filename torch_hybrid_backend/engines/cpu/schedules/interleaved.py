"""Few channels from planes into blocked channels, and rows of a matrix into words: an image that comes as NCHW, as convolutions read it, and a
right operand, as dot products do.

Pattern: a `MapKernel` with one store, in which 2 to 4 elements along one dimension lie together, and whose loads lie one after the other along
another. Below, these are channels and pixels.

Strategy
1. Sixteen neighbouring pixels at a time, channel by channel: a channel's values are one vector, whatever is computed.
2. Shuffles put the channels of a pixel together; what is stored is one run of memory.
3. One parallel loop over the other dimensions. Where guards turn, a margin say, the row is cut; what does not fill a vector is done pixel by
   pixel. The last panel of a matrix, whose columns may not fill it, is a loop of its own.

Not used: vectors of a pixel's channels, which `elementwise` takes for more of them: 5 cycles for a pixel of three in bfloat16, not 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hybrid_backend.engines.cpu.schedules.axes import Env, offsets_of, pieces, step
from torch_hybrid_backend.engines.cpu.schedules.vector_stores import stored_vector
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.storage import storage_dtype
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, Call, Expr, parts
from torch_hybrid_backend.loops.kernels import MapKernel, Store
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import Dim, known_int

_PIXELS = 16
# Larger blocks are vectors of their own.
_MAX_BLOCK = 4
_DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8")
_LANE = LoopVar("pixel", _PIXELS)


def interleaved(
    kernel: MapKernel,
    builder: Builder,
    printer: Printer,
    target: Target,
    channel: LoopVar,
    column: LoopVar,
    block: int,
    kind: str,
) -> Stmt | None:
    """The kernel's body; None where it has another pattern. `channel` lies in blocks of `block`; `column`: the dimension of pixels."""
    store, count = kernel.stores[0], channel.extent
    if len(kernel.stores) > 1 or len(kernel.domain) < 3 or store.buffer.dtype not in _DTYPES:
        return None
    if not isinstance(count, int) or not 1 < count <= block <= _MAX_BLOCK:
        return None
    if not isinstance(column.extent, int) or column.extent < _PIXELS or target.lanes < _PIXELS // 2:
        return None
    steps = {step(offset, column) for offset in offsets_of(printer, [store.value])}
    if not steps <= {0, 1} or step(printer.offset(store.buffer, store.index, {}), column) != block:
        return None
    array = printer.arguments[store.buffer][0]
    outer = [v for v in kernel.domain if v.extent != 1 and v not in (channel, column)]
    values = Buffer((_PIXELS,), store.buffer.dtype, "plane")

    def plane(env: Env, number: int, into: TirBuffer) -> Stmt:
        """Sixteen values of one channel, in its array."""
        printer.arguments = {**printer.arguments, values: (into, contiguous((_PIXELS,)))}
        inside = {**env, channel: as_index(number)}

        def place(lane: Index) -> Env:
            return {**inside, column: inside[column] + lane, _LANE: lane}

        to_plane = Store(values, (index_of(_LANE),), store.value)
        return stored_vector(printer, target, [to_plane], _PIXELS, place, lambda lane: None)

    def pixels(env: Env, start: Index) -> Stmt:
        here = {**env, column: start}
        planes = [builder.local(_PIXELS, storage_dtype(store.buffer.dtype), "plane") for _ in range(count)]
        # What padding channels hold is undefined: here, what the first channel does.
        vectors = [builder.load_vector(planes[lane if lane < count else 0], 0, _PIXELS) for lane in range(block)]
        order = [lane * _PIXELS + pixel for pixel in range(_PIXELS) for lane in range(block)]
        to = printer.offset(store.buffer, store.index, {**here, channel: as_index(0)})
        put = builder.store_vector(array, to, tir.shuffle(vectors, order), _PIXELS * block)
        filled = [plane(here, number, array) for number, array in enumerate(planes)]
        return builder.seq(*map(builder.alloc, planes), *filled, put)

    def pixel(env: Env, place: Index) -> Stmt:
        here = {**env, column: place}
        return printer.vector_loop(count, lambda lane: printer.stores([store], {**here, channel: lane}))

    def piece(env: Env, start: int, extent: int) -> Stmt:
        whole, left = divmod(extent, _PIXELS)

        def run(length: int, body: Callable[[Env, Index], Stmt], first: int, each: int) -> Stmt | None:
            return builder.loop(length, lambda i: body(env, i * each + first), name="w") if length else None

        return builder.seq(run(whole, pixels, start, _PIXELS), run(left, pixel, start + whole * _PIXELS, 1))

    panel = _panel(printer, store.value, column, outer)
    others = [v for v in outer if v is not panel]
    cut = [tuple(map(known_int, part)) for part in pieces(printer, [store.value], column)]

    def rows(first: Index, count: Dim) -> Stmt:
        """All rows of some panels."""

        def row(place: tuple[Index, ...]) -> Stmt:
            env = dict(zip(others, place[1:], strict=True))
            if panel is not None:
                env[panel] = place[0] + first
            return builder.seq(*[piece(env, start, extent) for start, extent in cut])

        return builder.fused([count, *(v.extent for v in others)], row, kind if outer else "serial")

    if panel is None:
        return rows(as_index(0), 1)
    last = panel.extent - 1
    return builder.seq(rows(as_index(0), last), rows(as_index(last), 1))


def _panel(printer: Printer, value: Expr, column: LoopVar, outer: Sequence[LoopVar]) -> LoopVar | None:
    """The dimension that together with `column` decides a guard: a column of a matrix is one of a panel, and the last panel has fewer."""
    conditions = [e.args[0] for e in parts([value]) if isinstance(e, Call) and e.op == "guard"]
    for comparison in parts(conditions):
        sides = printer.index_sides(comparison, {}) if isinstance(comparison, Call) else None
        terms = {} if sides is None else dict((sides[0] - sides[1]).terms)
        found = [v for v in outer if v in terms]
        if column in terms and len(found) == 1:
            return found[0]
    return None
