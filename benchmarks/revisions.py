"""Two revisions of this package side by side: did a change cost speed, compile time or memory?

    git worktree add ../before v0.1 && (cd ../before && python setup.py build_ext --inplace)
    python -m benchmarks.revisions ../before --models resnet50,bert_base --batch 1,8 --out build/revisions.json

Every model runs in two processes at a time, one of each tree, timed in turns. A ratio is the old revision's figure over this one's: above 1
this one is better. Of calls it is the median over rounds, so that a machine which drifts changes both sides alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.catalogue import MODELS
from benchmarks.compare import ZooWork
from benchmarks.overhead import Overhead
from torch_hybrid_backend.bench.peers import FLOAT32, OURS, PRECISIONS, by_name
from torch_hybrid_backend.bench.process import ROOT, WorkerError, WorkerProcess, wait_until_quiet
from torch_hybrid_backend.bench.worker import Account, Prepare, Reference, Round, environment
from torch_hybrid_backend.progress import Progress

_TIMEOUT_S = 900.0
_FIGURES = ("call", "compile_cold_s", "compile_warm_s", "preparing_mib", "running_mib")
_DEFAULT = ("resnet50", "mobilenet_v2", "bert_base", "vit_b16", "efficientnet_b0", "convnext_tiny", "gpt2", "unet")


def compared(model: str, batch: int, trees: Sequence[Path], arguments: argparse.Namespace, log: Path) -> dict[str, Any]:
    """The figures of one model at one batch size: each a list of two, the old tree's and the new one's, and for calls the ratio too."""
    with tempfile.TemporaryDirectory(prefix="revisions-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        work = ZooWork(
            model=model,
            size=arguments.size,
            batch=batch,
            threads=arguments.threads,
            folder=folder,
            precision=arguments.precision,
        )

        def variables(cache: str) -> dict[str, str]:
            return environment(arguments.threads, folder / cache) | work.variables

        def start(cache: str, tree: Path) -> WorkerProcess:
            return stack.enter_context(WorkerProcess(variables(cache), log, tree))

        with WorkerProcess(variables("reference"), log) as worker:
            worker.ask(Reference(work), _TIMEOUT_S)
        result: dict[str, Any] = {"model": model, "batch": batch, **{figure: [[], []] for figure in _FIGURES[1:]}}
        for attempt in range(arguments.compilations):
            for side, tree in enumerate(trees):
                for figure in ("compile_cold_s", "compile_warm_s"):  # the second process finds the cache of the first
                    with WorkerProcess(variables(f"{side}{attempt}"), log, tree) as worker:
                        ready = worker.ask(Prepare(work, by_name()[OURS], folder / "files"), _TIMEOUT_S)
                        if ready.error:
                            raise WorkerError(f"{tree}: {ready.error}")
                        result[figure][side].append(ready.compile_s)
        workers = [start(f"{side}{arguments.compilations - 1}", tree) for side, tree in enumerate(trees)]
        for worker in workers:
            worker.ask(Prepare(work, by_name()[OURS], folder / "files"), _TIMEOUT_S)
        medians: list[tuple[float, float]] = []
        for index in range(arguments.rounds):
            found = [0.0, 0.0]
            for side in (0, 1) if index % 2 else (1, 0):
                wait_until_quiet(workers)
                timed = workers[side].ask(Round(arguments.seconds / arguments.rounds / 2), _TIMEOUT_S)
                found[side] = statistics.median(timed.nanoseconds) / 1e6
            medians.append((found[0], found[1]))
        for side, worker in enumerate(workers):
            account = worker.ask(Account(), _TIMEOUT_S)
            for figure in ("preparing_mib", "running_mib"):
                result[figure][side] = account[figure]
    for figure in ("compile_cold_s", "compile_warm_s"):
        result[figure] = [min(seconds) for seconds in result[figure]]
    result["call_ms"] = [statistics.median(side) for side in zip(*medians, strict=True)]
    result["call"] = statistics.median(old / new for old, new in medians)
    return result


def overhead(trees: Sequence[Path], arguments: argparse.Namespace, log: Path) -> list[float]:
    """Microseconds of a call of ten operators on four numbers, of either tree: the least of several processes in turn."""
    found: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory(prefix="revisions-") as name:
        for _ in range(arguments.processes):
            for side, tree in enumerate(trees):
                folder = Path(name) / str(side)
                with WorkerProcess(environment(arguments.threads, folder), log, tree) as worker:
                    answer = worker.ask(Overhead(by_name()[OURS], arguments.threads, folder / "files"), _TIMEOUT_S)
                    found[side].append(answer["call_us"])
    return [min(side) for side in found]


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Old over new, by figure."""
    return {f: result[f] if f == "call" else result[f][0] / result[f][1] for f in _FIGURES}


def report(record: dict[str, Any]) -> str:
    """A row per model and batch, and the geometric means."""
    lines = ["| model | batch | old ms | new ms | " + " | ".join(f"{f}, old / new" for f in _FIGURES) + " |"]
    lines.append("|---" + "|---:" * (3 + len(_FIGURES)) + "|")
    for result in record["results"]:
        cells = [f"{value:.3f}" for value in (*result["call_ms"], *ratios(result).values())]
        lines.append(f"| {MODELS[result['model']].title} | {result['batch']} | " + " | ".join(cells) + " |")
    if record["results"]:
        means = [
            math.exp(statistics.mean(math.log(ratios(result)[figure]) for result in record["results"]))
            for figure in _FIGURES
        ]
        lines.append("| geometric mean | | | | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    if "overhead_us" in record:
        old, new = record["overhead_us"]
        lines.append(f"\nTen operators on four numbers: {old:.2f} us, now {new:.2f} us ({old / new:.3f}).")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the file after each row, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path, help="the source tree of the old revision, its runtime built")
    parser.add_argument("--models", default=",".join(_DEFAULT), help=f"default: {','.join(_DEFAULT)}")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--precision", choices=PRECISIONS, default=FLOAT32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=20.0, help="timing of one row, both revisions together")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compilations", type=int, default=2, help="cold and warm ones of each; the fastest count")
    parser.add_argument("--processes", type=int, default=3, help="for the cost of a call")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "revisions.json")
    arguments = parser.parse_args(argv)
    trees = (arguments.tree.resolve(), ROOT)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    log = arguments.out.with_suffix(".log")
    rows = [(model, int(batch)) for model in arguments.models.split(",") for batch in arguments.batch.split(",")]
    record: dict[str, Any] = {"machine": machine.describe(), "new": machine.revision(), "results": []}
    with Progress("revisions", len(rows) + 1) as progress:
        record["overhead_us"] = overhead(trees, arguments, log)
        progress.step()
        for model, batch in rows:
            progress.at(f"{model}, batch {batch}")
            record["results"].append(compared(model, batch, trees, arguments, log))
            arguments.out.write_text(json.dumps(record, indent=2) + "\n")
            progress.step()
    print(report(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
