"""Accuracy after a change of the model, beside float32 in eager.

    python -m benchmarks.accuracy --precision bf16 int8
    python -m benchmarks.accuracy --tasks docstrings --precision clusters-16 --out accuracy.json

Tasks: "docstrings" (MiniLM's real weights), "resnet50" and "mobilenet_v2" (layouts trained on scikit-learn's digits), "llama" (a small one,
trained on the standard library's sources). Training takes some minutes in all, once. Besides precisions `--precision` takes calibrated
quantization and compression. Accuracies are percent, and their differences points; perplexities are per byte, and their differences percent.
Each difference has its standard error. Rows are written as they are found, and take the place of the same ones of a run before.
Some have a limit, the most that they may cost in full size: at the end it exits with 1 where one is exceeded.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.accuracy import digits, docstrings, sources
from benchmarks.accuracy.changes import CHANGES, DEFAULT
from benchmarks.accuracy.task import Task
from benchmarks.models import Size
from benchmarks.table import RESULTS

TASKS = (
    Task(
        "docstrings",
        "MiniLM, packages of docstrings",
        "accuracy",
        docstrings.prepare,
        {"bf16": 0.1, "int8": 0.5, "quantize-entropy": 0.5},
    ),
    Task(
        "resnet50",
        "ResNet-50, digits",
        "accuracy",
        functools.partial(digits.prepare, "resnet50"),
        {"quantize-entropy": 0.2},
    ),
    Task(
        "mobilenet_v2",
        "MobileNetV2, digits",
        "accuracy",
        functools.partial(digits.prepare, "mobilenet_v2"),
        {"quantize-entropy": 0.5},
    ),
    Task(
        "llama",
        "small Llama, Python sources",
        "perplexity",
        sources.prepare,
        {"int8-weights": 0.5, "int4-weights": 5.0},
    ),
)


def rows(task: Task, changes: Sequence[str], size: Size) -> Iterator[dict[str, Any]]:
    """A row for each change, all beside one judgement of float32 in eager."""
    prepared = task.prepare(size)
    reference = prepared.judge(prepared.model)
    for change in changes:
        start = time.perf_counter()
        items = prepared.judge(CHANGES[change](prepared))
        difference, error = task.difference(items, reference)
        yield {
            "task": task.name,
            "measure": task.measure,
            "precision": change,
            "items": len(items),
            "float32": task.score(reference),
            "score": task.score(items),
            "difference": difference,
            "standard_error": error,
            "seconds": round(time.perf_counter() - start, 1),
        }


def _kept(path: Path, size: Size) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a record of the same size, by task and change; none where there is no such record."""
    record = json.loads(path.read_text()) if path.exists() else {}
    results = record.get("results", []) if record.get("size") == size else []
    return {(row["task"], row["precision"]): row for row in results}


def _shown(task: Task, row: Mapping[str, Any], holds: bool | None) -> str:
    unit = "points" if task.measure == "accuracy" else "%"
    verdict = (
        "" if holds is None else f"  {'within' if holds else 'BEYOND'} its limit of {task.limits[row['precision']]}"
    )
    return (
        f"{task.title:34} {row['precision']:26} {row['float32']:9.3f} {row['score']:9.3f} {row['difference']:+11.3f}"
        f" {row['standard_error']:7.3f} {unit:6}{verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", nargs="+", choices=list(CHANGES), default=list(DEFAULT), metavar="CHANGE")
    parser.add_argument(
        "--tasks", nargs="+", choices=[task.name for task in TASKS], default=[task.name for task in TASKS]
    )
    parser.add_argument(
        "--size",
        choices=("small", "full"),
        default="full",
        help="small: little training and data, to try it out; no limits",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / machine.slug() / "accuracy.json", metavar="FILE")
    chosen = parser.parse_args(arguments)
    found = _kept(chosen.out, chosen.size)
    exceeded = []
    print(f"{'task':34} {'precision':26} {'float32':>9} {'score':>9} {'difference':>11} {'error':>7}")
    for task in TASKS:
        if task.name not in chosen.tasks:
            continue
        for row in rows(task, chosen.precision, chosen.size):
            holds = task.holds(row["precision"], row["difference"]) if chosen.size == "full" else None
            if holds is False:
                exceeded.append(f"{task.name} {row['precision']}")
            print(_shown(task, row, holds), flush=True)
            found[task.name, row["precision"]] = row
            machine.write_record(chosen.out, size=chosen.size, results=list(found.values()))
    if exceeded:
        sys.exit(f"beyond the limit: {', '.join(exceeded)}")


if __name__ == "__main__":
    main()
