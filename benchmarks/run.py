"""The benchmark runner: models of the zoo on several backends, checked first and then timed against each other.

    python -m benchmarks.run --models resnet50,bert_base --backends eager,hybrid,inductor --batch 1,8 --out results.json

Each backend runs in a process of its own; rounds are interleaved. Figures are milliseconds of one call: the median of the
rounds' medians, and the distance between their quartiles as spread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, table
from benchmarks.models import ZOO
from benchmarks.worker import BACKENDS, Prepared, Task, serve

# OpenMP's threads spin for a while after work: the next process starts once those of the last one sleep.
_PAUSE_S = 0.02
# Longest wait for a compilation or a round: a backend that hangs is a result, too.
_DEADLINE_S = 1200.0
_NOTHING = Prepared(0.0, float("nan"), "")


def _listed(legal: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in legal]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown) or 'nothing named'}; legal: {', '.join(legal)}"
            )
        return names

    return parse


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", type=_listed(list(ZOO)), default=list(ZOO), help="names, comma separated; default: all"
    )
    parser.add_argument("--backends", type=_listed(list(BACKENDS)), default=list(BACKENDS), help="default: all")
    parser.add_argument(
        "--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8], help="default: 1,8"
    )
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--rounds", type=int, default=7, choices=range(1, 1000), metavar="N")
    parser.add_argument("--round-s", type=float, default=0.5, help="seconds of one round of one backend")
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads; default: torch's")
    parser.add_argument("--out", type=Path, help="JSON file to write; written after every model")
    return parser.parse_args(argv)


@dataclass(slots=True)
class _Runner:
    """Owns one worker process and its connection; `error` is why it takes no further part, or empty."""

    process: BaseProcess
    connection: Connection
    prepared: Prepared = _NOTHING
    error: str = ""
    samples_ms: list[float] = field(default_factory=list)

    def receive(self) -> Any:
        """The worker's next message, or None, with `error` set, where it died or took too long."""
        try:
            if self.connection.poll(_DEADLINE_S):
                return self.connection.recv()
            self.process.kill()
            self.error = f"no answer within {_DEADLINE_S:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join()
            self.error = f"the process ended with exit code {self.process.exitcode}"
        return None

    def send(self, message: str | None) -> None:
        """Ask for a round, or, with None, to end; that the worker is gone shows in `receive`."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(message)


def _start(task: Task, round_s: float, threads: int) -> _Runner:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_worker, args=(theirs, task, round_s, threads), daemon=False)
    process.start()
    theirs.close()
    return _Runner(process, ours)


def _worker(connection: Connection, task: Task, round_s: float, threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    serve(connection, task, round_s)


def compare(tasks: Sequence[Task], rounds: int, round_s: float, threads: int) -> list[dict[str, object]]:
    """One result per task: `tasks` are one model and batch on several backends. A process that dies is a result too."""
    runners: list[_Runner] = []
    try:
        # One after the other: compilers would otherwise share the cores, and compile times mean nothing.
        for task in tasks:
            runner = _start(task, round_s, threads)
            runners.append(runner)
            runner.prepared = runner.receive() or _NOTHING
            runner.error = runner.error or runner.prepared.error
        for _ in range(rounds):
            for runner in runners:
                if runner.error:
                    continue
                time.sleep(_PAUSE_S)
                runner.send("round")
                median_us = runner.receive()
                if median_us is not None:
                    runner.samples_ms.append(median_us / 1e3)
    finally:
        for runner in runners:
            runner.send(None)
            runner.process.join()
    return [_result(task, runner) for task, runner in zip(tasks, runners, strict=True)]


def _result(task: Task, runner: _Runner) -> dict[str, object]:
    result: dict[str, object] = {"model": task.model, "batch": task.batch, "backend": task.backend, "size": task.size}
    if runner.error:
        return result | {"error": runner.error}
    samples = runner.samples_ms
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (samples[0],) * 3
    return result | {
        "median_ms": round(statistics.median(samples), 4),
        "spread_ms": round(third - first, 4),
        "rounds": len(samples),
        "compile_s": round(runner.prepared.compile_s, 2),
        "max_error": runner.prepared.max_error,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the file. Returns 1 where a backend gave wrong results or failed."""
    arguments = _arguments(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {"machine": machine.describe(), "size": arguments.size, "results": []}
    for name in arguments.models:
        for batch in arguments.batch:
            print(f"{ZOO[name].title}, batch {batch} ...", file=sys.stderr, flush=True)
            tasks = [Task(name, arguments.size, batch, backend) for backend in arguments.backends]
            record["results"] += compare(tasks, arguments.rounds, arguments.round_s, arguments.threads)
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table.markdown(record))
    failed = [result for result in record["results"] if "error" in result]
    for result in failed:
        print(f"{result['model']}, batch {result['batch']}, {result['backend']}: {result['error']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
