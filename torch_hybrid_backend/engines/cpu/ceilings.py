"""The machine's ceilings, measured by kernels of our own on PyTorch's threads: what no kernel can exceed (Williams et al., "Roofline", 2009).

float32 multiply-add: independent accumulators in registers, as many as gives most (the latency of one instruction must be hidden). The same for
products of narrower numbers, by the instructions that the processor has: vpdpbusd (8-bit integers), vpmaddubsw and vpmaddwd (the same, with
additions), vdpbf16ps (bfloat16), and AMX's.
Bandwidth: each thread runs over memory of its own, half a cache large ("L3": four times level 2), or larger than all caches. "copy"
counts what is read and what is written (the STREAM convention: lines fetched only to be overwritten are not counted).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.engine import RunProgram
from torch_hybrid_backend.core.program import KernelCall, Program
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.measuring.measure import measure

# Independent chains tried: two units of latency 4 need 8, and 16 registers (AVX2) hold 14 beside the operands.
_CHAINS = (8, 10, 12, 14, 16, 20, 24)
# Memory is measured over this many bytes a thread: beyond the share in a last-level cache that one core gets anywhere.
_MEMORY_BYTES = 256 << 20
# Work of one call: a millisecond or more, beside which waking threads costs nothing.
_FMA_STEPS, _CACHE_BYTES = 400_000, 64 << 20
PATTERNS = ("read", "write", "copy")
MEMORY = "memory"
# Of all threads together: more than last-level caches hold, less than a machine has.
_SHARED_BYTES = 2 << 30
# An instruction that multiplies narrow numbers -> the dtype that it multiplies on tiles, if it does, and multiplications and additions of one:
# of a lane, or of a tile. Those without sums of their own take another addition, vpmaddubsw first one of neighbours (`dot_products.py`).
PRODUCTS = {
    "vpdpbusd": ("", 8),
    "vpmaddubsw": ("", 8),
    "vpmaddwd": ("", 4),
    "vdpbf16ps": ("", 4),
    "tdpbusd": ("int8", 32_768),
    "tdpbf16ps": ("bfloat16", 16_384),
}
_DOTS = {
    "vpdpbusd": DotProduct("vpdpbusd", 4, "uint8", "int8", "int32"),
    "vpmaddubsw": DotProduct("vpmaddubsw", 4, "uint8", "int8", "int32"),
    "vpmaddwd": DotProduct("vpmaddwd", 2, "int16", "int16", "int32"),
    "vdpbf16ps": DotProduct("vdpbf16ps", 2, "bfloat16", "bfloat16", "float32"),
}
_TILE_STEPS = 50_000
_PLACES = 8  # that operands are read from in turn


@dataclass(frozen=True, slots=True)
class Peak:
    """The ceilings of `threads` threads together: float32 GFLOP/s, GB/s by level ("L1", "L2", "L3", "memory") and pattern, and billions of
    operations a second by those instructions of `PRODUCTS` that the processor has."""

    threads: int
    gflops: float
    gbytes: dict[str, dict[str, float]] = field(hash=False)
    products: dict[str, float] = field(default_factory=dict, hash=False)

    def rate(self, precision: str) -> float:
        """Billions of operations a second at most of a model in one of the peers' precisions; 0 where its products were not measured.

        bf16 and int8: by the fastest instruction of that kind. Where there is none, bf16 falls back to float32's multiply-adds.
        """
        products = {name: self.products.get(name, 0.0) for name in PRODUCTS}
        match precision:
            case "bf16":
                return max(self.gflops, products["vdpbf16ps"], products["tdpbf16ps"])
            case "int8" | "int8+bf16":
                return max(products["vpdpbusd"], products["vpmaddubsw"], products["vpmaddwd"], products["tdpbusd"])
            case _:
                return self.gflops

    def seconds(self, flops: float, size_bytes: float, level: str = "memory") -> float:
        """The least time that arithmetic and traffic (half read, half written at most) can take."""
        return max(flops / (self.gflops * 1e9), size_bytes / (max(self.gbytes[level].values()) * 1e9))


class _Compiled:
    """A hand-written TIR kernel on PyTorch's threads. Owns the folder its library lies in."""

    def __init__(self, run: RunProgram, spans: Sequence[int], emit: Callable[[Any, list[Any]], Any]) -> None:
        from torch_hybrid_backend.engines.cpu.target import tvm_target
        from torch_hybrid_backend.engines.cpu.tir.builder import Builder, argument, prim_func
        from torch_hybrid_backend.engines.cpu.tir.linker import link
        from torch_hybrid_backend.engines.cpu.tir.pipeline import build

        arrays = [argument(span, "float32", f"arg{i}") for i, span in enumerate(spans)]
        builder = Builder()
        body = emit(builder, arrays)
        function = prim_func("ceiling", arrays, body, builder.llvm_helpers)
        self._folder = tempfile.TemporaryDirectory(prefix="roofline-")
        library = Path(self._folder.name) / "ceiling.so"
        built = build("ceiling", function, tvm_target(_target()))
        built.write_to_file(str(library.with_suffix(".o")), "o")
        link(library.with_suffix(".o"), library)
        specs = tuple(TensorSpec((span,), "float32", (1,), CPU) for span in spans)
        numbers = tuple(range(len(spans)))
        call = KernelCall(str(library), "ceiling", numbers, 1)
        # What it writes is an input too: fresh memory would cost a page fault every 4 KiB.
        self._run = run(Program(specs, numbers, (), (), (call,)))
        self._inputs = [torch.ones(span) for span in spans]

    def __call__(self) -> None:
        self._run(self._inputs)


def _fma(run: RunProgram, threads: int, lanes: int, chains: int) -> _Compiled:
    """Each thread: `_FMA_STEPS` times acc[c] = acc[c] * x + y for every chain c."""
    from torch_hybrid_backend.engines.cpu.tir import expressions as tir

    def emit(b: Any, arrays: list[Any]) -> Any:
        operands, result = arrays

        def thread(t: Index) -> Any:
            accumulators, factor, term = (b.local(size * lanes, "float32") for size in (chains, 1, 1))

            def over(body: Callable[[Index, int], Any]) -> Any:
                return b.seq(*(b.loop(lanes, lambda lane, c=c: body(lane, c), "vectorized") for c in range(chains)))

            def step(lane: Index, c: int) -> Any:
                at = lane + c * lanes
                product = b.load(accumulators, at) * b.load(factor, lane)
                return b.store(accumulators, at, product + b.load(term, lane))

            return b.seq(
                *(b.alloc(buffer) for buffer in (accumulators, factor, term)),
                b.loop(lanes, lambda lane: b.store(factor, lane, b.load(operands, lane)), "vectorized"),
                b.loop(lanes, lambda lane: b.store(term, lane, b.load(operands, lane + lanes)), "vectorized"),
                over(lambda lane, c: b.store(accumulators, lane + c * lanes, tir.const(0.5, "float32"))),
                b.loop(_FMA_STEPS, lambda _: over(step)),
                over(
                    lambda lane, c: b.store(
                        result, t * (chains * lanes) + lane + c * lanes, b.load(accumulators, lane + c * lanes)
                    )
                ),
            )

        return b.loop(threads, thread, "parallel")

    return _Compiled(run, [2 * lanes, threads * chains * lanes], emit)


def _vector_products(run: RunProgram, instruction: str, threads: int, chains: int) -> _Compiled:
    """Each thread: `_FMA_STEPS` times acc[c] += products of x and y by an instruction on whole vectors, for every chain c, from zero.

    x and y are in registers, or y is read for every product, from another place in every step, where sums are another instruction: LLVM must
    not multiply once for all.
    """
    from torch_hybrid_backend.engines.cpu.tir import expressions as tir
    from torch_hybrid_backend.engines.cpu.tir.dot import dot_product

    dot, lanes = _DOTS[instruction], _target().lanes
    reads = dot.registers > 0  # it makes no sums itself

    def emit(b: Any, arrays: list[Any]) -> Any:
        operands, result = arrays
        right = {"int8": f"int8x{lanes * 4}", "int16": f"int16x{lanes * 2}"}.get(dot.right, f"int32x{lanes}")

        def thread(t: Index) -> Any:
            accumulators, words = b.local(chains * lanes, dot.sums), b.local(2 * lanes, "int32")

            def each(value: Callable[[int], Any]) -> Any:
                return b.seq(*(b.store_vector(accumulators, c * lanes, value(c), lanes) for c in range(chains)))

            def added(step: Index) -> Callable[[int], Any]:
                def of(c: int) -> Any:
                    total, x = b.load_vector(accumulators, c * lanes, lanes), b.load_vector(words, 0, lanes)
                    place = (step % _PLACES * chains + c) * lanes
                    y = b.load_vector(operands, place, lanes) if reads else b.load_vector(words, lanes, lanes)
                    return dot_product(b, dot, lanes, total, x, tir.reinterpret(y, right))

                return of

            read = [
                b.store_vector(words, at, tir.reinterpret(b.load_vector(operands, at, lanes), f"int32x{lanes}"), lanes)
                for at in (0, lanes)
            ]
            written = [
                b.store_vector(
                    result,
                    t * (chains * lanes) + c * lanes,
                    tir.reinterpret(b.load_vector(accumulators, c * lanes, lanes), f"float32x{lanes}"),
                    lanes,
                )
                for c in range(chains)
            ]
            return b.seq(
                b.alloc(accumulators),
                b.alloc(words),
                *read,
                each(lambda _: tir.const(0, f"{dot.sums}x{lanes}")),
                b.loop(_FMA_STEPS, lambda step: each(added(step))),
                *written,
            )

        return b.loop(threads, thread, "parallel")

    return _Compiled(run, [_PLACES * chains * lanes, threads * chains * lanes], emit)


def _tile_products(run: RunProgram, instruction: str, threads: int) -> _Compiled:
    """Each thread: `_TILE_STEPS` times four tiles of sums, from zero, by two tiles of each operand: as a kernel for AMX has them."""
    from torch_hybrid_backend.engines.cpu.schedules.amx import instructions

    def emit(b: Any, arrays: list[Any]) -> Any:
        operands, result = arrays

        def thread(t: Index) -> Any:
            array = instructions.configuration(b)
            step = [instructions.multiply(instruction, 2 * i + j, 4 + i, 6 + j) for i in (0, 1) for j in (0, 1)]
            return b.seq(
                b.alloc(array),
                instructions.configure(b, array),
                *(instructions.zero(tile) for tile in range(4)),
                *(instructions.load(b, tile, operands, 0, 64) for tile in range(4, 8)),
                b.loop(_TILE_STEPS, lambda _: b.seq(*step)),
                *(instructions.store(b, tile, result, (t * 4 + tile) * 256, 64) for tile in range(4)),
                instructions.release(),
            )

        return b.loop(threads, thread, "parallel")

    return _Compiled(run, [256, threads * 4 * 256], emit)


def has(instruction: str) -> bool:
    """True if this process may use an instruction of `PRODUCTS`."""
    tile, _ = PRODUCTS[instruction]
    return tile in _target().isa.tiles if tile else instruction in _target().isa.dot_products


def _products(run: RunProgram, threads: int, of_sums: str = "") -> dict[str, float]:
    """Billions of operations a second by each instruction that this processor has. `of_sums`: "bf16" or "int8", those alone."""
    found = {}
    for instruction, (tile, operations) in PRODUCTS.items():
        if not has(instruction) or (of_sums and ("bf16" in instruction) != (of_sums == "bf16")):
            continue
        if tile:
            kernels, works = [_tile_products(run, instruction, threads)], [4.0 * _TILE_STEPS]
        else:
            kernels = [_vector_products(run, instruction, threads, chains) for chains in _CHAINS]
            works = [float(chains * _FMA_STEPS * _target().lanes) for chains in _CHAINS]
        times = _best(kernels)
        found[instruction] = max(threads * operations * w / us / 1e3 for w, us in zip(works, times, strict=True))
    return found


def _stream(run: RunProgram, pattern: str, threads: int, lanes: int, elements: int, repeats: int) -> _Compiled:
    """Each thread: `repeats` times over `elements` floats of its own, read, written or copied (half of them each)."""
    from torch_hybrid_backend.engines.cpu.tir import expressions as tir

    ways = 8
    width = ways * lanes
    count = elements // (2 if pattern == "copy" else 1) // width * width

    def emit(b: Any, arrays: list[Any]) -> Any:
        source, result = arrays

        def thread(t: Index) -> Any:
            sums = b.local(width, "float32")

            def vectors(body: Callable[[Index, Index], Any]) -> Any:
                """`body(position in the vectors of one step, position in the array)`, step by step."""
                return b.loop(
                    count // width,
                    lambda v: b.seq(
                        *(
                            b.loop(
                                lanes,
                                lambda lane, w=w: body(lane + w * lanes, t * count + v * width + lane + w * lanes),
                                "vectorized",
                            )
                            for w in range(ways)
                        )
                    ),
                )

            def sweep(repeat: Index) -> Any:
                # Each sweep writes something else, and nothing that is a plain copy or fill: neither may become a library call.
                number = tir.cast(b.index(repeat), "float32")
                match pattern:
                    case "read":
                        return vectors(lambda at, p: b.store(sums, at, b.load(sums, at) + b.load(source, p)))
                    case "write":
                        return vectors(lambda at, p: b.store(result, p, b.load(sums, at) + number))
                    case _:
                        return vectors(lambda _, p: b.store(result, p, b.load(source, p) + number))

            def each(body: Callable[[Index], Any]) -> Any:
                starts = range(0, width, lanes)
                return b.seq(*(b.loop(lanes, lambda lane, s=s: body(lane + s), "vectorized") for s in starts))

            clear = each(lambda at: b.store(sums, at, tir.const(0.5, "float32")))
            flush = each(lambda at: b.store(result, t * width + at, b.load(sums, at))) if pattern == "read" else None
            return b.seq(b.alloc(sums), clear, b.loop(repeats, sweep), flush)

        return b.loop(threads, thread, "parallel")

    read, written = (1 if pattern == "write" else threads * count), (threads * (width if pattern == "read" else count))
    return _Compiled(run, [max(read, 1), written], emit)


def rates(run: RunProgram, threads: int, names: Sequence[str]) -> dict[str, float]:
    """Highest rates of torch's threads, which must be `threads`, by name, measured now: about a second each.

    Billions of operations a second for "float32", "bfloat16" and "int8", billions of bytes that are read for MEMORY; nothing for what is not
    known of this processor.
    """
    found = {}
    if {"float32", "bfloat16"} & set(names):
        found["float32"] = _float32_gflops(run, threads)
    if "bfloat16" in names:
        found["bfloat16"] = Peak(threads, found["float32"], {}, _products(run, threads, "bf16")).rate("bf16")
    if "int8" in names:
        found["int8"] = Peak(threads, 0.0, {}, _products(run, threads, "int8")).rate("int8")
    if MEMORY in names:
        found[MEMORY] = read_gbytes(run, threads, min(_MEMORY_BYTES, max(_SHARED_BYTES // threads, 32 << 20)))
    return {name: rate for name, rate in found.items() if rate}


def _float32_gflops(run: RunProgram, threads: int) -> float:
    lanes = _target().lanes
    best = _best([_fma(run, threads, lanes, chains) for chains in _CHAINS])
    work = [2.0 * threads * lanes * chains * _FMA_STEPS for chains in _CHAINS]
    return max(flops / us / 1e3 for flops, us in zip(work, best, strict=True))


def peak(run: RunProgram, threads: int) -> Peak:
    """The ceilings of this machine for `threads` threads, measured now: about ten seconds. Sets torch's thread count meanwhile."""
    target = _target()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gflops = _float32_gflops(run, threads)
        levels = {
            "L1": target.l1_bytes // 2,
            "L2": target.l2_bytes // 2,
            "L3": 4 * target.l2_bytes,
            MEMORY: _MEMORY_BYTES,
        }
        gbytes = {level: _bandwidths(run, threads, target.lanes, size) for level, size in levels.items()}
        products = _products(run, threads)
    finally:
        torch.set_num_threads(before)
    return Peak(threads, gflops, gbytes, products)


def _bandwidths(run: RunProgram, threads: int, lanes: int, size_bytes: int) -> dict[str, float]:
    repeats = max(1, _CACHE_BYTES // size_bytes)
    found = {}
    for pattern in PATTERNS:
        (us,) = _best([_stream(run, pattern, threads, lanes, size_bytes // 4, repeats)])
        found[pattern] = threads * size_bytes * repeats / us / 1e3
    return found


def read_gbytes(run: RunProgram, threads: int, size_bytes: int = _MEMORY_BYTES) -> float:
    """GB/s at which so many of PyTorch's threads read memory together, `size_bytes` each, measured now."""
    (us,) = _best([_stream(run, "read", threads, _target().lanes, size_bytes // 4, 1)])
    return threads * size_bytes / us / 1e3


def _best(kernels: Sequence[_Compiled]) -> list[float]:
    """The fastest call of each, microseconds: a ceiling is what was reached once."""
    best = [math.inf] * len(kernels)
    for _ in range(5):
        for i, timing in enumerate(measure(kernels, 0.03 * len(kernels), max_rounds=20)):
            best[i] = min(best[i], timing.median_us)
    return best


def _target() -> Target:
    return TvmBackend().target
