"""Operator benchmarks: every schedule against oneDNN, MKL, ATen and inductor, over the shapes of the zoo's models.

    python -m benchmarks.operators --only conv --models resnet50 --batch 1
    python -m benchmarks.operators --only norm softmax --inductor --out results.json
    python -m benchmarks.operators --representative 6 --epilogues none relu --inductor --out operators.json

Each operator runs with nothing behind it, with relu, and with a residual addition and relu, on all sides in turn (interleaved rounds
in one process; a side that takes far longer than the fastest, apart). Results of all sides are compared with ATen's before anything
is timed. "peak" is the share of what the machine's measured ceilings allow for its arithmetic and its least traffic
(benchmarks.roofline); "best other / ours" is above 1 where we are faster. The last table adds up, model by model, the time lost to the
best other side. A long run may be cut into pieces: --stop-after-s ends one, --resume goes on; --warm compiles ahead.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, roofline
from benchmarks import results as records
from benchmarks.models import ZOO
from benchmarks.operators import tables
from benchmarks.operators.ours import EPILOGUES, Bench, Problem, problem
from benchmarks.operators.peers import peers
from benchmarks.operators.results import OURS, Key, Result
from benchmarks.operators.selection import representative
from benchmarks.operators.shapes import KINDS, Case, load
from benchmarks.operators.work import level, work
from torch_hybrid_backend.codegen.assemble import RegionKernels
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.measuring.measure import measure
from torch_hybrid_backend.storage.store import Store

# Largest difference from ATen in float32, relative to the largest value; sums of thousands of terms in another order, Winograd.
_TOLERANCE = 2e-3
# What operators with an epilogue are: those that a model fuses one into.
_FUSED = ("conv", "grouped", "depthwise", "linear")
# Times the fastest side's time from which a side is timed apart.
_FAR_SLOWER = 500.0
# Compiled together, and held in memory together: large images at batch 8 are 100 MB each.
_BATCH_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """`budget_s`: of one operator, all sides together. `warm_only`: compile, time nothing. `until_s`: on the clock of
    `time.monotonic`, after which no further operator is begun."""

    budget_s: float
    inductor: bool
    warm_only: bool
    until_s: float


def wanted(cases: Sequence[Case], epilogues: Sequence[str]) -> list[tuple[Case, str]]:
    """Each case with each epilogue; those that models fuse nothing into, alone."""
    return [(c, e) for c in cases for e in (epilogues if c.kind in _FUSED else ("none",))]


def run(todo: Sequence[tuple[Case, str]], bench: Bench, effort: Effort, out: Run) -> None:
    """Compile, check, time, and add the results to `out` one by one."""
    ceiling = None if effort.warm_only else roofline.known_peak(torch.get_num_threads())
    for start in range(0, len(todo), _BATCH_SIZE):
        if time.monotonic() > effort.until_s:
            return
        some = [problem(case, epilogue) for case, epilogue in todo[start : start + _BATCH_SIZE]]
        assembled = [_assembled(bench, made) for made in some]
        bench.compile([a for a in assembled if isinstance(a, RegionKernels)])
        for made, kernels in zip(some, assembled, strict=True):
            if time.monotonic() > effort.until_s:
                return
            if ceiling is None:
                peers(made, inductor=effort.inductor)
            else:
                out.add(_measured(bench, made, kernels, ceiling, effort))
        if ceiling is None:
            print(f"{start + len(some)} of {len(todo)} compiled", file=sys.stderr)


def _assembled(bench: Bench, made: Problem) -> RegionKernels | str:
    try:
        return bench.kernels(made)
    except Exception as error:  # an operator that has no kernel is a result
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _measured(bench: Bench, made: Problem, kernels: RegionKernels | str, peak: roofline.Peak, effort: Effort) -> Result:
    flops, size_bytes = work(made.case)
    if isinstance(kernels, str):
        return Result.of(made.case, made.epilogue, error=kernels)
    try:
        ours = bench.ours(made, kernels)
        expected, result = made.eager()(), ours.result()
    except (HybridError, RuntimeError, IndexError) as error:
        return Result.of(made.case, made.epilogue, error=f"{type(error).__name__}: {error}".splitlines()[0])
    if not _close(result, expected):
        return Result.of(made.case, made.epilogue, error="the result differs from ATen's")
    others = peers(made, inductor=effort.inductor)
    sides = {OURS: ours.run, **{side: call for side, call in others.items() if _close(call(), expected)}}
    us: dict[str, float] = {}
    for together in _of_like_speed(sides):
        timings = measure(list(together.values()), effort.budget_s, min_rounds=5, max_rounds=2000, warmup_rounds=2)
        us |= {side: timing.median_us for side, timing in zip(together, timings, strict=True)}
    least = peak.seconds(flops, size_bytes, level(size_bytes / peak.threads, bench.backend.target))
    share = least / (us[OURS] / 1e6)
    return Result.of(made.case, made.epilogue, flops=flops, size_bytes=size_bytes, peak_share=share, microseconds=us)


def _of_like_speed(sides: Mapping[str, Callable[[], object]]) -> list[dict[str, Callable[[], object]]]:
    """The sides that are timed in turn, and apart those that take far longer: while they run, the others' threads fall asleep."""
    once = {}
    for side, call in sides.items():
        start = time.perf_counter()
        call()
        once[side] = time.perf_counter() - start
    limit = _FAR_SLOWER * min(once.values())
    groups = [{s: c for s, c in sides.items() if (once[s] > limit) == slow} for slow in (False, True)]
    return [group for group in groups if group]


def _close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    scale = max(1.0, expected.abs().max().item()) if expected.dtype.is_floating_point and expected.numel() else 1.0
    return torch.allclose(result, expected, atol=_TOLERANCE * scale, rtol=0.0, equal_nan=True)


class Run:
    """The results of a run, earlier pieces included, and the file they are kept in, if any."""

    def __init__(self, settings: dict[str, Any], path: Path | None, *, resume: bool) -> None:
        """Raises ValueError where what is to be resumed was made on another machine, or with other settings."""
        fresh: records.Record = {"machine": machine.describe(), "settings": settings, "results": []}
        record = records.resumed(path, fresh) if path and resume else fresh
        self._settings, self._path = settings, path
        self.results = [Result.read(row) for row in record["results"]]

    def done(self) -> set[Key]:
        """The operators that have a result, or an error."""
        return {r.key for r in self.results}

    def add(self, result: Result) -> None:
        """Add one result; with a file, it is there when this returns."""
        self.results.append(result)
        if self._path:
            machine.write_record(self._path, settings=self._settings, results=[r.row() for r in self.results])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="MODEL")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--epilogues", nargs="+", choices=EPILOGUES, default=list(EPILOGUES))
    parser.add_argument(
        "--representative",
        type=int,
        default=0,
        metavar="N",
        help="of each kind and batch size only the N operators with most of the models' work; 0: all",
    )
    parser.add_argument("--match", default="", help="only operators whose title contains this")
    parser.add_argument("--inductor", action="store_true", help="compile with inductor too, where it generates code")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's")
    parser.add_argument("--budget-s", type=float, default=0.1, help="seconds for one operator, all sides together")
    parser.add_argument("--warm", action="store_true", help="compile into the cache (HYBRID_CACHE_DIR), time nothing")
    parser.add_argument("--out", type=Path, help="JSON file to write, after each operator; beside it, Markdown")
    parser.add_argument("--resume", action="store_true", help="keep the operators that are in the file already")
    parser.add_argument("--stop-after-s", type=float, default=math.inf, help="begin no operator after so many seconds")
    return parser.parse_args(argv)


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The table's cases that the command line asks for."""
    models = set(arguments.models)
    cases = [
        case
        for case in load()
        if case.kind in arguments.only
        and case.batch in arguments.batch
        and models & {model for model, _ in case.counts}
        and arguments.match in case.title
    ]
    return representative(cases, arguments.representative) if arguments.representative else cases


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    number = arguments.representative
    rule = (
        f"Of each kind and batch size, the {number} operators with the largest share of the models' work."
        if number
        else ""
    )
    return {"threads": torch.get_num_threads(), "budget_s": arguments.budget_s, "selection": rule}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the tables, write the files. Returns 1 where an operator failed, 2 for arguments that do not go together."""
    arguments = _arguments(argv)
    until_s = time.monotonic() + arguments.stop_after_s
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        found = Run(_settings(arguments), None if arguments.warm else arguments.out, resume=arguments.resume)
    except ValueError as error:
        print(f"benchmarks.operators: {error}", file=sys.stderr)
        return 2
    config = Config.from_env(os.environ)
    limit_bytes = config.cache_limit_mib << 20
    bench = Bench(Store.open(config.cache_dir, enabled=config.cache, strict=config.strict, limit_bytes=limit_bytes))
    asked = wanted(chosen(arguments), arguments.epilogues)
    done = found.done()
    todo = [(c, e) for c, e in asked if (c.kind, c.title, c.batch, e) not in done]
    with torch.no_grad():
        run(todo, bench, Effort(arguments.budget_s, arguments.inductor, arguments.warm, until_s), found)
    if arguments.warm:
        return 0
    print(tables.by_kind(found.results), tables.table(found.results), sep="\n\n")
    print(f"\n{tables.losses(found.results, arguments.models)}")
    if arguments.out and found.results:
        tables.write(arguments.out)
    print(f"{len(found.results)} of {len(asked)} operators", file=sys.stderr)
    return 1 if any(r.error for r in found.results) else 0


if __name__ == "__main__":
    sys.exit(main())
