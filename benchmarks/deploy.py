"""Saved models side by side: how soon a new process answers, how fast it goes on, how much memory each further process takes.

    python -m benchmarks.deploy --models resnet50,mobilenet_v2,bert_base --out build/deploy.json

Models of the catalogue by `torch_hybrid_backend.bench.files`, as `hybrid bench model.hybrid` measures one: `.hybrid` files, in Python and in
the runner; AOTInductor's packages (.pt2); OpenVINO's models with its cache of compiled ones; ONNX Runtime's optimised models. A file's steady
call is also timed beside the live plan and the compiled module, in one process and in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.compare import ZooWork
from benchmarks.deploy_live import BesideLive, Export
from benchmarks.models import Size
from torch_hybrid_backend.bench import files
from torch_hybrid_backend.bench.process import WorkerError, WorkerProcess
from torch_hybrid_backend.bench.saving import missing
from torch_hybrid_backend.bench.worker import environment

ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 3.0
_COLUMNS = {
    "file_mb": "file, MB",
    "import_s": "imports, s",
    "answer_s": "load and first answer, s",
    "process_s": "whole process, s",
    "call_ms": "steady call, ms",
    "live_ratio": "over the live plan",
    "compiled_ratio": "over torch.compile",
    "private_mib": "memory of a further process, MiB",
    "error": "error",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Export the models, measure, write the file after each model, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="resnet50,mobilenet_v2,bert_base,minilm")
    parser.add_argument("--formats", default=",".join(files.OTHERS), help=f"beside ours, of {', '.join(files.OTHERS)}")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "deploy.json")
    given = parser.parse_args(argv)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    effort = files.Effort(given.threads, given.processes, seconds=_SECONDS * (1 + len(given.formats.split(","))))
    record: dict[str, Any] = {"machine": machine.describe(), "revision": machine.revision(), "results": []}
    for model in given.models.split(","):
        record["results"] += _measured(model, given.size, given.formats.split(","), effort)
        given.out.write_text(json.dumps(record, indent=2) + "\n")
    print(report(record))
    return 0


def report(record: dict[str, Any]) -> str:
    """A row for each model and format."""
    lines = ["| model | format | " + " | ".join(_COLUMNS.values()) + " |", "|---|---" + "|---:" * len(_COLUMNS) + "|"]
    for result in record["results"]:
        if "gap" in result:
            lines.append(f"| {result['model']} | {result['format']} | {result['gap']}{' |' * len(_COLUMNS)}")
            continue
        cells = [f"{result[name]:.3g}" if result.get(name) is not None else "-" for name in _COLUMNS]
        lines.append(f"| {result['model']} | {result['format']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _measured(model: str, size: Size, formats: Sequence[str], effort: files.Effort) -> list[dict[str, Any]]:
    folder = ROOT / "build" / "deploy" / f"{model}-{size}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file, log = folder / "model.hybrid", folder / "log"
    work = ZooWork(model=model, size=size, batch=1, threads=effort.threads, folder=folder)
    with WorkerProcess(environment(effort.threads, folder) | work.variables, log) as worker:
        worker.ask(Export(work, file), effort.timeout_s)
    gaps = {form: why for form in formats if (why := missing(form))}
    found = files.compare(file, {form: work for form in formats if form not in gaps}, folder, effort, log)
    with WorkerProcess(environment(effort.threads, folder) | work.variables, log) as worker:
        try:
            found[0] |= worker.ask(BesideLive(work, file), effort.timeout_s)
        except WorkerError as error:
            found[0] = {"format": files.OURS, "gap": str(error)}
    found += [{"format": form, "gap": why} for form, why in gaps.items()]
    return [{"model": model, **result} for result in found]


if __name__ == "__main__":
    sys.exit(main())
