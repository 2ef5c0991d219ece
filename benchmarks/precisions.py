"""Models of the zoo in every precision, beside eager and our own float32.

    python -m benchmarks.precisions --models resnet50 bert_base
    python -m benchmarks.precisions --batch 8 --precisions bf16 quantize --out precisions.json

"quantize" is `torch_hybrid_backend.quantize` with extremes of the input that is timed ("none" for models of text), the others are values of
`options={"precision": ...}`. Weights are random, so the accuracy gate is set wide: what precision costs in accuracy tells
`benchmarks.accuracy`. All run in turn in one process; figures are milliseconds of one call, the lower quartile of the rounds. Run it on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path

import torch

import torch_hybrid_backend
from benchmarks import machine
from benchmarks.models import ZOO
from torch_hybrid_backend.core.precision import AS_WRITTEN, PRECISIONS
from torch_hybrid_backend.measure import measure

QUANTIZE = "quantize"
_CHOICES = (QUANTIZE, *(precision for precision in PRECISIONS if precision != AS_WRITTEN))


def timed(name: str, batch: int, precisions: list[str], budget_s: float) -> dict[str, dict[str, float]]:
    """Seconds to compile and milliseconds of a call, by side."""
    model, inputs = ZOO[name].make("full").eval(), ZOO[name].inputs("full", batch=batch)
    calibration = "naive" if inputs[0].is_floating_point() else "none"
    sides: dict[str, Callable[..., object]] = {"eager": model, "float32": torch.compile(model, backend="hybrid")}
    for precision in precisions:
        # A copy each: Dynamo keeps what it compiled with the code that it is compiled from.
        own = copy.deepcopy(model)
        if precision == QUANTIZE:
            quantized = torch_hybrid_backend.quantize(own, [inputs], calibration=calibration)
            sides[precision] = torch.compile(quantized, backend="hybrid")
        else:
            options = {"precision": precision, "precision_tolerance": 1.0}
            sides[precision] = torch.compile(own, backend="hybrid", options=options)
    compiling = {}
    for side, call in sides.items():
        start = time.perf_counter()
        call(*inputs)
        call(*inputs)
        compiling[side] = time.perf_counter() - start
    calls = [lambda call=call: call(*inputs) for call in sides.values()]
    timings = measure(calls, budget_s)
    return {
        side: {"compile_s": compiling[side], "ms": timing.low_us / 1e3}
        for side, timing in zip(sides, timings, strict=True)
    }


def main() -> None:
    """Every model in every precision that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(ZOO), default=["resnet50", "mobilenet_v2", "bert_base"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precisions", nargs="+", choices=_CHOICES, default=["bf16", QUANTIZE])
    parser.add_argument("--budget-s", type=float, default=10.0, help="seconds of timing for each model")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    found = {}
    with torch.no_grad():
        for name in arguments.models:
            found[name] = timed(name, arguments.batch, arguments.precisions, arguments.budget_s)
            plain = found[name]["float32"]["ms"]
            shown = (
                f"{side} {took['ms']:.2f} ms ({plain / took['ms']:.2f} x float32, compiled in {took['compile_s']:.1f} s)"
                for side, took in found[name].items()
            )
            print(f"{name}, batch {arguments.batch}: " + "; ".join(shown), flush=True)
    if arguments.out is not None:
        machine.write_record(arguments.out, batch=arguments.batch, models=found)


if __name__ == "__main__":
    main()
