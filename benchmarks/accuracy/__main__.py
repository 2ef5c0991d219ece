"""Accuracy after a change of the model, beside float32 in eager.

    python -m benchmarks.accuracy --precision bf16 int8
    python -m benchmarks.accuracy --tasks docstrings --precision clusters-16 --out accuracy.json

Tasks: "docstrings" (MiniLM's real weights), "resnet50" and "mobilenet_v2" (layouts trained on scikit-learn's digits), "llama" (a small one,
trained on the standard library's sources). Training takes some minutes in all, once. Besides precisions `--precision` takes calibrated
quantisation and compression. Accuracies are percent, and their differences points; perplexities are per byte, and their differences percent.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.accuracy import digits, docstrings, sources
from benchmarks.accuracy.changes import CHANGES
from benchmarks.accuracy.task import Task
from benchmarks.models import Size
from benchmarks.table import RESULTS

TASKS = (
    Task("docstrings", "MiniLM, packages of docstrings", "accuracy", docstrings.prepare),
    Task("resnet50", "ResNet-50, digits", "accuracy", functools.partial(digits.prepare, "resnet50")),
    Task("mobilenet_v2", "MobileNetV2, digits", "accuracy", functools.partial(digits.prepare, "mobilenet_v2")),
    Task("llama", "small Llama, Python sources", "perplexity", sources.prepare),
)


def rows(task: Task, changes: Sequence[str], size: Size) -> list[dict[str, Any]]:
    """A row for each change, all beside one score of float32 in eager."""
    prepared = task.prepare(size)
    reference = prepared.score(prepared.model)
    found = []
    for change in changes:
        start = time.perf_counter()
        score = prepared.score(CHANGES[change](prepared))
        row = {"task": task.name, "measure": task.measure, "precision": change, "float32": reference, "score": score}
        seconds = round(time.perf_counter() - start, 1)
        found.append(row | {"difference": task.difference(score, reference), "seconds": seconds})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", nargs="+", choices=list(CHANGES), default=["bf16", "int8"], metavar="CHANGE")
    parser.add_argument(
        "--tasks", nargs="+", choices=[task.name for task in TASKS], default=[task.name for task in TASKS]
    )
    parser.add_argument(
        "--size", choices=("small", "full"), default="full", help="small: little training and data, to try it out"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / machine.slug() / "accuracy.json", metavar="FILE")
    chosen = parser.parse_args(arguments)
    every: list[dict[str, Any]] = []
    print(f"{'task':34} {'precision':26} {'float32':>9} {'score':>9} {'difference':>11}")
    for task in TASKS:
        if task.name not in chosen.tasks:
            continue
        for row in rows(task, chosen.precision, chosen.size):
            unit = "points" if task.measure == "accuracy" else "%"
            print(
                f"{task.title:34} {row['precision']:26} {row['float32']:9.3f} {row['score']:9.3f} {row['difference']:+7.3f} {unit}",
                flush=True,
            )
            every.append(row)
        machine.write_record(chosen.out, size=chosen.size, results=every)


if __name__ == "__main__":
    main()
