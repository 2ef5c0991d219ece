"""Stores of one vector, with bfloat16 rounded by one instruction where the processor has it.

    stored_vector(printer, target, kernel.stores, 16, env_of_lane, set_accumulator)

In a vectorised loop rounding is integer arithmetic, nine instructions for a vector of 16. Where the lanes of a store are neighbours in memory,
its values go to an array of float32 that stays in a register, and behind the loop AVX512-BF16 rounds them all. It takes denormal numbers for 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirBuffer
from torch_hybrid_backend.engines.cpu.tir.printer import Env, Printer
from torch_hybrid_backend.engines.cpu.tir.x86 import rounded_vector
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.loops.layout import contiguous

_LANES = 16
_LANE = LoopVar("lane", _LANES)


def stored_vector(
    printer: Printer,
    target: Target,
    stores: Sequence[Store],
    width: int,
    env: Callable[[Index], Env],
    begin: Callable[[Index], None],
) -> Stmt:
    """The stores of `width` lanes.

    `env(lane)` gives the kernel's variables; `begin(lane)` tells the printer what kernel-local buffers hold there.
    """
    b = printer.builder
    in_loop: list[Store] = []
    behind: list[tuple[TirBuffer, Stmt]] = []
    for store in stores:
        start, at = (printer.offset(store.buffer, store.index, env(lane)) for lane in (as_index(0), index_of(_LANE)))
        has_instruction = width == _LANES and target.isa.rounds_to_bfloat16
        if store.buffer.dtype != "bfloat16" or not has_instruction or at - start != index_of(_LANE):
            in_loop.append(store)
            continue
        array, exact = b.local(_LANES, "float32", "exact"), Buffer((_LANES,), "float32", "exact")
        printer.arguments = {**printer.arguments, exact: (array, contiguous((_LANES,)))}
        in_loop.append(Store(exact, (index_of(_LANE),), store.value))
        out, _ = printer.arguments[store.buffer]
        rounded = rounded_vector(b, b.load_vector(array, 0, _LANES))
        behind.append((array, b.store_vector(out, start, rounded, _LANES)))

    def lane_stores(lane: Index) -> Stmt:
        begin(lane)
        return printer.stores(in_loop, {**env(lane), _LANE: lane})

    loop = printer.vector_loop(width, lane_stores)
    return b.seq(*[b.alloc(array) for array, _ in behind], loop, *[after for _, after in behind])
