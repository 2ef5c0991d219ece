"""The benchmark: models of the catalogue on several peers, checked first and then timed against each other.

    python -m benchmarks.run --models resnet50,bert_base --peers eager,hybrid,openvino --batch 1,8 --threads 2 --out zoo.json
    python -m benchmarks.run --resume                     # go on where a run was stopped
    python -m benchmarks.run --models unet --again        # measure some rows of the file anew
    python -m benchmarks.run --caches FOLDER              # peers find what they compiled in earlier runs
    python -m benchmarks.run --isa avx2                   # as on a processor without AVX-512
    python -m benchmarks.run --precision int8             # each peer's own way of it, eager and hybrid in float32 beside them

Each peer runs in a process of its own; rounds are interleaved. The results are written after every model: as JSON, beside it as
Markdown and as a picture. What the peers print goes to a .log beside them. Each precision has a file of its own; a row tells how far every
peer's results are off eager's in float32.

--isa avx2 holds PyTorch, hybrid, inductor's vectors (not what g++ makes of its scalar code), oneDNN and with it OpenVINO to AVX2. ONNX
Runtime chooses its kernels by the processor alone and stays as fast as it is; its row then is no comparison.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, picture, results, table
from benchmarks.catalogue import MODELS
from benchmarks.compare import Effort, compare
from benchmarks.overhead import overheads
from benchmarks.results import OURS, Record, Row
from benchmarks.roofline import peak
from torch_hybrid_backend.bench.peers import BASELINES, FLOAT32, PRECISIONS, Peer, by_name
from torch_hybrid_backend.progress import Progress

# Of the peers that keep a cache, those whose second process is worth its time in every row.
_WARM = ("hybrid", "inductor")
# Instruction set -> how the libraries are told to use no more than that. What we use of AVX-VNNI where it is there, oneDNN does under its
# name of both.
_ISA = {"avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}}
# Beside those of `machine.describe`, which every record has.
_QUANTISERS = ("nncf", "torchao")
_STOPPED = 130  # what shells report after an interrupt


def _listed(legal: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in legal]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown) or 'nothing named'}; must be among {', '.join(legal)}"
            )
        return list(dict.fromkeys(names))

    return parse


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: it must be whole numbers, at least 1, separated by commas")
    return list(dict.fromkeys(map(int, parts)))


def _positive(kind: Callable[[str], Any]) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text}: must be above 0")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse


def _parser(known: dict[str, Peer]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", type=_listed(list(MODELS)), default=list(MODELS), help=f"default: all of {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--peers", type=_listed(list(known)), default=list(known), help=f"default: all of {', '.join(known)}"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default=FLOAT32, help="default: %(default)s")
    parser.add_argument("--batch", type=_counts, default=[1, 8], help="sizes, comma separated; default: 1,8")
    parser.add_argument("--threads", type=_positive(int), default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--size", choices=("small", "full"), default="full", help="small: a few layers, to try it out")
    parser.add_argument(
        "--seconds", type=_positive(float), default=20.0, help="timing of one model, all peers together"
    )
    parser.add_argument("--rounds", type=_positive(int), default=5, help="in which the peers take turns; default: 5")
    parser.add_argument("--isa", choices=list(_ISA), help="hold the peers that can be held to this instruction set")
    parser.add_argument("--timeout", type=_positive(float), default=600.0, help="seconds to wait for one peer")
    keeping = [name for name, peer in known.items() if peer.keeps_cache]
    parser.add_argument(
        "--warm",
        type=_listed(keeping),
        default=[name for name in _WARM if name in keeping],
        metavar="PEERS",
        help=f"whose compile time with a filled cache is measured, in a second process; default: {','.join(_WARM)}",
    )
    parser.add_argument("--no-warm", action="store_const", dest="warm", const=[], help="leave these compile times out")
    parser.add_argument(
        "--caches",
        type=Path,
        metavar="FOLDER",
        help="keep the caches of hybrid's peers there for later runs, which then start faster and have no cold compile time for them",
    )
    parser.add_argument("--no-overhead", action="store_true", help="leave out the cost of a call of ten tiny operators")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--resume", action="store_true", help="keep the rows that are in the file already")
    rows.add_argument("--again", action="store_true", help="measure the named rows anew, keep the others of the file")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"JSON; default: {_relative(_default_out(FLOAT32))}, of other precisions zoo-PRECISION.json beside it",
    )
    return parser


def _default_out(precision: str) -> Path:
    name = "zoo" if precision == FLOAT32 else f"zoo-{precision}"
    return table.RESULTS / machine.slug() / f"{name}.json"


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main(argv: Sequence[str] | None = None, known: dict[str, Peer] | None = None) -> int:
    """Run, write the files, print the tables. Returns 1 where ours has no result, 2 for wrong arguments, 130 when stopped.

    `known`: the peers that can be named; default: all.
    """
    known = known or by_name()
    # First: PyTorch reads its part once, with the first question about the machine.
    before = argparse.ArgumentParser(add_help=False)
    before.add_argument("--isa", choices=list(_ISA))
    os.environ.update(_ISA.get(before.parse_known_args(argv)[0].isa, {}))
    arguments = _parser(known).parse_args(argv)
    arguments.out = arguments.out or _default_out(arguments.precision)
    asked = [known[name] for name in arguments.peers]
    torch.set_num_threads(arguments.threads)
    about, settings = machine.describe(), {"size": arguments.size, "hybrid": machine.hybrid_settings()}
    if arguments.precision != FLOAT32:
        asked = [*BASELINES, *asked]
        about["versions"] |= machine.versions(_QUANTISERS)
        settings["precision"] = arguments.precision
    effort = Effort(
        threads=arguments.threads,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        timeout_s=arguments.timeout,
        warm=frozenset(arguments.warm),
        caches=arguments.caches and arguments.caches.resolve(),
        precision=arguments.precision,
    )
    record: Record = {
        "machine": about,
        "settings": settings,
        "overhead": [],
        "results": [],
    }
    if arguments.resume or arguments.again:
        try:
            record = results.resumed(arguments.out, record)
        except ValueError as error:
            print(f"benchmarks.run: {error}", file=sys.stderr)
            return 2
    wanted: list[Row] = [(name, batch) for name in arguments.models for batch in arguments.batch]
    if arguments.resume:
        wanted = [row for row in wanted if not results.complete(record, row, [peer.name for peer in asked])]
    # What a call costs beside its work is the same in every precision.
    arguments.no_overhead = arguments.no_overhead or arguments.precision != FLOAT32
    try:
        with Progress("benchmarks", len(wanted) + (not arguments.no_overhead)) as progress:
            record = _run(record, wanted, asked, effort, arguments, progress)
    except KeyboardInterrupt:
        way = "--again and the models left" if arguments.again else "--resume"
        print(f"stopped; what is complete is in {arguments.out}, go on with {way}", file=sys.stderr)
        return _STOPPED
    print(table.report(record))
    print(f"\n{arguments.out}")
    return int(any("gap" in result and result["peer"] == OURS for result in record["results"]))


def _run(
    record: Record,
    wanted: Sequence[Row],
    asked: Sequence[Peer],
    effort: Effort,
    arguments: argparse.Namespace,
    progress: Progress,
) -> Record:
    """The record with the wanted rows; the files are written after each."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    log: Path = arguments.out.with_suffix(".log")
    log.unlink(missing_ok=True)
    if not record["machine"].get("peak_gflops"):
        progress.at("the machine's peak")
        record["machine"]["peak_gflops"] = round(peak(effort.threads).rate(effort.precision), 1)
    if not arguments.no_overhead and {entry["peer"] for entry in record["overhead"]} != {peer.name for peer in asked}:
        progress.at("cost of a call")
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            record["overhead"] = overheads(asked, effort.threads, effort.timeout_s, Path(folder), log)
        progress.step()
    for model, batch in wanted:
        title = f"{MODELS[model].title}, batch {batch}"

        def say(text: str, title: str = title) -> None:
            progress.at(f"{title}: {text}")

        found = compare(model, arguments.size, batch, asked, effort, log, say)
        record = results.replaced(record, (model, batch), found)
        write(arguments.out, record)
        progress.say(f"{title}: {_brief(found)}")
        progress.step()
    write(arguments.out, record)
    return record


def write(out: Path, record: Record) -> None:
    """The three files of a record."""
    results.write(out, record)
    out.with_suffix(".md").write_text(table.report(record) + "\n")
    picture.draw(record, out.with_suffix(".svg"))


def _brief(found: Sequence[dict[str, Any]]) -> str:
    return ", ".join(
        f"{result['peer']} " + ("-" if "gap" in result else f"{result['median_ms']:.3g} ms") for result in found
    )


if __name__ == "__main__":
    sys.exit(main())
