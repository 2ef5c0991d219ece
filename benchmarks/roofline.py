"""The machine's ceilings, measured by kernels of our own on PyTorch's threads: what no kernel can exceed (Williams et al., "Roofline", 2009).

    python -m benchmarks.roofline                    all thread counts; writes benchmarks/results/<machine>/roofline.json
    python -m benchmarks.roofline --threads 2

float32 multiply-add: independent accumulators in registers, as many as gives most (the latency of one instruction must be hidden).
Bandwidth: each thread runs over memory of its own, half a cache large ("L3": four times level 2), or larger than all caches. "copy"
counts what is read and what is written (the STREAM convention: lines fetched only to be overwritten are not counted).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.program import Kernel, Program
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.measure import measure
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

RESULTS = Path(__file__).parent / "results"
# Independent chains tried: two units of latency 4 need 8, and 16 registers (AVX2) hold 14 beside the operands.
_CHAINS = (8, 10, 12, 14, 16, 20, 24)
# Memory is measured over this many bytes a thread: beyond the share in a last-level cache that one core gets anywhere.
_MEMORY_BYTES = 256 << 20
# Work of one call: a millisecond or more, beside which waking threads costs nothing.
_FMA_STEPS, _CACHE_BYTES = 400_000, 64 << 20
PATTERNS = ("read", "write", "copy")


@dataclass(frozen=True, slots=True)
class Peak:
    """The ceilings of `threads` threads together: float32 GFLOP/s, and GB/s by level ("L1", "L2", "L3", "memory") and
    pattern."""

    threads: int
    gflops: float
    gbytes: dict[str, dict[str, float]] = field(hash=False)

    def seconds(self, flops: float, size_bytes: float, level: str = "memory") -> float:
        """The least time that arithmetic and traffic (half read, half written at most) can take."""
        return max(flops / (self.gflops * 1e9), size_bytes / (max(self.gbytes[level].values()) * 1e9))


class _Compiled:
    """A hand-written TIR kernel on PyTorch's threads. Owns the folder its library lies in."""

    def __init__(self, spans: Sequence[int], emit: Callable[[Any, list[Any]], Any]) -> None:
        from torch_hybrid_backend.engines.tvm.target import tvm_target
        from torch_hybrid_backend.engines.tvm.tir.builder import Builder, argument, prim_func
        from torch_hybrid_backend.engines.tvm.tir.linker import link
        from torch_hybrid_backend.engines.tvm.tir.pipeline import build

        arrays = [argument(span, "float32", f"arg{i}") for i, span in enumerate(spans)]
        function = prim_func("ceiling", arrays, emit(Builder(), arrays))
        self._folder = tempfile.TemporaryDirectory(prefix="roofline-")
        library = Path(self._folder.name) / "ceiling.so"
        built = build("ceiling", function, tvm_target(_target()))
        built.write_to_file(str(library.with_suffix(".o")), "o")
        link(library.with_suffix(".o"), library)
        specs = tuple(TensorSpec((span,), "float32", (1,), CPU) for span in spans)
        numbers = tuple(range(len(spans)))
        call = Kernel(str(library), "ceiling", numbers, 1)
        # What it writes is an input too: fresh memory would cost a page fault every 4 KiB.
        self._run = ProgramRunner(Program(specs, numbers, (), (), (call,)))
        self._inputs = [torch.ones(span) for span in spans]

    def __call__(self) -> None:
        self._run(self._inputs)


def _fma(threads: int, lanes: int, chains: int) -> _Compiled:
    """Each thread: `_FMA_STEPS` times acc[c] = acc[c] * x + y for every chain c."""
    from tvm import tirx

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
                over(lambda lane, c: b.store(accumulators, lane + c * lanes, tirx.const(0.5, "float32"))),
                b.loop(_FMA_STEPS, lambda _: over(step)),
                over(
                    lambda lane, c: b.store(
                        result, t * (chains * lanes) + lane + c * lanes, b.load(accumulators, lane + c * lanes)
                    )
                ),
            )

        return b.loop(threads, thread, "parallel")

    return _Compiled([2 * lanes, threads * chains * lanes], emit)


def _stream(pattern: str, threads: int, lanes: int, elements: int, repeats: int) -> _Compiled:
    """Each thread: `repeats` times over `elements` floats of its own, read, written or copied (half of them each)."""
    from tvm import tirx

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
                number = tirx.Cast("float32", b.index(repeat))
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

            clear = each(lambda at: b.store(sums, at, tirx.const(0.5, "float32")))
            flush = each(lambda at: b.store(result, t * width + at, b.load(sums, at))) if pattern == "read" else None
            return b.seq(b.alloc(sums), clear, b.loop(repeats, sweep), flush)

        return b.loop(threads, thread, "parallel")

    read, written = (1 if pattern == "write" else threads * count), (threads * (width if pattern == "read" else count))
    return _Compiled([max(read, 1), written], emit)


@functools.cache
def peak(threads: int) -> Peak:
    """The ceilings of this machine for `threads` threads, measured now: about ten seconds. Sets torch's thread count meanwhile."""
    target = _target()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernels = [_fma(threads, target.lanes, chains) for chains in _CHAINS]
        best = _best(kernels)
        work = [2.0 * threads * target.lanes * chains * _FMA_STEPS for chains in _CHAINS]
        gflops = max(flops / us / 1e3 for flops, us in zip(work, best, strict=True))
        levels = {
            "L1": target.l1_bytes // 2,
            "L2": target.l2_bytes // 2,
            "L3": 4 * target.l2_bytes,
            "memory": _MEMORY_BYTES,
        }
        gbytes = {level: _bandwidths(threads, target.lanes, size) for level, size in levels.items()}
    finally:
        torch.set_num_threads(before)
    return Peak(threads, gflops, gbytes)


def _bandwidths(threads: int, lanes: int, size_bytes: int) -> dict[str, float]:
    repeats = max(1, _CACHE_BYTES // size_bytes)
    found = {}
    for pattern in PATTERNS:
        (us,) = _best([_stream(pattern, threads, lanes, size_bytes // 4, repeats)])
        found[pattern] = threads * size_bytes * repeats / us / 1e3
    return found


def _best(kernels: Sequence[_Compiled]) -> list[float]:
    """The fastest call of each, microseconds: a ceiling is what was reached once."""
    best = [math.inf] * len(kernels)
    for _ in range(5):
        for i, timing in enumerate(measure(kernels, 0.03 * len(kernels), max_rounds=20)):
            best[i] = min(best[i], timing.median_us)
    return best


def path() -> Path:
    """Where this machine's ceilings are kept."""
    return RESULTS / machine.slug() / "roofline.json"


def known_peak(threads: int) -> Peak:
    """The ceilings from this machine's file, measured where it has none."""
    try:
        kept = json.loads(path().read_text())["peaks"]
    except FileNotFoundError:
        kept = []
    return next((Peak(**entry) for entry in kept if entry["threads"] == threads), None) or peak(threads)


def _target() -> Target:
    return Target.host().within(torch.backends.cpu.get_cpu_capability())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, action="append", help="default: 1 to the number of cores")
    parser.add_argument("--out", type=Path, default=path())
    arguments = parser.parse_args(argv)
    peaks = [peak(threads) for threads in arguments.threads or range(1, _target().cores + 1)]
    print("| threads | GFLOP/s | " + " | ".join(f"{level} {p}" for level in peaks[0].gbytes for p in PATTERNS) + " |")
    print("|---|---|" + "---|" * (len(PATTERNS) * len(peaks[0].gbytes)))
    for found in peaks:
        rates = [f"{found.gbytes[level][p]:.1f}" for level in found.gbytes for p in PATTERNS]
        print(f"| {found.threads} | {found.gflops:.0f} | {' | '.join(rates)} |")
    machine.write_record(arguments.out, unit="GB/s", peaks=[asdict(found) for found in peaks])
    return 0


if __name__ == "__main__":
    sys.exit(main())
