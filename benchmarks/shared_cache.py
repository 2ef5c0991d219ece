"""The second user of a shared cache beside a warm start: seconds until the first answer, and compilations.

    python -m benchmarks.shared_cache --models resnet50,bert_base --processes 3

A first process fills a cache, which is pushed, signed. Then new processes take turns: one whose own cache is filled, and those whose own is
empty, behind a folder that is private, a folder that others can write (signatures are verified), and an HTTP server on this machine.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks import machine
from torch_hybrid_backend.storage.shared import location_of, push
from torch_hybrid_backend.storage.store import Store

ROOT = Path(__file__).resolve().parents[1]
_WARM = "warm start"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each model, write the file, print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shared_cache", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", default="resnet50,bert_base")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--processes", type=int, default=5, help="of each kind")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "shared_cache.json")
    parser.add_argument("--answer", metavar="MODEL", help=argparse.SUPPRESS)  # the work of one process
    given = parser.parse_args(argv)
    if given.answer:
        print(json.dumps(_answer(given.answer, given.size)))
        return 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": machine.describe(), "revision": machine.revision(), "results": []}
    for model in given.models.split(","):
        record["results"] += _measured(model, given.size, given.processes)
        given.out.write_text(json.dumps(record, indent=2) + "\n")
    print(report(record))
    return 0


def report(record: Mapping[str, Any]) -> str:
    """A row for each model and place of the cache: medians, and how many times as long as a warm start."""
    lines = [
        "| model | cache | compilations | first call, s | over a warm start | whole process, s | over a warm start |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    warm: dict[str, tuple[float, float]] = {}
    for result in record["results"]:
        call, process = (statistics.median(run[figure] for run in result["runs"]) for figure in ("call_s", "process_s"))
        base = warm.setdefault(result["model"], (call, process))  # the warm start comes first
        compiled = max(run["compiled"] for run in result["runs"])
        cells = f"{compiled} | {call:.3f} | {call / base[0]:.2f} | {process:.2f} | {process / base[1]:.2f}"
        lines.append(f"| {result['model']} | {result['cache']} | {cells} |")
    return "\n".join(lines)


def _measured(model: str, size: str, processes: int) -> list[dict[str, Any]]:
    key = Ed25519PrivateKey.generate()
    keys = {"HYBRID_CACHE_KEYS": key.public_key().public_bytes_raw().hex()}
    with tempfile.TemporaryDirectory(prefix="shared-cache-") as name:
        folder = Path(name)
        for _ in range(2):  # times that were taken beside other load are taken again by the second process
            _started(model, size, folder / "first", {})
        for place in ("private", "public"):
            push(Store(folder / "first"), location_of(str(folder / place)), key)
        (folder / "public").chmod(0o777)
        handler = functools.partial(_Handler, directory=str(folder / "public"))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            settings = {
                _WARM: {},
                "private folder": {"HYBRID_CACHE_SHARED": str(folder / "private")},
                "signed folder": {"HYBRID_CACHE_SHARED": str(folder / "public"), **keys},
                "signed URL": {"HYBRID_CACHE_SHARED": f"http://127.0.0.1:{server.server_port}", **keys},
            }
            runs: dict[str, list[dict[str, Any]]] = {place: [] for place in settings}
            for number in range(processes):
                for place, variables in settings.items():
                    cache = folder / ("first" if place == _WARM else f"{place} {number}")
                    runs[place].append(_started(model, size, cache, variables))
            server.shutdown()
    return [{"model": model, "cache": place, "runs": found} for place, found in runs.items()]


def _started(model: str, size: str, cache: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Run one process; return the figures of its first call, and the seconds from its start to its end."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.shared_cache", "--answer", model, "--size", size],
        cwd=ROOT,
        env={**os.environ, "HYBRID_CACHE_DIR": str(cache), "HYBRID_PROGRESS": "0", **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**told, "process_s": time.perf_counter() - begin}


def _answer(name: str, size: Any) -> dict[str, Any]:
    """Seconds of `torch.compile` with the first call, and the number of kernels that were compiled in it."""
    import torch

    from benchmarks.catalogue import MODELS
    from torch_hybrid_backend.codegen.workers.pool import KernelCompiler

    model, inputs = MODELS[name].build(size), MODELS[name].inputs(size, 1)
    jobs: list[object] = []
    compile_them = KernelCompiler.compile

    def counted(self: Any, more: Any, *rest: Any) -> Any:
        jobs.extend(more)
        return compile_them(self, more, *rest)

    KernelCompiler.compile = counted  # type: ignore[method-assign]
    begin = time.perf_counter()
    with torch.no_grad():
        torch.compile(model, backend="hybrid")(*inputs)
    return {"call_s": time.perf_counter() - begin, "compiled": len(jobs)}


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as by servers of files
    disable_nagle_algorithm = True  # as servers of files do: else each answer waits 40 ms for an acknowledgement

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    sys.exit(main())
