"""Few channels from planes into blocked channels: an image that comes as NCHW, as convolutions read it.

Pattern: a `MapKernel` with one store, blocked in all of its 2 to 4 channels, whose loads lie one after the other along the last dimension.

Strategy
1. Sixteen neighbouring pixels at a time, channel by channel: a channel's values are one vector, whatever is computed.
2. Shuffles put the channels of a pixel together; what is stored is one run of memory.
3. One parallel loop over (image, row). Where guards turn, a margin say, the row is cut; what does not fill a vector is done pixel by pixel.

Not used: vectors of a pixel's channels, which `elementwise` takes for more of them: 5 cycles for a pixel of three in bfloat16, not 2.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from torch_hybrid_backend.engines.tvm.schedules.axes import Env, offsets_of, pieces, step
from torch_hybrid_backend.engines.tvm.schedules.vector_stores import stored_vector
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.tvm.tir.printer import Printer
from torch_hybrid_backend.engines.tvm.tir.storage import storage_dtype
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import MapKernel, Store
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import known_int

_PIXELS = 16
# Larger blocks are vectors of their own.
_MAX_BLOCK = 4
_DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8")
_LANE = LoopVar("pixel", _PIXELS)


def interleaved(
    kernel: MapKernel, builder: Builder, printer: Printer, target: Target, channel: LoopVar, block: int, kind: str
) -> Stmt | None:
    """The kernel's body; None where it has another pattern. `channel` is dimension 1 of the domain, in blocks of `block`."""
    store, column, count = kernel.stores[0], kernel.domain[-1], channel.extent
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
    outer = [v for v in (kernel.domain[0], *kernel.domain[2:-1]) if v.extent != 1]
    planes = [builder.local(_PIXELS, storage_dtype(store.buffer.dtype), "plane") for _ in range(count)]
    values = Buffer((_PIXELS,), store.buffer.dtype, "plane")

    def plane(env: Env, number: int) -> Stmt:
        """Sixteen values of one channel, in its array."""
        printer.arguments = {**printer.arguments, values: (planes[number], contiguous((_PIXELS,)))}
        inside = {**env, channel: as_index(number)}

        def place(lane: Index) -> Env:
            return {**inside, column: inside[column] + lane, _LANE: lane}

        to_plane = Store(values, (index_of(_LANE),), store.value)
        return stored_vector(printer, target, [to_plane], _PIXELS, place, lambda lane: None)

    def pixels(env: Env, start: Index) -> Stmt:
        here = {**env, column: start}
        # What padding channels hold is undefined: here, what the first channel does.
        vectors = [builder.load_vector(planes[lane if lane < count else 0], 0, _PIXELS) for lane in range(block)]
        order = [lane * _PIXELS + pixel for pixel in range(_PIXELS) for lane in range(block)]
        to = printer.offset(store.buffer, store.index, {**here, channel: as_index(0)})
        put = builder.store_vector(array, to, tirx.Shuffle(vectors, order), _PIXELS * block)
        filled = [plane(here, number) for number in range(count)]
        return builder.seq(*map(builder.alloc, planes), *filled, put)

    def pixel(env: Env, place: Index) -> Stmt:
        here = {**env, column: place}
        return printer.vector_loop(count, lambda lane: printer.stores([store], {**here, channel: lane}))

    def piece(env: Env, start: int, extent: int) -> Stmt:
        whole, left = divmod(extent, _PIXELS)

        def run(length: int, body: Callable[[Env, Index], Stmt], first: int, each: int) -> Stmt | None:
            return builder.loop(length, lambda i: body(env, i * each + first), name="w") if length else None

        return builder.seq(run(whole, pixels, start, _PIXELS), run(left, pixel, start + whole * _PIXELS, 1))

    def row(place: tuple[Index, ...]) -> Stmt:
        env = dict(zip(outer, place, strict=True))
        cut = [tuple(map(known_int, part)) for part in pieces(printer, [store.value], column)]
        return builder.seq(*[piece(env, start, extent) for start, extent in cut])

    return builder.fused([v.extent for v in outer], row, kind if outer else "serial")
