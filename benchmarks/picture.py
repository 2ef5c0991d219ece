"""A record as a picture: how much faster than eager each peer runs each model, a panel for each batch size.

python -m benchmarks.picture        # zoo.svg beside every zoo.json under benchmarks/results/, and so for each precision
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import results
from benchmarks.catalogue import MODELS
from benchmarks.results import OURS, Record
from benchmarks.table import RESULTS
from torch_hybrid_backend.bench.peers import title

_INSTALL = "the picture needs matplotlib: pip install matplotlib"
_BASE = "eager"
_FLOAT32_BASE = "eager_float32"  # in records of other precisions


def draw(record: Record, path: Path) -> str:
    """Write the picture (.svg, .png or .pdf, by the name). Returns why there is none, or "": without matplotlib, or without figures."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return _INSTALL
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "benchmarks"  # the same record gives the same file
    import matplotlib.pyplot as plt

    batches = sorted({batch for _, batch in results.rows(record)})
    panels = {batch: _speeds(record, batch) for batch in batches}
    panels = {batch: speeds for batch, speeds in panels.items() if speeds}
    if not panels:
        return "nothing to draw: no model has a result in eager"
    height = 1.4 + 0.3 * max(len(speeds) for speeds in panels.values())
    figure, axes = plt.subplots(1, len(panels), figsize=(1.5 + 5.5 * len(panels), height), squeeze=False)
    for axis, (batch, speeds) in zip(axes[0], panels.items(), strict=True):
        models = list(reversed(speeds))
        for name in results.peers(record):
            at = [(speeds[model][name], y) for y, model in enumerate(models) if name in speeds[model]]
            ours = name == OURS
            axis.scatter(
                [x for x, _ in at],
                [y for _, y in at],
                label=title(name),
                s=70 if ours else 28,
                marker="D" if ours else "o",
                zorder=2 if ours else 3,  # the large mark below: it would hide those beside it
                edgecolors="black" if ours else "none",
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axis.set_yticks(range(len(models)), [MODELS[model].title if model in MODELS else model for model in models])
        axis.set_ylim(-0.6, len(models) - 0.4)
        axis.grid(axis="both", alpha=0.3)
        axis.set_title(f"batch {batch}: speed over eager")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=7, frameon=False, fontsize=8)
    about = record["machine"]
    figure.suptitle(
        f"{results.processor(record)}, {about['threads']} threads, {about['capability']}, {results.precision(record)}",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    # On white, whatever the page's colour: marks and letters are made for it.
    figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return ""


def _speeds(record: Record, batch: int) -> dict[str, dict[str, float]]:
    """Model -> peer -> the time of eager in float32 over the peer's."""
    speeds: dict[str, dict[str, float]] = {}
    for row in results.rows(record):
        times = results.medians(record, row)
        base = times.get(_FLOAT32_BASE, times.get(_BASE))
        if row[1] == batch and base is not None:
            speeds[row[0]] = {peer: base / ms for peer, ms in times.items()}
    return speeds


def main() -> int:
    """Draw all records. Returns 1 where one has no picture."""
    status = 0
    for path in sorted(RESULTS.rglob("zoo*.json")):
        if why := draw(json.loads(path.read_text()), path.with_suffix(".svg")):
            print(f"{path}: {why}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
