"""The command `hybrid bench`: time a user's model on hybrid, on eager, and on the other runtimes that are installed.

    hybrid bench my_models.py:make
    hybrid bench my_models.py:make --batch 1,8 --precision as-written,bf16,int8
    hybrid bench my_models.py:make --against eager,openvino --json bench.json --html bench.html
    hybrid bench my_models.py:make --train
    hybrid bench model.hybrid --model my_models.py:make

docs/bench.md explains the output. `bench.files` measures files.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from torch_hybrid_backend.bench import files, machine, page, table
from torch_hybrid_backend.bench.compare import Effort, compare, reference
from torch_hybrid_backend.bench.factory_model import FactoryModel
from torch_hybrid_backend.bench.peers import AS_WRITTEN, EAGER, FLOAT32, OURS, PRECISIONS, Peer, by_name
from torch_hybrid_backend.bench.process import WorkerError
from torch_hybrid_backend.bench.record import Group, Record, group_title, precision_title
from torch_hybrid_backend.bench.saving import SUFFIXES
from torch_hybrid_backend.config import shows_progress
from torch_hybrid_backend.errors import ArgumentError, HybridError, failures
from torch_hybrid_backend.factory import Factory
from torch_hybrid_backend.machine import most_threads
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder

_STOPPED = 130  # the exit status that shells report after an interrupt
_TRAINED_IN = (FLOAT32, "bf16")
_SHORT = {"inductor_freezing": "freezing"}  # name in records -> name on the command line


def add_parser(commands: Any) -> None:
    """Add the subcommand to those of `hybrid`."""
    parser = commands.add_parser(
        "bench",
        help="time a model on hybrid, eager, inductor and the other runtimes that are installed",
        description="Time a model on hybrid and on the other runtimes that are installed, each in a process of its own, in turns. "
        "Results are compared with eager's first. docs/bench.md explains the table.",
    )
    parser.add_argument(
        "target",
        help="module:factory or script.py:factory; the factory returns (model, args[, kwargs]), the same in every process. Or a file that "
        "`hybrid export` wrote, beside what other runtimes saved",
    )
    parser.add_argument(
        "--batch",
        type=_counts,
        default=[None],
        metavar="N,...",
        help="batch sizes: given to the factory if it has a parameter `batch`, else its inputs are repeated or cut along dimension 0; "
        "default: the inputs as they are",
    )
    parser.add_argument(
        "--precision",
        type=_names,
        metavar="NAME,...",
        help=f"of {', '.join(map(precision_title, PRECISIONS))}; int8 is calibrated on the inputs; default: {precision_title(FLOAT32)}",
    )
    parser.add_argument(
        "--against",
        type=_names,
        metavar="NAME,...",
        help=f"of {', '.join(_short(name) for name in by_name() if name != OURS)}; default: all of them. For a file: of "
        f"{', '.join(files.OTHERS)}, or what they saved ({', '.join(SUFFIXES)})",
    )
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="for a file: the factory of the model that was exported, which the others are given",
    )
    parser.add_argument(
        "--train", action="store_true", help="time forward, backward and a step of SGD on eager, inductor and hybrid"
    )
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=10.0,
        help="of timing for each batch size and precision, all runtimes together; default: 10",
    )
    parser.add_argument("--rounds", type=_count, default=5, help="in which the runtimes take turns; default: 5")
    parser.add_argument("--threads", type=_threads, help="default: torch's")
    parser.add_argument(
        "--timeout", type=_positive, default=600.0, help="seconds that a runtime has to compile; default: 600"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts and tables to FILE")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write what the runtimes print to FILE")


def run(parsed: argparse.Namespace, out: TextIO, known: Mapping[str, Peer] | None = None) -> int:
    """Measure and show the results. Returns the exit status: 0; 1 if hybrid has no figures; 130 after an interrupt.

    known: the peers that can be named; default: all. Raises HybridError if nothing can be measured.
    """
    if Path(parsed.target).suffix == ".hybrid":
        return files.run(parsed, out, _write)
    if parsed.model is not None:
        raise ArgumentError(f"--model is for a .hybrid file, and {parsed.target} is none: leave it out")
    known = known or by_name()
    factory = Factory(parsed.target)
    precisions = [_precision(name) for name in parsed.precision or [precision_title(FLOAT32)]]
    peers = _peers(parsed, known, precisions)
    for path in filter(None, (parsed.json, parsed.html, parsed.log)):
        _write(path, "", mode="w" if path == parsed.log else "a")  # fail now, not after minutes of timing
    threads = parsed.threads or torch.get_num_threads()
    effort = Effort(seconds=parsed.seconds, rounds=parsed.rounds, timeout_s=parsed.timeout)
    record = Record(
        parsed.target,
        parsed.train,
        machine.describe() | {"threads": threads},
        {"seconds": parsed.seconds, "rounds": parsed.rounds, "hybrid": machine.hybrid_settings()},
    )
    status = 0
    with TemporaryFolder() as folder:
        works = [
            FactoryModel(
                factory=factory,
                threads=threads,
                folder=folder / f"{batch}-{precision}",
                batch=batch,
                precision=precision,
                training=parsed.train,
            )
            for batch in parsed.batch
            for precision in precisions
        ]
        try:
            _measure(record, works, peers, effort, parsed.log or folder / "log")
        except KeyboardInterrupt:
            sys.stderr.write("hybrid: stopped\n")
            status = _STOPPED
    if record.groups:
        out.write(table.text(record) + "\n")
        if parsed.json is not None:
            _write(parsed.json, json.dumps(record.as_json(), indent=1, allow_nan=False) + "\n")
        if parsed.html is not None:
            _write(parsed.html, page.html(record))
    return status or int(any(group.of(OURS) is None for group in record.groups))


def _measure(record: Record, works: Sequence[FactoryModel], peers: Sequence[Peer], effort: Effort, log: Path) -> None:
    """Add a group for each work to the record. Raises HybridError if a model does not run in eager."""
    asked = [_with_baseline(peers, work.precision) for work in works]
    installed = [
        peer for work, own in zip(works, asked, strict=True) for peer in own if not peer.missing(work.precision)
    ]
    steps = len(installed) + len(works) * (1 + effort.rounds)
    with Progress("hybrid bench", steps, shown=shows_progress()) as progress:
        for work, own in zip(works, asked, strict=True):
            say = _saying(progress, group_title(work.batch, work.precision))
            work.folder.mkdir(parents=True)
            progress.at("eager's results")
            try:
                facts = reference(work, effort, log)
            except WorkerError as error:
                how = (
                    ""
                    if error.is_explained
                    else f"{work.factory.target} does not run in eager (--log FILE tells more): "
                )
                raise HybridError(f"{how}{error}") from error
            results = compare(work, facts, own, effort, log, say)
            progress.step()
            record.groups.append(Group(work.batch, work.precision, facts, results, work.training))


def _with_baseline(peers: Sequence[Peer], precision: str) -> list[Peer]:
    """The peers; in another precision than as written, with eager as written as the baseline of speedups."""
    wanted = precision != FLOAT32 and any(peer.name == EAGER for peer in peers)
    return [*peers, AS_WRITTEN] if wanted else list(peers)


def _saying(progress: Progress, title: str) -> Callable[[str], None]:
    """Function that ends the current step of the progress and shows the next."""

    def say(text: str) -> None:
        progress.step(f"{title}: {text}")

    return say


def _precision(name: str) -> str:
    legal = {precision_title(precision): precision for precision in PRECISIONS}
    return legal[_legal(name, "--precision", tuple(legal))]


def _peers(parsed: argparse.Namespace, known: Mapping[str, Peer], precisions: Sequence[str]) -> list[Peer]:
    """The peers to measure, hybrid first. Raises ArgumentError for an unknown peer, or a peer or precision that `--train` lacks."""
    others = {_short(name): peer for name, peer in known.items() if name != OURS}
    if parsed.train:
        if wrong := [precision_title(each) for each in precisions if each not in _TRAINED_IN]:
            legal = " and ".join(map(precision_title, _TRAINED_IN))
            raise ArgumentError(f"--train measures in {legal}, not in {', '.join(wrong)}: leave out one of the two")
        if unable := [name for name in parsed.against or () if name in others and not others[name].trains]:
            able = ", ".join(name for name, peer in others.items() if peer.trains)
            raise ArgumentError(f"{', '.join(unable)} cannot train a model: name some of {able}, or leave out --train")
        others = {name: peer for name, peer in others.items() if peer.trains}
    asked = others if parsed.against is None else [_legal(name, "--against", tuple(others)) for name in parsed.against]
    return [known[OURS], *(others[name] for name in asked)]


def _legal(name: str, option: str, legal: Sequence[str]) -> str:
    if name in legal:
        return name
    near = difflib.get_close_matches(name, legal, 1)
    raise ArgumentError(
        f"{option} {name} is unknown{f' (did you mean {near[0]}?)' if near else ''}; it must be one of {', '.join(legal)}"
    )


def _short(peer: str) -> str:
    return _SHORT.get(peer, peer)


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode) as file:
            file.write(text)
    except failures(OSError) as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from error


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def _count(text: str) -> int:
    if not (text.strip().isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def _threads(text: str) -> int:
    if (count := _count(text)) > most_threads():
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number, at most {most_threads()} (256 or 4 times the processors)"
        )
    return count


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(map(_count, text.split(","))))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value
