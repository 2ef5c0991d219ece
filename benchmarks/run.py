"""The benchmark runner: models of the zoo on several backends, checked first and then timed against each other.

    python -m benchmarks.run --models resnet50,bert_base --backends eager,hybrid,inductor --batch 1,8 --out results.json

Each backend runs in a process of its own; rounds are interleaved. Figures are milliseconds of one call: the median of the
rounds' medians, and the distance between their quartiles as spread.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
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
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-s", type=float, default=0.5, help="seconds of one round of one backend")
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads; default: torch's")
    parser.add_argument("--out", type=Path, help="JSON file to write; written after every model")
    return parser.parse_args(argv)


def _start(task: Task, round_s: float, threads: int) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_worker, args=(theirs, task, round_s, threads), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _worker(connection: Connection, task: Task, round_s: float, threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    serve(connection, task, round_s)


def compare(tasks: Sequence[Task], rounds: int, round_s: float, threads: int) -> list[dict[str, object]]:
    """One result per task: `tasks` are one model and batch on several backends. A process that dies is a result too."""
    processes: list[BaseProcess] = []
    timed: dict[int, Connection] = {}
    prepared: list[Prepared] = []
    samples: list[list[float]] = [[] for _ in tasks]
    # One after the other: compilers would otherwise share the cores, and compile times mean nothing.
    for number, task in enumerate(tasks):
        process, connection = _start(task, round_s, threads)
        processes.append(process)
        try:
            state = connection.recv()
        except EOFError:
            process.join()
            state = Prepared(0.0, float("nan"), f"the process ended with exit code {process.exitcode}")
        prepared.append(state)
        if not state.error:
            timed[number] = connection
        elif process.is_alive():
            connection.send(None)
    for _ in range(rounds):
        for number, connection in timed.items():
            time.sleep(_PAUSE_S)
            connection.send("round")
            samples[number].append(connection.recv() / 1e3)
    for connection in timed.values():
        connection.send(None)
    for process in processes:
        process.join()
    return [_result(*row) for row in zip(tasks, prepared, samples, strict=True)]


def _result(task: Task, prepared: Prepared, samples: list[float]) -> dict[str, object]:
    result: dict[str, object] = {"model": task.model, "batch": task.batch, "backend": task.backend, "size": task.size}
    if prepared.error:
        return result | {"error": prepared.error}
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (samples[0],) * 3
    return result | {
        "median_ms": round(statistics.median(samples), 4),
        "spread_ms": round(third - first, 4),
        "rounds": len(samples),
        "compile_s": round(prepared.compile_s, 2),
        "max_error": prepared.max_error,
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
