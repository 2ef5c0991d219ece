"""Every model of the catalogue, tried and timed beside eager, each in a process of its own.

    python -m tests.ecosystem.run                                everything: about an hour; the file and docs/ecosystem.md are renewed
    python -m tests.ecosystem.run --models 'diffusers|timm/0'    those whose names match
    python -m tests.ecosystem.run --resume                       go on: what is in the file stays
    python -m tests.ecosystem.run --again wrong                  only what has that verdict in the file: wrong, raises, slower, right

Run it on an otherwise idle machine. The file is written after every model. Exits with 1 where a model is wrong, raises or is slower than
eager without a reason in the catalogue.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.table import RESULTS
from tests.ecosystem import report
from tests.ecosystem.catalogue import CASES, find
from tests.ecosystem.export_trial import ExportTrial, ZooTrial
from tests.ecosystem.libraries import missing
from tests.ecosystem.trial import Trial
from torch_hybrid_backend.bench.machine import today
from torch_hybrid_backend.bench.process import WorkerError, WorkerProcess
from torch_hybrid_backend.bench.worker import environment
from torch_hybrid_backend.progress import Progress

LIBRARIES = ("diffusers", "sentence-transformers", "timm", "torch-geometric", "transformers", "ultralytics")
_SECONDS = 8.0  # of timing a model
_TIMEOUT_S = 600.0  # for a model, all of it


def try_alone(trial: Trial | ExportTrial | ZooTrial, log: Path) -> dict[str, Any]:
    """The outcome of one case in a process of its own, with an empty cache; {"raises": why} where it gave none. Output is appended to `log`."""
    with (
        tempfile.TemporaryDirectory(prefix="ecosystem-", ignore_cleanup_errors=True) as folder,
        WorkerProcess(environment(trial.threads, Path(folder)) | {"HF_HUB_OFFLINE": "1"}, log) as worker,
    ):
        try:
            found: dict[str, Any] = worker.ask(trial, _TIMEOUT_S)
        except WorkerError as error:
            found = {"name": trial.name, "raises": str(error)}
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="", metavar="PATTERN", help="a regular expression; default: all")
    parser.add_argument("--resume", action="store_true", help="keep what is in the file, run the rest")
    parser.add_argument("--again", choices=report.VERDICTS, help="run only what has this verdict in the file")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="timing of one model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    default = RESULTS / machine.slug() / "ecosystem.json"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the file, print the table."""
    arguments = _arguments(argv)
    torch.set_num_threads(arguments.threads)
    found: dict[str, dict[str, Any]] = {}
    if arguments.out.exists():
        found = {entry["name"]: entry for entry in json.loads(arguments.out.read_text())["models"]}
    wanted = [case for case in CASES.values() if re.search(arguments.models, case.name)]
    if not wanted and arguments.models.startswith("timm/"):
        wanted = [find(arguments.models)]
    if arguments.resume:
        wanted = [case for case in wanted if case.name not in found]
    if arguments.again:
        wanted = [case for case in wanted if case.name in found and report.verdict(found[case.name]) == arguments.again]
    log = arguments.out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with Progress("models", len(wanted)) as progress:
        for case in wanted:
            absent = missing(case.library)
            if absent:
                progress.say(f"{case.name}: skipped, {absent}")
                progress.step()
                continue
            progress.at(case.name)
            outcome = try_alone(Trial(case.name, arguments.threads, arguments.seconds), log)
            found[case.name] = outcome | {"day": today(), "revision": machine.revision()}
            known = [*CASES, *(name for name in found if name not in CASES)]  # in the catalogue's order
            models = [found[name] for name in known if name in found]
            machine.write_record(arguments.out, libraries=machine.versions(LIBRARIES), models=models)
            progress.say(f"{case.name}: {report.brief(found[case.name])}")
            progress.step()
    print(report.table([entry for name, entry in found.items() if re.search(arguments.models, name)]))
    return int(any(report.unexplained(entry) for entry in found.values()))


if __name__ == "__main__":
    sys.exit(main())
