"""Random programs for as long as you like: each is compiled, compared with eager and float64, and made small where it fails.

    python -m tests.random_programs.run --budget-s 3600 --out /some/folder        an hour, all profiles, the TVM engine forced
    python -m tests.random_programs.run --engine '' --programs 200               the backend as users have it
    python -m tests.random_programs.run --seed 41 --programs 1 --profiles views  one program again

Programs follow from (seed, length, profile) alone; each is run in one mode: its sizes fixed, symbolic, or trained. They run in a worker
process: what kills or hangs it counts as the program's failure. Exits with 1 where something failed; the folder gets report.txt, and
failures.txt with the small programs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.random_programs.check import MODES, check, fails_upstream
from tests.random_programs.generate import PROFILES, seeded
from tests.random_programs.minimise import minimise
from tests.random_programs.program import Program
from torch_hybrid_backend.core.verdict import Reason

PROGRAMS_PER_WORKER = 60  # kernels once loaded stay loaded: a worker's memory grows
LENGTHS = (8, 25, 60, 160)  # cycled through with the seeds


@dataclass(frozen=True)
class Task:
    seed: int
    length: int
    profile: str
    mode: str = MODES[0]


@dataclass(frozen=True)
class Row:
    """A program's outcome. `small` is the failing program after minimising."""

    task: Task
    why: str
    lines: int
    operators: int
    taken: int
    small: str = ""
    small_why: str = ""
    upstream: bool = False  # torch's aot_eager fails as well
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return bool(self.why) and not self.upstream


def run(task: Task, engine: str, cache_dir: str, attempts: int) -> Row:
    """Generate, check and, where it fails, minimise."""
    start = time.monotonic()
    program = seeded(task.seed, task.length, task.profile)

    def why(candidate: Program) -> str:
        return check(candidate, engine, Path(cache_dir), task.mode).why

    report = check(program, engine, Path(cache_dir), task.mode)
    small = small_why = ""
    upstream = bool(report.why) and fails_upstream(program, task.mode)
    if report.why and not upstream:
        least = minimise(program, lambda candidate: _kind(why(candidate)) == _kind(report.why), attempts)
        small, small_why = str(least), why(least)
    return Row(
        task,
        report.why,
        len(program.lines),
        report.operators,
        report.taken,
        small,
        small_why,
        upstream,
        time.monotonic() - start,
    )


def _kind(why: str) -> str:
    """The kind of a failure, which a smaller program must share: the error's name, or being wrong."""
    if why.startswith("call "):
        return "wrong"
    codes = [reason for reason in Reason if f": {reason}: " in why]
    return " ".join([*codes, *re.findall(r"[A-Za-z]+(?:Error|Warning)", why)])


def run_all(
    tasks: Sequence[Task], engine: str, cache_dir: str, budget_s: float, program_s: float, attempts: int
) -> Iterator[Row]:
    """The rows in order; no program is begun once the budget is spent."""
    start = time.monotonic()
    pool: ProcessPoolExecutor | None = None
    done = 0
    try:
        for task in tasks:
            if time.monotonic() - start > budget_s:
                return
            if pool is None or done % PROGRAMS_PER_WORKER == 0:
                _stop(pool)
                pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            done += 1
            try:
                yield pool.submit(run, task, engine, cache_dir, attempts).result(program_s)
            except (TimeoutError, BrokenProcessPool) as error:
                _stop(pool)
                pool = None
                yield Row(task, f"{type(error).__name__}: the process hung or died", 0, 0, 0)
            except Exception as error:  # the generator or the harness failed: worth a look as well
                yield Row(task, f"harness: {type(error).__name__}: {error}", 0, 0, 0)
    finally:
        _stop(pool)


def _stop(pool: ProcessPoolExecutor | None) -> None:
    if pool is None:
        return
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    profiles, modes = options.profiles.split(","), options.modes.split(",")
    tasks = [
        Task(
            options.seed + k,
            options.length or LENGTHS[k % len(LENGTHS)],
            profiles[k % len(profiles)],
            modes[k % len(modes)],
        )
        for k in range(options.programs)
    ]
    rows: list[Row] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        cache = str(options.cache_dir or Path(scratch) / "cache")
        for row in run_all(tasks, options.engine, cache, options.budget_s, options.program_s, options.attempts):
            rows.append(row)
            _progress(row, rows, time.monotonic() - start)
            if options.out is not None:
                _record(row, options.out)
    summary = _summary(rows, options.engine, time.monotonic() - start)
    sys.stdout.write(f"\n{summary}\n")
    if options.out is not None:
        (options.out / "report.txt").write_text(summary + "\n")
    return 1 if any(row.failed for row in rows) else 0


def _record(row: Row, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")
    if row.failed:
        with (out / "failures.txt").open("a") as file:
            file.write(f"### {row.task}\n# {row.why}\n# minimised: {row.small_why}\n{row.small}\n\n")


def _progress(row: Row, rows: Sequence[Row], seconds: float) -> None:
    failed = sum(each.failed for each in rows)
    text = f"[{seconds:6.0f} s] {len(rows)} programs, {sum(each.operators for each in rows)} operators, {failed} failed"
    if row.failed:
        sys.stdout.write(f"\n{text}: {row.task} {row.why}\n{row.small}\n")
    elif sys.stdout.isatty():
        sys.stdout.write(f"\r{text}")
    elif len(rows) % 20 == 0:
        sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _summary(rows: Sequence[Row], engine: str, seconds: float) -> str:
    operators, taken = sum(row.operators for row in rows), sum(row.taken for row in rows)
    by_profile, by_mode = Counter(row.task.profile for row in rows), Counter(row.task.mode for row in rows)
    head = (
        f"engine {engine or 'default'}: {len(rows)} programs in {seconds:.0f} s, {sum(row.lines for row in rows)} lines, "
        f"{operators} operators, {taken} of them ({taken / max(operators, 1):.0%}) on the engine; "
        f"{sum(row.failed for row in rows)} failed, {sum(row.upstream for row in rows)} fail with torch's aot_eager too"
    )
    lines = [
        head,
        "by profile: " + ", ".join(f"{name} {count}" for name, count in sorted(by_profile.items())),
        "by mode: " + ", ".join(f"{name} {count}" for name, count in sorted(by_mode.items())),
        *(f"failed: {row.task} {row.why}" for row in rows if row.failed),
    ]
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_programs.run", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=10**6, help="how many, at most")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="start no further program after so many seconds"
    )
    parser.add_argument("--program-s", type=float, default=600.0, help="seconds after which a program counts as hung")
    parser.add_argument("--attempts", type=int, default=80, help="at making a failing program smaller")
    parser.add_argument("--length", type=int, help="lines of each program; default: several in turn")
    parser.add_argument("--profiles", default=",".join(PROFILES), help="profiles, comma separated, in turn")
    parser.add_argument("--modes", default=",".join(MODES), help="static, dynamic, training: comma separated, in turn")
    parser.add_argument("--engine", default="tvm", help="tvm, or empty for the backend as it is")
    parser.add_argument("--cache-dir", type=Path, help="kernel cache to use; default: a fresh one")
    parser.add_argument("--out", type=Path, help="folder for the report and the failures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
