"""Operator benchmarks: every schedule against oneDNN, ATen and inductor, over the shapes of the zoo's models.

    python -m benchmarks.operators --only conv --models resnet50 --batch 1
    python -m benchmarks.operators --only norm softmax --inductor --out results.json

Each operator runs with nothing behind it, with relu, and with a residual addition and relu, on all sides in turn (interleaved rounds
in one process). Results are compared with ATen's before anything is timed. "peak" is the share of what the machine's measured ceilings
allow for its arithmetic and its least traffic (benchmarks.roofline); "best other / ours" is above 1 where we are faster. The second table
adds up, model by model, the time lost to the best other side.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, roofline
from benchmarks.models import ZOO
from benchmarks.operators.ours import EPILOGUES, Bench, Problem, problem
from benchmarks.operators.peers import peers
from benchmarks.operators.shapes import KINDS, Case, load
from benchmarks.operators.work import level, work
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.tvm.assemble import RegionKernels
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.measure import measure
from torch_hybrid_backend.store import Store

# Largest difference from ATen in float32, relative to the largest value; sums of thousands of terms in another order, Winograd.
_TOLERANCE = 2e-3
# What operators with an epilogue are: those that a model fuses one into.
_FUSED = ("conv", "grouped", "depthwise", "linear")
_BATCH_SIZE = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One operator: microseconds by side, or why there are none."""

    case: Case
    epilogue: str
    microseconds: dict[str, float]
    flops: float
    size_bytes: float
    peak_share: float
    error: str = ""

    @property
    def best_other(self) -> tuple[str, float]:
        """The fastest side beside ours, and its time."""
        return min(((k, us) for k, us in self.microseconds.items() if k != "ours"), key=lambda item: item[1])

    @property
    def ratio(self) -> float:
        """Best other / ours."""
        return self.best_other[1] / self.microseconds["ours"]

    def row(self) -> dict[str, Any]:
        """The result as JSON."""
        found: dict[str, Any] = {"kind": self.case.kind, "operator": self.case.title, "batch": self.case.batch}
        found |= {"epilogue": self.epilogue, "counts": dict(self.case.counts)}
        if self.error:
            return found | {"error": self.error}
        found |= {"flops": self.flops, "bytes": self.size_bytes, "peak_share": round(self.peak_share, 3)}
        return found | {"us": {side: round(us, 2) for side, us in self.microseconds.items()}}


def run(
    cases: Sequence[Case], epilogues: Sequence[str], bench: Bench, *, budget_s: float, inductor: bool, warm_only: bool
) -> list[Result]:
    """Compile, check and time. `budget_s`: of one operator, all sides together."""
    wanted = [(c, e) for c in cases for e in (epilogues if c.kind in _FUSED else ("none",))]
    ceiling = None if warm_only else roofline.known_peak(torch.get_num_threads())
    results: list[Result] = []
    for start in range(0, len(wanted), _BATCH_SIZE):
        some = [problem(case, epilogue) for case, epilogue in wanted[start : start + _BATCH_SIZE]]
        assembled = [_assembled(bench, made) for made in some]
        bench.compile([a for a in assembled if isinstance(a, RegionKernels)])
        if ceiling is None:
            print(f"{start + len(some)} of {len(wanted)} compiled", file=sys.stderr)
            continue
        for made, kernels in zip(some, assembled, strict=True):
            results.append(_measured(bench, made, kernels, ceiling, budget_s, inductor=inductor))
    return results


def _assembled(bench: Bench, made: Problem) -> RegionKernels | str:
    try:
        return bench.kernels(made)
    except Exception as error:  # an operator that has no kernel is a result
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _measured(
    bench: Bench, made: Problem, kernels: RegionKernels | str, peak: roofline.Peak, budget_s: float, *, inductor: bool
) -> Result:
    case = made.case
    flops, size_bytes = work(case)
    nothing = Result(case, made.epilogue, {}, flops, size_bytes, 0.0)
    if isinstance(kernels, str):
        return dataclasses.replace(nothing, error=kernels)
    try:
        ours = bench.ours(made, kernels)
        expected, result = made.eager()(), ours.result()
    except (HybridError, RuntimeError, IndexError) as error:
        return dataclasses.replace(nothing, error=f"{type(error).__name__}: {error}".splitlines()[0])
    scale = max(1.0, expected.abs().max().item()) if expected.dtype.is_floating_point and expected.numel() else 1.0
    if not torch.allclose(result, expected, atol=_TOLERANCE * scale, rtol=0.0, equal_nan=True):
        return dataclasses.replace(nothing, error="the result differs from ATen's")
    sides = {"ours": ours.run, **peers(made, inductor=inductor)}
    timings = measure(list(sides.values()), budget_s, min_rounds=5, max_rounds=2000, warmup_rounds=2)
    us = {side: timing.median_us for side, timing in zip(sides, timings, strict=True)}
    least = peak.seconds(flops, size_bytes, level(size_bytes / peak.threads, bench.target))
    return Result(case, made.epilogue, us, flops, size_bytes, least / (us["ours"] / 1e6))


def table(results: Sequence[Result]) -> str:
    """One line an operator, in Markdown."""
    sides = [s for s in ("aten", "onednn", "inductor") if any(s in r.microseconds for r in results)]
    lines = ["| kind | operator | epilogue | ours, us | rate | peak | " + " | ".join(sides) + " | best other / ours |"]
    lines.append("|---" * (7 + len(sides)) + "|")
    for r in results:
        if r.error:
            lines.append(f"| {r.case.kind} | {r.case.title} | {r.epilogue} | {r.error} |" + " |" * (3 + len(sides)))
            continue
        us = r.microseconds["ours"]
        rate = f"{r.flops / us / 1e3:.0f} GFLOP/s" if r.flops else f"{r.size_bytes / us / 1e3:.1f} GB/s"
        others = " | ".join(f"{r.microseconds[s]:.1f}" if s in r.microseconds else "-" for s in sides)
        name, _ = r.best_other
        lines.append(
            f"| {r.case.kind} | {r.case.title} | {r.epilogue} | {us:.1f} | {rate} | {r.peak_share:.0%} | {others} "
            f"| {r.ratio:.2f} ({name}) |"
        )
    return "\n".join(lines)


def losses(results: Sequence[Result], models: Sequence[str]) -> str:
    """Time lost to the best other side in one call of each model, largest first.

    An operator that models run with several epilogues is counted with the mean over them.
    """
    by_case: dict[tuple[Any, ...], list[Result]] = {}
    for r in results:
        if not r.error:
            by_case.setdefault((r.case.kind, r.case.title, r.case.batch), []).append(r)
    rows = []
    for (kind, title, batch), some in by_case.items():
        lost = sum(r.microseconds["ours"] - r.best_other[1] for r in some) / len(some)
        ours = sum(r.microseconds["ours"] for r in some) / len(some)
        for model, count in some[0].case.counts:
            if model in models and lost > 0:
                rows.append((lost * count, count, lost / ours, model, batch, kind, title, some[0].best_other[0]))
    rows.sort(key=lambda row: -row[0])
    lines = ["| lost, us a call | model | batch | kind | operator | count | share lost | to |", "|---" * 8 + "|"]
    for total, count, share, model, batch, kind, title, other in rows:
        lines.append(f"| {total:.0f} | {model} | {batch} | {kind} | {title} | {count} | {share:.0%} | {other} |")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="MODEL")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--epilogues", nargs="+", choices=EPILOGUES, default=list(EPILOGUES))
    parser.add_argument("--match", default="", help="only operators whose title contains this")
    parser.add_argument("--inductor", action="store_true", help="compile with inductor too, where it generates code")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's")
    parser.add_argument("--budget-s", type=float, default=0.1, help="seconds for one operator, all sides together")
    parser.add_argument("--warm", action="store_true", help="compile into the cache (HYBRID_CACHE_DIR), time nothing")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args(argv)


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The table's cases that the command line asks for."""
    models = set(arguments.models)
    return [
        case
        for case in load()
        if case.kind in arguments.only
        and case.batch in arguments.batch
        and models & {model for model, _ in case.counts}
        and arguments.match in case.title
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the tables, write the file. Returns 1 where an operator failed."""
    arguments = _arguments(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    config = Config.from_env(os.environ)
    limit_bytes = config.cache_limit_mib << 20
    bench = Bench(Store.open(config.cache_dir, enabled=config.cache, strict=config.strict, limit_bytes=limit_bytes))
    with torch.no_grad():
        results = run(
            chosen(arguments),
            arguments.epilogues,
            bench,
            budget_s=arguments.budget_s,
            inductor=arguments.inductor,
            warm_only=arguments.warm,
        )
    if arguments.warm:
        return 0
    print(table(results), losses(results, arguments.models), sep="\n\n")
    if arguments.out:
        machine.write_record(arguments.out, results=[r.row() for r in results])
    return 1 if any(r.error for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
