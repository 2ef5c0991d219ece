"""The time that a call saves without Dynamo's guards on modules: docs/guards.md.

python -m benchmarks.guards --models mobilenet_v2,mobilenet_v3_large
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.catalogue import MODELS
from torch_hybrid_backend.backend import hybrid
from torch_hybrid_backend.measuring.measure import measure

FILTERS: tuple[tuple[str, Callable[..., object] | None], ...] = (
    ("all guards", None),
    ("without those on PyTorch's modules", torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe),
    ("without those on any module", torch.compiler.skip_guard_on_all_nn_modules_unsafe),
)


def times_ms(model: str, seconds: float) -> list[float]:
    """Medians of one call on one image, in the order of FILTERS, timed in turn in this process."""
    module, inputs = MODELS[model].build("full"), MODELS[model].inputs("full", 1)
    calls = []
    for _, guard_filter in FILTERS:
        options = {} if guard_filter is None else {"guard_filter_fn": guard_filter}
        # A backend object of its own: Dynamo would take the same backend's first compilation for all three.
        compiled = torch.compile(module, backend=functools.partial(hybrid), options=options)
        compiled(*inputs)
        calls.append(lambda compiled=compiled: compiled(*inputs))
    return [timing.median_us / 1e3 for timing in measure(calls, seconds, max_rounds=2000)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of docs/guards.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guards", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="mobilenet_v2,mobilenet_v3_large")
    parser.add_argument("--seconds", type=float, default=10.0, help="timing of one model")
    arguments = parser.parse_args(argv)
    print("| model | " + " | ".join(title for title, _ in FILTERS) + " |\n|---" + "|---:" * len(FILTERS) + "|")
    with torch.no_grad():
        for model in arguments.models.split(","):
            cells = [f"{ms:.2f}" for ms in times_ms(model, arguments.seconds)]
            print(f"| {MODELS[model].title} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
