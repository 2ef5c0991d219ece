"""The benchmark for a machine with a GPU.

    python3 -m benchmarks.gpu --out build/bench-gpu                       # 540 seconds, from the beginning
    python3 -m benchmarks.gpu --out build/bench-gpu --resume              # go on with the rows that are missing
    python3 -m benchmarks.gpu --out DIR --rows models/resnet50,kernels    # those whose names begin so
    python3 -m benchmarks.gpu --out DIR --device cpu --size small         # try the benchmark itself, where there is no GPU
    PYTHONPATH=~/site python3 -m benchmarks.gpu --out DIR --tensorrt      # models on TensorRT, Triton, both, Torch-TensorRT, inductor

It needs torch, Triton and a C++ compiler; no TVM, no network, no pip. Each row has a process and a time limit of its own, is checked against
eager, and is in DIR/gpu.json before the next one begins; DIR/gpu.md has it as text, DIR/gpu.log what the processes said. Times are of calls in
a loop: what the slower of host and device takes. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, results
from benchmarks.gpu import device as on
from benchmarks.gpu import kernels, tensorrt
from benchmarks.gpu.report import report
from benchmarks.gpu.rows import Row, rows, tensorrt_rows
from benchmarks.results import Record
from torch_hybrid_backend.bench.machine import today
from torch_hybrid_backend.bench.process import ROOT, WorkerError, WorkerProcess
from torch_hybrid_backend.bench.worker import environment

_VERSIONS = ("torch", "triton", "numpy", "transformers", "torch-hybrid-backend", "apache-tvm")
_TENSORRT_VERSIONS = ("torch-tensorrt", "torch-tensorrt-rtx", "tensorrt", "tensorrt-rtx", "tensorrt_rtx_cu13")
_ANSWER_S = 5.0  # that a question is waited for at least
_RESERVE_S = 45.0  # of a row's time, for the others where a peer takes all of it


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what there is time for and print it. Returns 0, or 1 without a device, without the C++ extension, or where a row of ours has no
    figure; 2 for a record of another machine."""
    arguments = _parser().parse_args(argv)
    start = time.monotonic()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.gpu: there is no GPU that this torch can use (torch.cuda.is_available()); --device cpu --size small"
            " tries the benchmark itself",
            file=sys.stderr,
        )
        return 1
    try:
        _build_runtime()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"benchmarks.gpu: the C++ extension is missing and cannot be built: {error}", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / ("gpu-tensorrt.json" if arguments.tensorrt else "gpu.json")
    versions = machine.versions(_VERSIONS + _TENSORRT_VERSIONS * arguments.tensorrt)
    about = machine.describe() | {"versions": versions} | on.describe(arguments.device)
    settings = {"size": arguments.size, "hybrid": machine.hybrid_settings()}
    record: Record = {"machine": about, "settings": settings, "results": [], "kernels": [], "gaps": {}, "done": []}
    if arguments.resume:
        try:
            record = results.resumed(path, record)
        except ValueError as error:
            print(f"benchmarks.gpu: {error}", file=sys.stderr)
            return 2
    every = tensorrt_rows() if arguments.tensorrt else rows()
    picked = [row for row in every if row.part == tensorrt.PART or row.name.startswith(tuple(arguments.rows))]
    wanted = [row for row in picked if row.name not in record["done"]]
    runner = _Runner(record, arguments)
    with contextlib.suppress(KeyboardInterrupt):
        for number, row in enumerate(wanted):
            left = arguments.budget - (time.monotonic() - start)
            if row.mode == tensorrt.PART and "gap" in record.get("tensorrt", {}):
                print(
                    f"TensorRT does not run here, and nothing else is measured: {record['tensorrt']['gap']}", flush=True
                )
                break
            if left < row.least_s:
                print(f"{len(wanted) - number} rows are left: --resume", flush=True)
                break
            runner.run(row, min(row.limit_s, left), wanted[number + 1] if number + 1 < len(wanted) else None)
            results.write(path, record)
            path.with_suffix(".md").write_text(report(record) + "\n")
    runner.end()
    print(report(record))
    print(f"\n{path}")
    ours = [entry for entry in (*record["kernels"], *record["results"]) if entry["peer"] == results.OURS]
    return int(bool(record["gaps"]) or any("gap" in entry for entry in ours))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the record; it is made where it is missing")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds in all; default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="leave out the rows that the record has")
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=[""],
        help="beginnings of names, comma separated; default: all",
    )
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=list(dict.fromkeys(p.split()[0] for p in tensorrt.PEERS))
    )
    parser.add_argument("--tensorrt", action="store_true", help="TensorRT's rows, in a record of their own")
    parser.add_argument("--seconds", type=float, default=2.0, help="timing of one row; default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    return parser


def _build_runtime() -> None:
    """Take the C++ extension that lies there, or build it."""
    if not (ROOT / "torch_hybrid_backend" / "_runtime.so").exists():
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)


class _Runner:
    """Measures rows into a record. Owns the workers: while one measures, the next one starts."""

    def __init__(self, record: Record, arguments: argparse.Namespace) -> None:
        self._record = record
        self._arguments = arguments
        self._log: Path = arguments.out / "gpu.log"
        self._worker: WorkerProcess | None = None
        self._next: WorkerProcess | None = None
        self._end = 0.0

    def run(self, row: Row, limit_s: float, following: Row | None) -> None:
        """Measure one row in at most `limit_s` seconds. What it gives no figure for is in the record with the reason; it is done unless it was
        to have more time than that, and used up what it had."""
        start = time.monotonic()
        self._end = start + limit_s
        print(f"{row.name} ...", end=" ", flush=True)
        self._record["gaps"].pop(row.name, None)
        try:
            if row.part == "tests":
                self._record["tests"] = self._tests(limit_s)
            else:
                self._worker, self._next = self._next or self._started(), self._started() if following else None
                self._measure(row)
        except WorkerError as error:
            self._record["gaps"][row.name] = str(error)
        finally:
            self._end_worker()
        was_cut = limit_s < row.limit_s and time.monotonic() >= self._end
        if not was_cut:  # else --resume gives it the time that it was to have
            self._record["done"].append(row.name)
        print(f"{time.monotonic() - start:.0f} s {self._record['gaps'].get(row.name, '')}", flush=True)

    def end(self) -> None:
        """End the processes."""
        self._end_worker()
        self._worker, self._next = self._next, None
        self._end_worker()

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _started(self) -> WorkerProcess:
        return WorkerProcess(environment(torch.get_num_threads(), self._arguments.out / "cache"), self._log)

    def _ask(self, message: object, reserve_s: float = 0.0) -> Any:
        """The worker's answer, in what is left of the row's time but for a reserve."""
        self._worker = self._worker or self._started()
        return self._worker.ask(message, max(_ANSWER_S, self._end - time.monotonic() - reserve_s))

    def _measure(self, row: Row) -> None:
        from benchmarks.gpu import work  # imports inductor

        device, size, seconds = self._arguments.device, self._arguments.size, self._arguments.seconds
        peers = tuple(peer for peer in row.peers if peer.partition(" ")[0] in self._arguments.peers)
        match row.part:
            case "rooflines":
                self._record["rooflines"] = self._ask(work.Rooflines(device, size, seconds))
            case tensorrt.PART:
                self._record["tensorrt"] = probe = self._ask(tensorrt.Probe(device))
                if "gap" in probe:
                    self._record["gaps"][row.name] = probe["gap"]
            case "overhead":
                self._record["host"] = self._ask(work.HostOverhead(device))
            case "kernels":
                ceilings = self._record.get("rooflines", {})
                for case in (case for case in kernels.CASES if case.kind == row.case):
                    message = work.KernelRow(case.name, peers, row.dtype, device, size, ceilings, seconds)
                    try:
                        self._keep("kernels", self._ask(message))
                    except WorkerError as error:  # which costs no more than this one
                        self._end_worker()
                        self._record["gaps"][row.name] = f"{case.name}: {error}"
            case "models":
                self._keep("results", self._model(row, peers))

    def _model(self, row: Row, peers: Sequence[str]) -> list[dict[str, Any]]:
        """The results of one model. Where a peer takes the process down, or too long, the others are measured in another one."""
        from benchmarks.gpu import work

        title = " ".join(filter(None, (row.case, row.dtype, row.mode)))
        identity = {"model": title, "batch": row.batch, "revision": machine.revision(), "day": today()}
        found: dict[str, dict[str, Any]] = {peer: identity | {"peer": peer.partition(" ")[0]} for peer in peers}
        build = work.Build(row.case, row.batch, row.dtype, self._arguments.device, self._arguments.size)
        alive = list(peers)
        while alive:
            culprits = alive
            try:
                self._ask(build)
                for peer in list(alive):
                    culprits = [peer]
                    found[peer] |= self._ask(work.PreparePeer(peer), reserve_s=_RESERVE_S)
                culprits = alive
                for peer, figures in self._ask(work.TimePeers(self._arguments.seconds)).items():
                    found[peer] |= figures
                break
            except WorkerError as error:
                self._end_worker()
                for peer in culprits:
                    found[peer]["gap"] = str(error)
                alive = [peer for peer in alive if peer not in culprits]
        for peer in filter(tensorrt.builds, alive):
            found[peer] |= self._warm_start(build, peer)
        return list(found.values())

    def _warm_start(self, build: object, peer: str) -> dict[str, Any]:
        """In a process of its own, which finds what the one before left on disk."""
        self._end_worker()
        try:
            self._ask(build)
            return dict(self._ask(tensorrt.WarmStart(peer)))
        except WorkerError as error:
            return {"warm_gap": str(error)}

    def _keep(self, part: str, found: Sequence[dict[str, Any]]) -> None:
        """Add the results of one kernel or model, in place of those that there are."""
        row = found[0]["model"], found[0]["batch"]
        self._record[part] = results.replaced({"results": self._record[part]}, row, found)["results"]

    def _tests(self, limit_s: float) -> dict[str, Any]:
        """The tests marked `gpu`: how many passed, failed and were skipped."""
        files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
        with self._log.open("ab") as log:
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    timeout=limit_s,
                    check=False,
                    env={**os.environ},
                )
            except subprocess.TimeoutExpired as error:
                raise WorkerError(f"not done within {limit_s:.0f} s") from error
            log.write(done.stdout)
        counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout.decode())}
        if not counts:
            raise WorkerError(f"pytest ended with exit code {done.returncode}")
        if counts.get("failed") or counts.get("error"):
            self._record["gaps"]["tests"] = f"{counts}: see {self._log.name}"
        return counts


if __name__ == "__main__":
    sys.exit(main())
