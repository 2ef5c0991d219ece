"""Every operator and module of PyTorch's own tables on one engine, compared with eager.

    python -m tests.operators.run --dtype float32 --ops 'add|mul' --limit 4 --engine tvm --out /some/folder
    python -m tests.operators.run --dtype float32,int64,bool --out ...      forward, every operator
    python -m tests.operators.run --dtype float32 --backward --out ...      gradients as well
    python -m tests.operators.run --modules --dtype float32 --out ...       modules, eval and train

`--engine tvm` forces the engine (what it runs is not verified behind the test's back, what fails raises); `--engine interpreter` runs the
lowerings through the tests' interpreter, so that a fault of a lowering is told from one of a kernel; `--engine ''` is the backend as
users have it. The samples run in a worker process: what kills or hangs it counts as that sample's failure. Leaves report.json and
report.txt in the folder, with a journal from which an interrupted run goes on (delete it to start anew), and exits with 1 where
something failed that `expected.py` does not list, or succeeded that it does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.operators import moduleinfos, opinfos
from tests.operators.execution import Outcome
from tests.operators.expected import surprises
from tests.operators.report import CRASHED, HUNG, Row, from_wire, to_wire, write

Task = opinfos.Task | moduleinfos.Task
ROOT = Path(__file__).parents[2]
TASKS_PER_WORKER = 120  # kernels once loaded stay loaded: a worker's memory grows


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How tasks are run. `limit` samples each, or all of them where it is None; `sample_s` seconds for each."""

    engine: str
    limit: int | None
    cache_dir: Path
    threads: int
    sample_s: float


class Worker:
    """A process that runs tasks, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._done = 0

    def run(self, task: Task) -> tuple[Outcome, ...]:
        """The outcomes of a task's samples; the last one is a crash or a hang where the process died or was late."""
        if self._process is None or self._done >= TASKS_PER_WORKER:
            self.stop()
            self._process = self._start()
        self._done += 1
        process = self._process
        assert process.stdin is not None
        data = json.dumps([type(task).__module__, dataclasses.asdict(task)]) + "\n"
        outcomes: list[Outcome] = []
        try:
            process.stdin.write(data.encode())
            process.stdin.flush()
            for line in self._lines(process):
                if line == b"done\n":
                    return tuple(outcomes)
                outcomes.append(from_wire(json.loads(line)))
        except TimeoutError:
            outcomes.append(Outcome(HUNG, f"nothing came for {self._settings.sample_s:g} s"))
        except BrokenPipeError:
            pass
        process.kill()
        code = process.wait()
        if not outcomes or outcomes[-1].status != HUNG:
            outcomes.append(Outcome(CRASHED, f"the process ended with {code}"))
        self._process = None
        return tuple(outcomes)

    def stop(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._process = None
        self._done = 0

    def _start(self) -> subprocess.Popen[bytes]:
        s = self._settings
        arguments = [s.engine, str(s.limit or 0), str(s.cache_dir), str(s.threads)]
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
                if not selector.select(self._settings.sample_s):
                    raise TimeoutError
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    yield line + b"\n"


def run_tasks(tasks: Sequence[Task], settings: Settings, budget_s: float | None = None) -> Iterator[Row]:
    """Run the tasks in order, each a row; stops early where the time budget is spent."""
    start = time.monotonic()
    worker = Worker(settings)
    try:
        for task in tasks:
            if budget_s is not None and time.monotonic() - start > budget_s:
                return
            outcomes = worker.run(task)
            subject = task.operator if isinstance(task, opinfos.Task) else task.module
            yield Row(subject, task.name.removeprefix(subject).strip(), outcomes)
    finally:
        worker.stop()


class Journal:
    """Rows on disk, one a line, as they come; `rows` are those found there, by name."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[str, Row] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                subject, kind, outcomes = json.loads(line)
                row = Row(subject, kind, tuple(map(from_wire, outcomes)))
                self.rows[row.name] = row

    def add(self, row: Row) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps([row.subject, row.kind, list(map(to_wire, row.outcomes))]) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    pattern = re.compile(options.ops).pattern
    dtypes = options.dtype.split(",")
    if options.modules:
        tasks: list[Task] = list(moduleinfos.tasks(pattern, dtypes))
    else:
        tasks = list(opinfos.tasks(pattern, dtypes, backward=options.backward, strided=options.strided))
    with tempfile.TemporaryDirectory() as scratch:
        cache_dir = options.cache_dir or Path(scratch) / "cache"
        settings = Settings(options.engine, options.limit, cache_dir, options.threads, options.sample_s)
        start = time.monotonic()
        journal = Journal(options.out / "journal.jsonl" if options.out is not None else None)
        rows = [journal.rows[task.name] for task in tasks if task.name in journal.rows]
        left = [task for task in tasks if task.name not in journal.rows]
        for row in run_tasks(left, settings, options.budget_s):
            rows.append(row)
            journal.add(row)
            _progress(row, len(rows), len(tasks), time.monotonic() - start)
    title = f"engine {options.engine or 'default'}, {len(rows)} of {len(tasks)} tasks"
    if options.out is not None:
        write(rows, options.out, title)
    unexpected = surprises(rows, options.engine, complete=options.limit is None)
    sys.stdout.write("".join(f"{line}\n" for line in unexpected))
    sys.stdout.write(f"{title}: {len(unexpected)} surprises\n")
    return 1 if unexpected else 0


def _progress(row: Row, done: int, total: int, seconds: float) -> None:
    text = f"[{done}/{total} {seconds:5.0f} s] {row.name}: {row.verdict} ({len(row.outcomes)})"
    if row.failure:
        sys.stdout.write(f"\r{text}: {row.failure}\n")
    elif sys.stdout.isatty():
        sys.stdout.write(f"\r{text:100.100}")
    elif done % 50 == 0:
        sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.operators.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ops", default=".*", help="regular expression over the names of operators or modules")
    parser.add_argument("--dtype", default=",".join(opinfos.DTYPES), help="dtypes, comma separated")
    parser.add_argument("--backward", action="store_true", help="compare gradients too")
    parser.add_argument("--strided", action="store_true", help="inputs whose elements do not lie side by side")
    parser.add_argument("--modules", action="store_true", help="modules rather than operators")
    parser.add_argument("--engine", default="tvm", help="tvm, interpreter, or empty for the backend as it is")
    parser.add_argument("--limit", type=int, help="samples per operator, spread over all; default: every one")
    parser.add_argument("--budget-s", type=float, help="start no further operator after so many seconds")
    parser.add_argument("--sample-s", type=float, default=120.0, help="seconds after which a silent worker is given up")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cache-dir", type=Path, help="kernel cache to use; default: a fresh one")
    parser.add_argument("--out", type=Path, help="folder for report.json and report.txt")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
