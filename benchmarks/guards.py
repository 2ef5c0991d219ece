"""Times of a call with Dynamo's guards on modules, with this backend's, and with none: docs/guards.md.

python -m benchmarks.guards --models mobilenet_v2,mobilenet_v3_large,shufflenet_v2,densenet121,bert_base
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from benchmarks.catalogue import MODELS
from torch_hybrid_backend.backend import hybrid
from torch_hybrid_backend.driver import module_guards
from torch_hybrid_backend.measuring.measure import measure


def _dynamos_alone() -> AbstractContextManager[object]:
    return mock.patch.object(module_guards, "_shorten")


# Title, what holds while a model is compiled, options of `torch.compile`.
WAYS: tuple[tuple[str, Callable[[], AbstractContextManager[object]], dict[str, Any]], ...] = (
    ("Dynamo's guards", _dynamos_alone, {}),
    ("this backend's", contextlib.nullcontext, {}),
    ("none on modules", _dynamos_alone, {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}),
)


def times_ms(model: str, seconds: float) -> list[float]:
    """Medians of one call on one image, in the order of WAYS, timed in turn in this process."""
    module, inputs = MODELS[model].build("full"), MODELS[model].inputs("full", 1)
    calls = []
    for _, context, options in WAYS:
        # A backend object of its own: Dynamo would take the same backend's first compilation for all three.
        # torch.compile takes the filter out of the dictionary.
        compiled = torch.compile(module, backend=functools.partial(hybrid), options=dict(options))
        with context():
            compiled(*inputs)
        calls.append(lambda compiled=compiled: compiled(*inputs))
    return [timing.median_us / 1e3 for timing in measure(calls, seconds, max_rounds=2000)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of docs/guards.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guards", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="mobilenet_v2,mobilenet_v3_large,shufflenet_v2,densenet121,bert_base")
    parser.add_argument("--seconds", type=float, default=10.0, help="timing of one model")
    arguments = parser.parse_args(argv)
    print("| model | " + " | ".join(title for title, _, _ in WAYS) + " |\n|---" + "|---:" * len(WAYS) + "|")
    with torch.no_grad():
        for model in arguments.models.split(","):
            cells = [f"{ms:.2f}" for ms in times_ms(model, arguments.seconds)]
            print(f"| {MODELS[model].title} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
