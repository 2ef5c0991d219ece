"""The machine's ceilings for every number of threads, as `torch_hybrid_backend.engines.cpu.ceilings` measures them.

python -m benchmarks.roofline                    all thread counts; writes benchmarks/results/<machine>/roofline.json
python -m benchmarks.roofline --threads 2
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine
from torch_hybrid_backend.engines.cpu import ceilings
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.ceilings import PATTERNS, PRODUCTS, Peak
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

RESULTS = Path(__file__).parent / "results"


@functools.cache
def peak(threads: int) -> Peak:
    """The ceilings of this machine for so many threads, measured now: about ten seconds."""
    return ceilings.peak(ProgramRunner, threads)


def read_gbytes(threads: int) -> float:
    """GB/s at which so many threads read memory together, measured now."""
    return ceilings.read_gbytes(ProgramRunner, threads)


def path() -> Path:
    """The path where this machine's ceilings are kept."""
    return RESULTS / machine.slug() / "roofline.json"


def known_peak(threads: int) -> Peak:
    """The ceilings from this machine's file, measured where it has none."""
    try:
        kept = json.loads(path().read_text())["peaks"]
    except FileNotFoundError:
        kept = []
    return next((Peak(**entry) for entry in kept if entry["threads"] == threads), None) or peak(threads)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, action="append", help="default: 1 to the number of cores")
    parser.add_argument("--out", type=Path, default=path())
    arguments = parser.parse_args(argv)
    peaks = [peak(threads) for threads in arguments.threads or range(1, TvmBackend().target.cores + 1)]
    columns = [
        "threads",
        "GFLOP/s",
        *peaks[0].products,
        *(f"{level} {p}" for level in peaks[0].gbytes for p in PATTERNS),
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for found in peaks:
        operations = [found.gflops, *found.products.values()]
        rates = [f"{found.gbytes[level][p]:.1f}" for level in found.gbytes for p in PATTERNS]
        print(f"| {found.threads} | {' | '.join([*(f'{rate:.0f}' for rate in operations), *rates])} |")
    for instruction in PRODUCTS.keys() - peaks[0].products.keys():
        print(f"{instruction}: not measured, for this machine lacks it or forbids it")
    machine.write_record(arguments.out, unit="GB/s", peaks=[asdict(found) for found in peaks])
    return 0


if __name__ == "__main__":
    sys.exit(main())
