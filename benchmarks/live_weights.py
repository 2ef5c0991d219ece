"""The cost, in each call, of noticing weights that were changed behind PyTorch's version counters.

    python -m benchmarks.live_weights [--models resnet50,mobilenet_v2] [--seconds 4]

Each model runs, compiled; after each call a guard over all its parameters and buffers is asked whether they changed, as a plan does for
those that it folded or packed: an upper bound, for some weights are read in place. Guards of each kind are asked in turn, with the
caches as the call left them. `every byte` is what comparing all weights in each call would cost. Then one weight is written through
`.data`, and the calls are counted until each kind has seen it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch

from benchmarks.models import ZOO
from torch_hybrid_backend.runtime.native.ops import CALLS_PER_ROUND, Guard, GuardKind, watches_writes

_TITLES = {
    GuardKind.LIVE: "watched",
    GuardKind.LIVE_UNWATCHED: "compared in turn",
    GuardKind.EVERY_BYTE: "every byte",
}


def _calls_until_seen(guard: Guard) -> int:
    return next(call for call in itertools.count(1) if guard.is_stale())


def _row(name: str, seconds: float) -> str:
    model = ZOO[name].build("full")
    inputs = ZOO[name].inputs("full", batch=1)
    weights = [*model.parameters(), *model.buffers()]
    fast = torch.compile(model, backend="hybrid")
    guards = {kind: Guard(weights, kind) for kind in _TITLES}
    call_us: list[float] = []
    guard_us: dict[GuardKind, list[float]] = {kind: [] for kind in _TITLES}
    with torch.no_grad():
        for _ in range(3):
            fast(*inputs)
        end = time.perf_counter() + seconds
        for kind in itertools.cycle(_TITLES):
            start = time.perf_counter()
            fast(*inputs)
            called = time.perf_counter()
            assert not guards[kind].is_stale()
            asked = time.perf_counter()
            call_us.append((called - start) * 1e6)
            guard_us[kind].append((asked - called) * 1e6)
            if asked > end and len(call_us) > 3 * len(_TITLES):
                break
    call = statistics.median(call_us)
    cells = [f"{name:<18}", f"{sum(w.nbytes for w in weights) / 2**20:7.1f}", f"{call:9.0f}"]
    for kind in _TITLES:
        cost = statistics.median(guard_us[kind])
        cells.append(f"{cost:8.1f} ({100 * cost / call:5.2f} %)")
    largest = max(weights, key=torch.Tensor.numel)
    largest.data.view(-1)[largest.numel() // 3] += 1
    cells.append(" / ".join(str(_calls_until_seen(guard)) for guard in guards.values()))
    return "  ".join(cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="mobilenet_v2,resnet50,convnext_tiny,bert_base", help="names in benchmarks/models.py"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="for each model")
    arguments = parser.parse_args()
    print(
        f"{torch.get_num_threads()} threads; the kernel watches memory: {watches_writes()}; a round is {CALLS_PER_ROUND} calls"
    )
    head = [f"{'model':<18}", f"{'MiB':>7}", f"{'call us':>9}", *(f"{title + ' us':>18}" for title in _TITLES.values())]
    print("  ".join([*head, "calls until seen"]))
    for name in arguments.models.split(","):
        print(_row(name, arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
