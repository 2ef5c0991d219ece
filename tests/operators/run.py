"""Every operator and module of PyTorch's own tables through the backend, compared with eager.

    python -m tests.operators.run --out DIR                               everything: hours
    python -m tests.operators.run --out DIR --kinds float32,int64         some kinds (`tasks.KINDS`)
    python -m tests.operators.run --ops 'add|mul' --limit 4 --out DIR     some operators, some of their samples
    python -m tests.operators.run --out DIR --again wrong                 go on, and run anew what had that verdict

Each sample runs on the TVM engine, forced, and through the default backend (`execution`). `--modes interpreter` runs the lowerings through
the tests' interpreter instead, so that a fault of a lowering is told from one of a kernel; `--modes numbers` calls with numbers that are known
only at run time. Samples run in a worker process: what kills or
hangs it counts as that sample's failure. An interrupted run goes on from the journal in the folder. Exits with 1 where something failed that
`expected.py` does not list, or succeeded that it does. `python -m tests.operators.report` makes the written report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.operators.execution import ERROR, Outcome
from tests.operators.expected import surprises
from tests.operators.rows import CRASHED, HUNG, Journal, Row, outcome_from_wire
from tests.operators.tasks import KINDS, Task, tasks

ROOT = Path(__file__).parents[2]
SAMPLES_PER_WORKER = 2500  # kernels once loaded stay loaded: a worker's memory grows
BATCH = 64
MAX_CRASHES = 4  # of one task; then the rest of its samples counts as crashed


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run of tasks. `limit` samples each, or all of them where it is None; `silence_s` seconds make a worker a hanging one."""

    modes: tuple[str, ...]
    limit: int | None
    threads: int
    compilers: int
    silence_s: float


class Worker:
    """A process that runs tasks, one at a time. Owns the process and its kernel cache."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._owned = contextlib.ExitStack()
        self._samples = 0

    def run(self, task: Task) -> tuple[int, dict[int, dict[str, Outcome]]]:
        """The number of samples of a task, and the outcomes of those that were run, by number and mode.

        A sample at which the process died or was late is a failure in each mode.
        """
        results: dict[int, dict[str, Outcome]] = {}
        batch = BATCH
        crashes = 0
        while True:
            at = [-1]
            try:
                for answer in self._ask(task, sorted(results), batch):
                    if "error" in answer:
                        results[-1] = self._everywhere(ERROR, answer["error"])
                    elif "at" in answer:
                        at.append(answer["at"])
                    elif "sample" in answer:
                        number = answer["sample"]
                        results[number] = {m: outcome_from_wire(answer[m]) for m in self._settings.modes if m in answer}
                        at.append(number + 1)
                    elif "done" in answer:
                        self._samples += len(results)
                        return answer["done"], results
            except TimeoutError:
                failure = self._everywhere(HUNG, f"nothing came for {self._settings.silence_s:g} s")
            except (BrokenPipeError, EOFError):
                failure = self._everywhere(CRASHED, "the process died")
            self.stop()
            if batch > 1:  # which sample it was is found out by running them one by one
                batch = 1
                continue
            results[at[-1]] = failure
            crashes += 1
            if crashes >= MAX_CRASHES:
                return len(results), results

    def _everywhere(self, status: str, why: str) -> dict[str, Outcome]:
        return dict.fromkeys(self._settings.modes, Outcome(status, why))

    def _ask(self, task: Task, done: Sequence[int], batch: int) -> Iterator[dict[str, Any]]:
        if self._process is None or self._samples >= SAMPLES_PER_WORKER:
            self.stop()
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        order = {"subject": task.subject, "kind": task.kind, "done": done, "batch": batch}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        for line in self._lines(process):
            yield json.loads(line)
        raise EOFError

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._process = None
        self._owned.close()
        self._samples = 0

    def _start(self) -> subprocess.Popen[bytes]:
        s = self._settings
        cache = self._owned.enter_context(tempfile.TemporaryDirectory(prefix="operators-", ignore_cleanup_errors=True))
        arguments = [
            ",".join(s.modes),
            str(s.limit or 0),
            str(Path(cache) / "kernels"),
            str(s.threads),
            str(s.compilers),
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HYBRID_")}
        environment["OMP_NUM_THREADS"] = str(s.threads)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.operators.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
        )

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            pending = b""
            while True:
                if not selector.select(self._settings.silence_s):
                    raise TimeoutError
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                yield from lines


def run_tasks(left: Sequence[Task], settings: Settings, budget_s: float | None = None) -> Iterator[list[Row]]:
    """Run the tasks in order, each a row for each mode; stops early where the time budget is spent."""
    start = time.monotonic()
    worker = Worker(settings)
    try:
        for task in left:
            if budget_s is not None and time.monotonic() - start > budget_s:
                return
            available, results = worker.run(task)
            yield [
                Row.of(
                    task, mode, available, {number: found[mode] for number, found in results.items() if mode in found}
                )
                for mode in settings.modes
            ]
    finally:
        worker.stop()


def is_done(rows: Sequence[Row | None], limit: int | None, again: Collection[str]) -> bool:
    """True if a task's rows, one for each mode, are there, of enough samples, and of no verdict to be had again."""
    found = [row for row in rows if row is not None and row.verdict not in again]
    return len(found) == len(rows) and found[0].samples >= min(found[0].available, limit or found[0].available)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    wanted = tasks(re.compile(options.ops).pattern, options.kinds.split(","))
    settings = Settings(
        tuple(options.modes.split(",")), options.limit, options.threads, options.compilers, options.silence_s
    )
    journal = Journal(options.out / "journal.jsonl")
    start = time.monotonic()

    again = frozenset(options.again.split(","))
    left = [
        task
        for task in wanted
        if not is_done([journal.rows.get((task.name, mode)) for mode in settings.modes], options.limit, again)
    ]
    done = len(wanted) - len(left)
    samples = 0
    for position, rows in enumerate(run_tasks(left, settings, options.budget_s), 1):
        samples += rows[0].samples
        for row in rows:
            journal.add(row)
        _progress(rows, done + position, len(wanted), samples, time.monotonic() - start)
    names = {task.name for task in wanted}
    rows = [row for (name, mode), row in journal.rows.items() if name in names and mode in settings.modes]
    unexpected = surprises(rows, complete=options.limit is None)
    sys.stdout.write("".join(f"{line}\n" for line in unexpected))
    sys.stdout.write(f"{len(rows)} rows of {len(wanted)} tasks: {len(unexpected)} surprises\n")
    return 1 if unexpected else 0


def _progress(rows: Sequence[Row], done: int, total: int, samples: int, seconds: float) -> None:
    verdicts = ", ".join(f"{row.mode} {row.verdict}" for row in rows)
    text = f"[{done}/{total} {seconds:5.0f} s {samples / max(seconds, 1e-9):4.1f}/s] {rows[0].name}: {verdicts} ({rows[0].samples})"
    failures = [f"{row.mode}: {row.failure}" for row in rows if row.failure]
    if failures:
        sys.stdout.write("".join(f"\r{text}: {failure}\n" for failure in failures))
    elif sys.stdout.isatty():
        sys.stdout.write(f"\r{text:110.110}")
    elif done % 50 == 0:
        sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.operators.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the journal")
    parser.add_argument("--ops", default=".*", help="regular expression over the names of operators and modules")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds, comma separated")
    parser.add_argument(
        "--modes", default="tvm,default", help="modes, comma separated; interpreter and numbers are others"
    )
    parser.add_argument("--again", default="", help="verdicts, comma separated: run such tasks again")
    parser.add_argument("--limit", type=int, help="samples per task, spread over all; default: every one")
    parser.add_argument("--budget-s", type=float, help="start no further task after so many seconds")
    parser.add_argument(
        "--silence-s", type=float, default=300.0, help="seconds after which a silent worker is given up"
    )
    parser.add_argument("--threads", type=int, default=2, help="of each kernel and operator")
    parser.add_argument("--compilers", type=int, default=os.cpu_count() or 1, help="processes that compile kernels")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
