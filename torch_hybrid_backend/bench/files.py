"""Comparison of a `.hybrid` file with the models that other runtimes saved: `hybrid bench model.hybrid`, and `benchmarks.deploy` of a clone.

How soon a new process answers and how much memory each further one takes is measured by processes of their own (`bench.answering`), a format
after the other. Steady calls are timed in workers, in turns. All files are in the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from torch_hybrid_backend.bench import machine
from torch_hybrid_backend.bench.answering import READY
from torch_hybrid_backend.bench.factory_model import FactoryModel
from torch_hybrid_backend.bench.process import ROOT, WorkerError, WorkerProcess, wait_until_quiet
from torch_hybrid_backend.bench.record import milliseconds
from torch_hybrid_backend.bench.saving import SUFFIXES, TITLES, Open, Save, Saved, missing, write_sample
from torch_hybrid_backend.bench.table import markdown
from torch_hybrid_backend.bench.worker import Round, Work, environment
from torch_hybrid_backend.config import shows_progress
from torch_hybrid_backend.errors import ArgumentError, did_you_mean
from torch_hybrid_backend.factory import Factory
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder

OURS, RUNNER = "hybrid", "runner"
OTHERS = tuple(form for form in TITLES if form != OURS)
_RUN = Path(__file__).resolve().parents[1] / "runner" / "hybrid-run"
_HEADER = (
    "format",
    "file MB",
    "process s",
    "first answer s",
    "call ms",
    "further MiB",
    "error",
)


@dataclass(frozen=True, slots=True)
class Effort:
    """Effort of a measurement. `processes`: how many answer, of each format. `seconds`: of steady calls, all formats together, in `rounds`."""

    threads: int
    processes: int = 5
    seconds: float = 10.0
    rounds: int = 5
    timeout_s: float = 600.0


def compare(
    file: Path,
    others: Mapping[str, Work | Path],
    folder: Path,
    effort: Effort,
    log: Path,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Measure the file, in Python and in the runner, and other formats. Returns a dict for each: figures, or a "gap", the reason why not.

    others: for each format the model to save in it, or what was saved. folder: gets what is saved, and stays. Output is appended to `log`;
    `say` is called with each step. `file_mb`: 10^6 bytes. `process_s`: of a whole new process, of which `import_s` go to imports and `answer_s`
    to opening the file and the first call. `private_mib`: memory that a further process takes. `call_ms`: the median of steady calls. `error`:
    the root mean square of the difference from the file's sample, divided by that of the sample.

    Raises ArtifactError for a file that cannot be opened.
    """
    write_sample(file, folder)
    results: dict[str, dict[str, Any]] = {}
    saved: dict[str, Saved] = {OURS: Saved(file, file.stat().st_size)}
    with contextlib.ExitStack() as stack:
        for form, source in others.items():
            say(f"{TITLES[form]}: saving")
            given = source if isinstance(source, Path) else None
            work = None if isinstance(source, Path) else source
            with _gap(results, form), _worker(form, folder, effort, log) as worker:
                saved[form] = worker.ask(Save(form, file, folder, effort.threads, work, given), effort.timeout_s)
        for form, each in saved.items():
            say(f"{TITLES[form]}: new processes")
            with _gap(results, form):
                results[form] = {"file_mb": each.size_bytes / 1e6, **_answers(form, each.path, folder, effort)}
        say("hybrid-run: new processes")
        with _gap(results, RUNNER):
            results[RUNNER] = {"file_mb": file.stat().st_size / 1e6, **_runs(file, folder, effort)}
        workers: dict[str, WorkerProcess] = {}
        for form in [form for form in saved if "gap" not in results[form]]:
            say(f"{TITLES[form]}: opening")
            with _gap(results, form):
                worker = stack.enter_context(_worker(form, folder, effort, log))
                message = Open(form, saved[form].path, folder, effort.threads)
                wrong, results[form]["error"] = worker.ask(message, effort.timeout_s)
                if wrong:
                    raise WorkerError(wrong)
                workers[form] = worker
        _time(workers, results, effort, say)
    order = [OURS, RUNNER, *others]
    return [{"format": form, **results[form]} for form in order]


def _time(
    workers: Mapping[str, WorkerProcess],
    results: dict[str, dict[str, Any]],
    effort: Effort,
    say: Callable[[str], None],
) -> None:
    """Time steady calls in rounds. Each round starts with another format."""
    medians: dict[str, list[float]] = {form: [] for form in workers}
    for number in range(effort.rounds):
        say(f"timing, round {number + 1} of {effort.rounds}")
        alive = [form for form in workers if "gap" not in results[form]]
        first = number % len(alive) if alive else 0
        for form in alive[first:] + alive[:first]:
            wait_until_quiet([workers[other] for other in alive])
            with _gap(results, form):
                timed = workers[form].ask(Round(effort.seconds / effort.rounds / len(alive)), effort.timeout_s)
                medians[form].append(statistics.median(timed.nanoseconds) / 1e6)
    for form, values in medians.items():
        if "gap" not in results[form]:
            results[form]["call_ms"] = statistics.median(values)


@contextlib.contextmanager
def _gap(results: dict[str, dict[str, Any]], form: str) -> Iterator[None]:
    """Turn a failure of a format into its gap."""
    try:
        yield
    except WorkerError as error:
        results[form] = {"gap": str(error)}


@contextlib.contextmanager
def _worker(form: str, folder: Path, effort: Effort, log: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(environment(effort.threads, folder / form), log) as worker:
        yield worker


def _answers(form: str, path: Path, folder: Path, effort: Effort) -> dict[str, float]:
    """Medians over new processes, beside one that has the model open: what processes share is there already."""
    command = [sys.executable, "-m", "torch_hybrid_backend.bench.answering", form, str(path), str(folder)]
    command += ["--threads", str(effort.threads)]
    with contextlib.ExitStack() as stack:
        first = subprocess.Popen(
            [*command, "--hold"],
            env=_environment(effort),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.enter_context(first)
        stack.callback(first.kill)  # before it is waited for: nothing of it is needed any more
        _wait_for_answer(first, effort)
        runs = []
        for _ in range(effort.processes):
            spent, said = _spent(command, effort)
            runs.append({**json.loads(said.splitlines()[-1]), "process_s": spent})
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _wait_for_answer(process: subprocess.Popen[bytes], effort: Effort) -> None:
    """Wait until a process that holds its model has answered, or has ended. Raises WorkerError where it does neither in time."""
    assert process.stdout is not None
    output, end = process.stdout.fileno(), time.perf_counter() + effort.timeout_s
    said = b""
    while READY.encode() not in said.splitlines():
        ready, _, _ = select.select([output], [], [], max(end - time.perf_counter(), 0))
        if not ready:
            raise WorkerError(f"no answer within {effort.timeout_s:.0f} s")
        if not (more := os.read(output, 4096)):
            return
        said += more


def _runs(file: Path, folder: Path, effort: Effort) -> dict[str, float]:
    count = len(list(folder.glob("input*.npy")))
    inputs = [part for number in range(count) for part in ("--input", str(folder / f"input{number}.npy"))]
    command = [str(_RUN), str(file), "--threads", str(effort.threads), *inputs]
    return {"process_s": statistics.median(_spent(command, effort)[0] for _ in range(effort.processes))}


def _spent(command: Sequence[str], effort: Effort) -> tuple[float, str]:
    """Seconds that a process took, and what it printed. Raises WorkerError where it fails."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=_environment(effort), capture_output=True, text=True, check=False, timeout=effort.timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"no answer within {effort.timeout_s:.0f} s") from error
    spent = time.perf_counter() - start
    if done.returncode:
        raise WorkerError((done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1])
    return spent, done.stdout


def _environment(effort: Effort) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": str(effort.threads), "PYTHONPATH": path}


def text(results: Sequence[Mapping[str, Any]]) -> str:
    """A table of the formats with figures, and a line for each of the others."""
    titles = {**TITLES, RUNNER: "hybrid, runner"}
    rows = [_cells(titles[result["format"]], result) for result in results if "gap" not in result]
    gaps = [f"no result: {titles[each['format']]}: {each['gap']}" for each in results if "gap" in each]
    return "\n".join([markdown(_HEADER, rows, left=1), *(["", *gaps] if gaps else [])])


def _cells(title: str, result: Mapping[str, Any]) -> list[str]:
    def cell(name: str, write: Callable[[float], str]) -> str:
        value = result.get(name)
        return "-" if value is None else write(value)

    return [
        title,
        cell("file_mb", lambda value: f"{value:.1f}"),
        cell("process_s", lambda value: f"{value:.3f}"),
        cell("answer_s", lambda value: f"{value:.3f}"),
        cell("call_ms", milliseconds),
        cell("private_mib", lambda value: f"{value:.0f}"),
        cell("error", lambda value: f"{value:.1e}"),
    ]


def run(parsed: argparse.Namespace, out: TextIO, write: Callable[[Path, str], None]) -> int:
    """Run `hybrid bench model.hybrid`. Returns the exit status: 0; 1 if the file has no figures. `write` writes the JSON.

    Raises ArgumentError for options that are for models alone, and for formats that cannot be saved for lack of the model.
    """
    file = Path(parsed.target)
    for option, differs in {
        "--batch": parsed.batch != [None],
        "--precision": parsed.precision is not None,
        "--train": parsed.train,
        "--html": parsed.html is not None,
    }.items():
        if differs:
            raise ArgumentError(f"{option} is for models; {file} is measured as it was exported: leave {option} out")
    threads = parsed.threads or torch.get_num_threads()
    effort = Effort(threads, parsed.rounds, parsed.seconds, parsed.rounds, parsed.timeout)
    with TemporaryFolder() as folder:
        others, gaps = _others(parsed, folder, threads)
        steps = 2 * len(others) + 4 + len(others) + effort.rounds
        with Progress("hybrid bench", steps, shown=shows_progress()) as progress:
            results = compare(file, others, folder, effort, parsed.log or folder / "log", progress.step)
    results += [{"format": form, "gap": gap} for form, gap in gaps.items()]
    about = machine.describe() | {"threads": threads}
    out.write(f"{file}\n{about['cpu']}, {threads} threads; {machine.today()}\n\n{text(results)}\n")
    if parsed.json is not None:
        record = {"file": str(file), "machine": about, "results": results}
        write(parsed.json, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return int("gap" in results[0])


def _others(parsed: argparse.Namespace, folder: Path, threads: int) -> tuple[dict[str, Work | Path], dict[str, str]]:
    """Return the model to save, or the saved file, for each format that is asked for (by default all), and why others have no figures."""
    work = None
    if parsed.model is not None:
        work = FactoryModel(factory=Factory(parsed.model), threads=threads, folder=folder)
    others: dict[str, Work | Path] = {}
    gaps: dict[str, str] = {}
    for name in OTHERS if parsed.against is None else parsed.against:
        path = Path(name)
        form = SUFFIXES.get(path.suffix, name)
        if form not in OTHERS:
            raise ArgumentError(
                f"--against {name} names no saved format. {did_you_mean(name, OTHERS)}It must be one of {', '.join(OTHERS)}, or a file "
                f"with the suffix {', '.join(SUFFIXES)}"
            )
        if form != name and not path.is_file():
            raise ArgumentError(f"--against {name}: there is no such file")
        if why := missing(form):
            gaps[form] = why
        elif form != name:
            others[form] = path.resolve()
        elif work is not None:
            others[form] = work
        elif parsed.against is None:
            gaps[form] = (
                f"needs the model that was exported (--model module:factory), or its own file (--against {_example(form)})"
            )
        else:
            raise ArgumentError(
                f"--against {name} needs the model that was exported: name its factory, --model module:factory, or give {TITLES[form]}'s own "
                f"file, --against {_example(form)}"
            )
    return others, gaps


def _example(form: str) -> str:
    return next(f"model{suffix}" for suffix, each in SUFFIXES.items() if each == form)
