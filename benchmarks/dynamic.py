"""Dynamic shapes: a model compiled once for all sizes, against the same model compiled for each size and against eager.

    python -m benchmarks.dynamic                                       # every case
    python -m benchmarks.dynamic --models minilm gpt2 --out dynamic.json
    python -m benchmarks.dynamic --models bert_base --precision bf16    # eager stays float32
    python -m benchmarks.dynamic --models resnet50_sides                # height and width vary

For each size all three run in turn (eager, static, dynamic, ...), so that a machine that slows down for a while slows all; outputs are
compared first. Figures are milliseconds, the median of the rounds; `first` is the dynamic model's first call at that size, which lays out
a plan. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

from benchmarks import machine
from benchmarks.models import ZOO, Model, tensors
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.precision import DEFAULT_TOLERANCES, PRECISIONS
from torch_hybrid_backend.measuring.measure import measure

# (batch, length) of tokens, (batch, side) of images; the first is what the dynamic model is compiled with.
_SIZES = {
    "minilm": [(2, 40), (2, 17), (3, 64), (8, 33), (2, 128), (4, 251)],
    "bert_base": [(2, 40), (2, 17), (2, 128), (3, 100)],
    "gpt2": [(2, 40), (2, 17), (2, 128), (3, 100)],
    "t5_small_encoder": [(2, 40), (3, 100)],
    "resnet50": [(2, 224), (3, 224), (6, 224)],
    "mobilenet_v2": [(2, 224), (3, 224), (6, 224)],
}
# (height, width) of one image, of which every tenth is compared with a static compilation: 30 sizes, odd ones too.
_SIDES = [(224 + 32 * (n % 7 - 3) + n, 224 + 24 * (n % 5 - 2) + 3 * n) for n in range(30)]
# Rows whose images vary in height and width, by the model's name in the zoo.
_IMAGES = {"resnet50_sides": "resnet50", "mobilenet_v2_sides": "mobilenet_v2"}


def _inputs(model: Model, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Inputs of `batch` samples; tokens cut or repeated to `length`."""
    inputs = model.inputs("full", batch)
    if inputs[0].is_floating_point():
        return inputs
    return tuple(t.repeat(1, -(-length // t.shape[1]))[:, :length].contiguous() for t in inputs)


def _varying(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copies marked as of varying batch; tokens also of varying length."""
    copies = tuple(t.clone() for t in inputs)
    for copy in copies:
        for dimension in (0,) if copy.is_floating_point() else (0, 1):
            torch._dynamo.mark_dynamic(copy, dimension)
    return copies


def _compiled(
    model: nn.Module, precision: str, *, dynamic: bool | None, plans: list[Plan] | None = None
) -> Callable[..., Any]:
    config = Config.from_env(os.environ).with_options({"precision": precision}, None)
    on_plan = (plans if plans is not None else []).append
    backend = functools.partial(compile_graph, config=config, on_plan=on_plan)
    call: Callable[..., Any] = torch.compile(model, backend=backend, dynamic=dynamic)
    return call


def _check(found: torch.Tensor, eager: torch.Tensor, precision: str) -> None:
    if precision == "as-written":
        torch.testing.assert_close(found, eager, rtol=1e-2, atol=1e-2)
    else:
        error = float((found - eager).double().norm() / eager.double().norm())
        assert error <= DEFAULT_TOLERANCES[precision], f"off by {error:.2g} of its root mean square"


def compare(
    model: Model, sizes: Sequence[tuple[int, int]], budget_s: float, precision: str = "as-written"
) -> list[dict[str, object]]:
    """Compare at each size: a record per size. Raises AssertionError where an output is wrong."""
    module = model.build("full")
    plans: list[Plan] = []
    torch._dynamo.reset()
    dynamic = _compiled(module, precision, dynamic=None, plans=plans)
    records: list[dict[str, object]] = []
    with torch.no_grad():
        dynamic(*_varying(_inputs(model, *sizes[0])))
        for batch, length in sizes:
            inputs = _inputs(model, batch, length)
            varying = _varying(inputs)
            start = time.perf_counter()
            found = dynamic(*varying)
            first = time.perf_counter() - start
            for ours, eager in zip(tensors(found), tensors(module(*inputs)), strict=True):
                _check(ours, eager, precision)
            # Another instance: Dynamo keeps graphs by code, and guards the module that they were compiled for.
            static = _compiled(model.build("full"), precision, dynamic=False)
            with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                static(*inputs)
            calls = [lambda: module(*inputs), lambda: static(*inputs), lambda: dynamic(*varying)]  # noqa: B023 - run in this turn
            eager_ms, static_ms, dynamic_ms = (t.median_us / 1e3 for t in measure(calls, budget_s))
            records.append(
                {
                    "model": model.name,
                    "precision": precision,
                    "batch": batch,
                    "length": length,
                    "eager_ms": round(eager_ms, 3),
                    "static_ms": round(static_ms, 3),
                    "dynamic_ms": round(dynamic_ms, 3),
                    "dynamic_over_static": round(dynamic_ms / static_ms, 3),
                    "eager_over_dynamic": round(eager_ms / dynamic_ms, 3),
                    "first_ms": round(first * 1e3, 1),
                    "graphs": len(plans),
                }
            )
    return records


def compare_sides(model: Model, budget_s: float, precision: str = "as-written") -> list[dict[str, object]]:
    """Compare one compilation for all of `_SIDES` with eager, every tenth size with a static compilation: a record for each of those.

    Raises AssertionError where an output is wrong.
    """
    module, plans = model.build("full"), list[Plan]()
    torch._dynamo.reset()
    dynamic = _compiled(module, precision, dynamic=None, plans=plans)
    records: list[dict[str, object]] = []
    with torch.no_grad():
        for number, size in enumerate(_SIDES):
            (image,) = model.inputs("full", 1)
            image = torch.nn.functional.interpolate(image, size=size)
            for dimension in (2, 3):
                torch._dynamo.mark_dynamic(image, dimension)
            _check(dynamic(image), module(image), precision)
            if number % 10:
                continue
            static, fixed = _compiled(model.build("full"), precision, dynamic=False), image.clone()
            with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                static(fixed)
            calls = [lambda: module(fixed), lambda: static(fixed), lambda: dynamic(image)]  # noqa: B023 - run in this turn
            eager_ms, static_ms, dynamic_ms = (t.median_us / 1e3 for t in measure(calls, budget_s))
            record = {"model": model.name, "precision": precision, "height": size[0], "width": size[1]}
            record |= {
                "eager_ms": round(eager_ms, 3),
                "static_ms": round(static_ms, 3),
                "dynamic_ms": round(dynamic_ms, 3),
            }
            record |= {
                "dynamic_over_static": round(dynamic_ms / static_ms, 3),
                "eager_over_dynamic": round(eager_ms / dynamic_ms, 3),
            }
            records.append(record | {"graphs": len(plans)})
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dynamic", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=[*_SIZES, *_IMAGES], default=[*_SIZES, *_IMAGES])
    parser.add_argument("--budget-s", type=float, default=4.0, help="seconds of timing per size")
    parser.add_argument("--precision", choices=PRECISIONS, default="as-written", help="of the compiled models")
    parser.add_argument("--out", type=Path, help="write the records here, as JSON")
    arguments = parser.parse_args(argv)
    torch._dynamo.config.recompile_limit = 64  # the static models share their code with the dynamic one
    records: list[dict[str, object]] = []
    for name in arguments.models:
        if name in _IMAGES:
            found = compare_sides(ZOO[_IMAGES[name]], arguments.budget_s, arguments.precision)
        else:
            found = compare(ZOO[name], _SIZES[name], arguments.budget_s, arguments.precision)
        for record in found:
            records.append(record)
            sys.stdout.write("  ".join(f"{key} {value}" for key, value in record.items()) + "\n")
            sys.stdout.flush()
    if arguments.out:
        machine.write_record(arguments.out, records=records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
