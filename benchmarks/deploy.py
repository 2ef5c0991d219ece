"""Saved models side by side: how soon a new process answers, how fast it goes on, how much memory each further process takes.

    python -m benchmarks.deploy --models resnet50,mobilenet_v2,bert_base --out build/deploy.json

The formats: `.hybrid` files, in Python and in the runner; AOTInductor's packages (.pt2); OpenVINO's models with its cache of compiled ones;
ONNX Runtime's optimised models. Every figure but that of a steady call is of new processes, a format after the other, several times; files are
in the page cache. A steady call is also timed beside the live plan, in one process and in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ("hybrid", "aotinductor", "openvino", "onnxruntime")
_RUNNER = ROOT / "torch_hybrid_backend" / "runner" / "hybrid-run"


def main(argv: Sequence[str] | None = None) -> int:
    """Export the models, measure, write the file after each model, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="resnet50,mobilenet_v2,bert_base,minilm")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "deploy.json")
    arguments = parser.parse_args(argv)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    from benchmarks import machine

    record: dict[str, Any] = {"machine": machine.describe(), "revision": machine.revision(), "results": []}
    for model in arguments.models.split(","):
        for form in arguments.formats.split(","):
            record["results"].append(_measured(model, form, arguments))
            arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(report(record))
    return 0


def report(record: dict[str, Any]) -> str:
    """A row for each model and format."""
    columns = {
        "file_mb": "file, MB",
        "import_s": "imports, s",
        "answer_s": "load and first answer, s",
        "process_s": "whole process, s",
        "runner_s": "runner, whole process, s",
        "call_ms": "steady call, ms",
        "live_ratio": "over the live plan",
        "compiled_ratio": "over torch.compile",
        "private_mib": "memory of a further process, MiB",
    }
    lines = ["| model | format | " + " | ".join(columns.values()) + " |", "|---|---" + "|---:" * len(columns) + "|"]
    for result in record["results"]:
        if "gap" in result:
            lines.append(f"| {result['model']} | {result['format']} | {result['gap']}{' |' * len(columns)}")
            continue
        cells = [f"{result[name]:.3g}" if result.get(name) is not None else "-" for name in columns]
        lines.append(f"| {result['model']} | {result['format']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _measured(model: str, form: str, arguments: argparse.Namespace) -> dict[str, Any]:
    folder = ROOT / "build" / "deploy" / f"{model}-{arguments.size}"
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"model": model, "format": form}
    given = ["--model", model, "--size", arguments.size, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}

    def child(task: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.deploy_process", task, form, *given]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        spent = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["it was killed"])[-1][:200])
        return {**json.loads(done.stdout.splitlines()[-1]), "process_s": spent}

    try:
        result.update(child("save"))
        # Memory is that of a further process: what all of them share is there already.
        command = [sys.executable, "-m", "benchmarks.deploy_process", "answer", form, *given, "--hold"]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as first:
            assert first.stdout is not None
            first.stdout.readline()
            runs = [child("answer") for _ in range(arguments.processes)]
            first.communicate()
        result.update({name: statistics.median(run[name] for run in runs) for name in runs[0]})
        result.update({name: value for name, value in child("steady").items() if name != "process_s"})
        if form == "hybrid":
            command = [str(_RUNNER), str(folder / "model.hybrid"), "--threads", str(arguments.threads)]
            result["runner_s"] = statistics.median(_seconds(command, environment) for _ in range(arguments.processes))
    except RuntimeError as error:
        result["gap"] = str(error)
    return result


def _seconds(command: Sequence[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr.strip()[:200]}")
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
