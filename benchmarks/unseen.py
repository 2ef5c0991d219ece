"""Networks that nobody chose: image models of timm, drawn by a seed, on several peers side by side.

    make .venv/ecosystem .venv/torchvision .venv/peers
    python -m benchmarks.unseen --count 60 --batch 1,4
    python -m benchmarks.unseen --models poolformer_s12,vit_small_plus_patch16_dinov3 --peers eager,hybrid,openvino

timm's names are shuffled by the seed. Networks are taken in that order, each with the input size of its configuration and random weights; those
with more than `--parameters` million parameters, or with images larger than `--pixels`, are passed over. Rows are written after every
network, and a run with the same settings and `--out` goes on where it stopped. `ahead`: the fastest peer's time over hybrid's; above 1 hybrid
is ahead.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.table import RESULTS
from benchmarks.timm_models import TimmWork, drawn
from torch_hybrid_backend.bench import compare as peers_compared
from torch_hybrid_backend.bench.peers import OURS, by_name
from torch_hybrid_backend.bench.process import WorkerError

_PEERS = "eager,hybrid,openvino,onnxruntime"


def measured(
    name: str, batch: int, peers: Sequence[str], effort: peers_compared.Effort, threads: int, log: Path
) -> dict[str, Any]:
    """Times of a network in milliseconds, by peer, and how far each is off eager's; of a peer that cannot run the network, the reason."""
    known = by_name()
    with tempfile.TemporaryDirectory(prefix="unseen-") as folder:
        work = TimmWork(model=name, batch=batch, threads=threads, folder=Path(folder))
        try:
            facts = peers_compared.reference(work, effort, log)
            found = peers_compared.compare(work, facts, [known[peer] for peer in peers], effort, log, lambda _: None)
        except WorkerError as error:
            return {"model": name, "batch": batch, "gap": str(error)}
    row: dict[str, Any] = {"model": name, "batch": batch, "gflop": found[0].get("gflop")}
    for result in found:
        row[result["peer"]] = {
            key: result[key]
            for key in ("median_ms", "spread_ms", "compile_cold_s", "max_error", "gap")
            if key in result
        }
    return row


def ahead(row: dict[str, Any]) -> float:
    """The fastest peer's time over hybrid's; NaN where either has none."""
    times = {
        peer: value["median_ms"] for peer, value in row.items() if isinstance(value, dict) and "median_ms" in value
    }
    ours = times.pop(OURS, math.nan)
    return min(times.values(), default=math.nan) / ours


def told(row: dict[str, Any], peers: Sequence[str]) -> str:
    """The row as a line of a Markdown table."""
    cells = [f"{row[peer]['median_ms']:.2f}" if "median_ms" in row.get(peer, {}) else "-" for peer in peers]
    return f"| {row['model']} | {row['batch']} | {' | '.join(cells)} | {ahead(row):.2f} |"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unseen", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="networks; default: 60")
    parser.add_argument("--seed", type=int, default=53)
    parser.add_argument("--models", default="", help="names in place of a draw, comma separated")
    parser.add_argument("--batch", default="1,4")
    parser.add_argument("--peers", default=_PEERS, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--parameters", type=float, default=100.0, help="millions at most; default: 100")
    parser.add_argument("--pixels", type=int, default=320, help="the largest side of an image; default: 320")
    parser.add_argument("--seconds", type=float, default=8.0, help="timing of one network, all peers together")
    parser.add_argument("--out", type=Path, default=RESULTS / machine.slug() / "unseen.json")
    arguments = parser.parse_args()
    peers = arguments.peers.split(",")
    if unknown := sorted(set(peers) - set(by_name())):
        parser.error(f"unknown peers: {', '.join(unknown)}; legal: {', '.join(by_name())}")
    names = arguments.models.split(",") if arguments.models else []
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": []}
    settings = {key: getattr(arguments, key) for key in ("seed", "peers", "threads", "seconds", "parameters", "pixels")}
    if record["rows"] and record["settings"] != settings:
        parser.error(
            f"{arguments.out} was measured with other settings: {record['settings']}; name another file by --out"
        )
    record |= {"machine": machine.describe(), "settings": settings}
    record["rows"] = [row for row in record["rows"] if "gap" not in row]
    known = {(row["model"], row["batch"]) for row in record["rows"]}
    effort = peers_compared.Effort(seconds=arguments.seconds, rounds=4)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"| network | batch | {' ms | '.join(peers)} ms | ahead |\n|---|--:|{'--:|' * (len(peers) + 1)}")
    for number, name in enumerate(names or drawn(arguments.seed, arguments.parameters, arguments.pixels)):
        if not names and number == arguments.count:
            break
        for batch in map(int, arguments.batch.split(",")):
            if (name, batch) not in known:
                row = measured(name, batch, peers, effort, arguments.threads, arguments.out.with_suffix(".log"))
                record["rows"].append(row)
                arguments.out.write_text(json.dumps(record, indent=1))
                print(told(row, peers), flush=True)
    ratios = [ratio for row in record["rows"] if (ratio := ahead(row)) > 0]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"\n{len(ratios)} rows: geometric mean {mean:.2f}, behind in {sum(ratio < 1 for ratio in ratios)}")


if __name__ == "__main__":
    main()
