"""Leaks of a process that lives long: resident memory over many calls, training steps and recompilations.

    python -m benchmarks.leaks                                  # all scenarios, at the numbers a release is judged by
    python -m benchmarks.leaks --scenarios reset --count 200    # some of them, or fewer repetitions
    python -m benchmarks.leaks --backend aot_eager              # what torch itself leaves behind, to compare with

Each scenario runs in a process of its own. Memory is read after a garbage collection and after the allocator gave back
what it could, at `SAMPLES` evenly spaced moments; the first half of the run is warm-up. The slope is the least-squares fit
through the second half. Figures are MiB and bytes per repetition.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import machine
from benchmarks.networks import SmallCnn, SmallTransformer

SAMPLES = 40
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes over one scenario: after its first repetition, half-way, at the end, at most; and the second
    half's slope in bytes per repetition."""

    first: int
    middle: int
    last: int
    highest: int
    bytes_per_repetition: float


def resident_bytes() -> int:
    """This process's resident memory now, after a collection and after free heap pages went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def watch(repeat: Callable[[int], object], count: int) -> Memory:
    """Call `repeat(0) .. repeat(count - 1)` and watch resident memory. `count` is at least 4."""
    repeat(0)
    at: list[int] = [0]
    seen: list[int] = [resident_bytes()]
    every = max(1, count // SAMPLES)
    for number in range(1, count):
        repeat(number)
        if number % every == 0 or number == count - 1:
            at.append(number)
            seen.append(resident_bytes())
    half = len(at) // 2
    slope = _slope(at[half:], seen[half:])
    return Memory(seen[0], seen[half], seen[-1], max(seen), slope)


def _slope(xs: Sequence[int], ys: Sequence[int]) -> float:
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def _calls(backend: str) -> Callable[[int], object]:
    """Calls of one compiled model, without gradients, each on a tensor of its own."""
    model = SmallCnn().eval()
    compiled = torch.compile(model, backend=backend)
    images = torch.randn(2, 3, 16, 16)

    def repeat(_: int) -> None:
        with torch.no_grad():
            compiled(images + 0)

    return repeat


def _steps(backend: str) -> Callable[[int], object]:
    """Training steps of one compiled model."""
    model = SmallTransformer().train()
    compiled = torch.compile(model, backend=backend)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens, targets = torch.randint(0, 100, (4, 12)), torch.randint(0, 10, (4,))

    def repeat(_: int) -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(compiled(tokens), targets).backward()
        optimiser.step()

    return repeat


def _weights(backend: str) -> Callable[[int], object]:
    """Calls of one compiled model whose weights changed: everything folded and packed is made anew each time."""
    model = SmallCnn().eval()
    compiled = torch.compile(model, backend=backend)
    images = torch.randn(2, 3, 16, 16)

    def repeat(_: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0)
            compiled(images)

    return repeat


def _reset(backend: str) -> Callable[[int], object]:
    """Recompilations of a new instance of one model, forward and backward, after `torch.compiler.reset()`; its
    kernels are known."""
    images = torch.randn(2, 3, 16, 16)

    def repeat(_: int) -> None:
        torch.compiler.reset()
        model = SmallCnn()
        torch.compile(model, backend=backend)(images).sum().backward()

    return repeat


def _fresh(backend: str) -> Callable[[int], object]:
    """Recompilations of a function that is new each time, as are its kernels: a constant differs."""
    x = torch.randn(64, 64)

    def repeat(number: int) -> None:
        torch.compiler.reset()

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x * (1 + number / 1024), dim=-1) + number

        torch.compile(function, backend=backend)(x)

    return repeat


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario of repetitions: the work, how often by default, and how much memory one repetition may keep at most (bytes): `make`
    returns one repetition, given the backend."""

    make: Callable[[str], Callable[[int], object]]
    count: int


SCENARIOS: dict[str, Scenario] = {
    "calls": Scenario(_calls, 100_000),
    "steps": Scenario(_steps, 10_000),
    "weights": Scenario(_weights, 10_000),
    "reset": Scenario(_reset, 1_000),
    "fresh": Scenario(_fresh, 1_000),
}


def run(name: str, count: int, backend: str) -> Memory:
    """Run one scenario in a process of its own. Raises RuntimeError where that process fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, name, count, backend))
    process.start()
    theirs.close()
    try:
        memory: Memory = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the scenario {name} failed: exit status {process.exitcode}") from None
    process.join()
    return memory


def _serve(connection: Connection, name: str, count: int, backend: str) -> None:
    torch.manual_seed(0)
    os.environ.setdefault("HYBRID_PLACEMENT", "estimate")  # eager would win some of these small models, on some days
    connection.send(watch(SCENARIOS[name].make(backend), count))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenarios and print a table; `--out` also keeps them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaks", description=__doc__.splitlines()[0])
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="names, comma separated; default: all")
    parser.add_argument("--count", type=int, help="repetitions; default: the scenario's own")
    parser.add_argument("--backend", default="hybrid")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    names = [name.strip() for name in arguments.scenarios.split(",") if name.strip()]
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenario {unknown[0]!r}; legal: {', '.join(SCENARIOS)}")
    scenarios: dict[str, Any] = {}
    print("| scenario | repetitions | first | half-way | last | highest | bytes per repetition |")
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    for name in names:
        count = max(4, arguments.count or SCENARIOS[name].count)
        memory = run(name, count, arguments.backend)
        scenarios[name] = {"repetitions": count, **asdict(memory)}
        figures = (memory.first, memory.middle, memory.last, memory.highest)
        cells = (name, str(count), *(f"{value / _MIB:.1f}" for value in figures), f"{memory.bytes_per_repetition:.0f}")
        print("| " + " | ".join(cells) + " |", flush=True)
        if arguments.out:
            machine.write_record(arguments.out, backend=arguments.backend, scenarios=scenarios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
