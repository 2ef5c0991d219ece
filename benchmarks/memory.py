"""Memory of a compiled model beside eager's: peak resident memory in the first call and in later ones, each in a process of its own.

    python -m benchmarks.memory                                          # models that differ, by default settings and with offload_weights
    python -m benchmarks.memory --models resnet50,bert_base --batch 8 --out benchmarks/results/<machine>/memory.json

A process builds the model, returns what building left over, and calls it. `first`: the peak up to the end of the first call. `steady`: the peak
of twenty later calls. Both are VmHWM of /proc/self/status, in MiB, with everything that the process has imported. `compilers`: the peak of all
compiler processes together, sampled during the first call. `cold` runs with an empty cache, the others with the cache that it filled. The
process in eager imports no Dynamo unless the model's own library does. `dynamo` is the backend aot_eager: what torch.compile takes by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine

MODELS = ("mobilenet_v2", "resnet50", "densenet121", "bert_base")
_MIB = 1 << 20
_CALLS = 20
# name -> backend, whether the cache is filled, settings
_WAYS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "eager": ("", {}),
    "dynamo": ("aot_eager", {}),
    "hybrid, cold": ("hybrid", {}),
    "hybrid": ("hybrid", {}),
    "hybrid, offload_weights": ("hybrid", {"HYBRID_OFFLOAD_WEIGHTS": "1"}),
}


def _status(field: str, process: str = "self") -> float:
    """A field of a process's status in MiB; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":")), 0.0)


class _Children:
    """The peak of the resident memory of all child processes together, sampled in a thread."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._is_over.wait(0.02):
            resident = sum(_status("VmRSS", child) for child in _children(os.getpid()))
            self.peak_mib = max(self.peak_mib, resident)

    def stop(self) -> float:
        self._is_over.set()
        self._thread.join()
        return self.peak_mib


def _children(parent: int) -> list[str]:
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        try:
            found += (task / "children").read_text().split()
        except OSError:
            continue
    return found


def measure(name: str, batch: int, backend: str) -> dict[str, float]:
    """Figures of this process, in MiB and seconds."""
    import torch

    from benchmarks.catalogue import MODELS as CATALOGUE

    model, inputs = CATALOGUE[name].build("full"), CATALOGUE[name].inputs("full", batch=batch)
    weights = {id(value): value.nbytes for value in (*model.parameters(), *model.buffers())}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    built = _status("VmRSS")
    children = _Children()
    with torch.no_grad():
        call = torch.compile(model, backend=backend) if backend else model
        start = time.perf_counter()
        call(*inputs)
        first_call_s = time.perf_counter() - start
        first = _status("VmHWM")
        compilers = children.stop()
        Path("/proc/self/clear_refs").write_text("5")
        for _ in range(_CALLS):
            call(*inputs)
    return {
        "weights": sum(weights.values()) / _MIB,
        "built": built,
        "first": first,
        "steady": _status("VmHWM"),
        "compilers": compilers,
        "first_call_s": first_call_s,
    }


def _run(name: str, batch: int, way: str, cache: Path) -> dict[str, Any]:
    """Figures of a model in a new process. Raises RuntimeError if that fails."""
    backend, settings = _WAYS[way]
    variables = {**os.environ, "HYBRID_CACHE_DIR": str(cache), "HYBRID_PROGRESS": "0", **settings}
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory",
        "--measure",
        name,
        "--batch",
        str(batch),
        "--backend",
        backend,
    ]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} by {way} failed: exit status {done.returncode}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"model": name, "batch": batch, "way": way, **{key: round(value, 1) for key, value in figures.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the models and print a table; `--out` also keeps the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names of benchmarks.catalogue, comma separated")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--cache", type=Path, help="folder of a cache that is filled already: no cold run; default: an empty one"
    )
    parser.add_argument("--measure", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.batch, arguments.backend)))
        return 0
    rows: list[dict[str, Any]] = []
    print("| model | by | weights | first call | steady | first / eager | steady / eager | compilers | first call, s |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            cache = arguments.cache or Path(folder)
            for way in _WAYS:
                if way == "hybrid, cold" and arguments.cache:
                    continue
                row = _run(name, arguments.batch, way, cache)
                eager = row if way == "eager" else next(r for r in rows if r["model"] == name and r["way"] == "eager")
                peak = max(eager["first"], eager["steady"])
                row |= {key + "_ratio": round(row[key] / peak, 3) for key in ("first", "steady")}
                rows.append(row)
                figures = [f"{row[key]:.0f}" for key in ("weights", "first", "steady")]
                figures += [f"{row['first_ratio']:.2f}", f"{row['steady_ratio']:.2f}"]
                figures += [f"{row['compilers']:.0f}", f"{row['first_call_s']:.1f}"]
                print("| " + " | ".join((name, way, *figures)) + " |", flush=True)
                if arguments.out:
                    machine.write_record(arguments.out, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
