"""Calls that overhead decides: small models as eager, hybrid, hybrid's plan and inductor run them, and what Dynamo's guards alone cost.

    python -m benchmarks.small_calls
    python -m benchmarks.small_calls --models topics softmax --out small_calls.json

All run in turn in one process, outputs are compared first. Figures are microseconds of one call of a burst of 20 (the first of them
finds the caches as another left them), the lower quartile of the rounds; `guards`
is Dynamo's own backend "eager" less eager, `runs` who runs whole calls of hybrid, `plan` hybrid with `placement=estimate`, which always uses
its plan. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import machine
from benchmarks.models import tensors
from benchmarks.overhead import TenOperators
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.measuring.measure import measure

Inputs = tuple[torch.Tensor, ...]
_BURST = 20


class Topics(nn.Module):
    """The topics of texts. words: (n,) int64, offsets: (texts,) int64. Returns: scores and topics, (texts, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(1000, 64)
        self.topics = nn.Linear(64, 20)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, topics = torch.topk(torch.softmax(self.topics(self.words(words, offsets)), -1), 5)
        return scores, topics


class Sorted(nn.Module):
    """Operators of which no engine takes the second. x: (n,).  Returns: (n,)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x * 2 + 1)[0] - 1


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


# Name -> (model, inputs).
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "topics": (Topics, lambda: (torch.randint(0, 1000, (64,)), torch.arange(0, 64, 8))),
    "perceptron": (_perceptron, lambda: (torch.randn(1, 16),)),
    "ten_operators": (TenOperators, lambda: (torch.tensor([0.1, 0.5, 1.0, 2.0]),)),
    "ten_operators_64k": (TenOperators, lambda: (torch.rand(65536) + 0.1,)),
    "softmax": (lambda: nn.Softmax(-1), lambda: (torch.randn(1, 128),)),
    "sort": (Sorted, lambda: (torch.randn(64),)),
    "layer_norm": (lambda: nn.Sequential(nn.LayerNorm(64), nn.GELU()), lambda: (torch.randn(8, 64),)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), lambda: (torch.randn(1, 3, 16, 16),)),
    "attention": (lambda: nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), lambda: (torch.randn(1, 8, 32),)),
    "lstm_cell": (lambda: nn.LSTMCell(16, 16), lambda: (torch.randn(1, 16),)),
}


def compare(name: str, budget_s: float) -> dict[str, object]:
    """The record of one model. Raises AssertionError where an output is wrong."""
    torch.manual_seed(0)
    build, make_inputs = MODELS[name]
    model, inputs = build().eval(), make_inputs()
    plans: list[Plan] = []
    config = Config.from_env(os.environ)
    backends: dict[str, Any] = {
        "hybrid": functools.partial(compile_graph, config=config, on_plan=plans.append),
        "plan": functools.partial(compile_graph, config=config.with_options({"placement": "estimate"}, None)),
        "inductor": "inductor",
        "dynamo": "eager",
    }
    calls: dict[str, Callable[[], object]] = {"eager": lambda: model(*inputs)}
    with torch.no_grad():
        for peer, backend in backends.items():
            compiled = _compiled(model, backend)
            for _ in range(3):
                for ours, eager in zip(tensors(compiled(*inputs)), tensors(model(*inputs)), strict=True):
                    torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)
            calls[peer] = functools.partial(compiled, *inputs)
        bursts = [functools.partial(_burst, call) for call in calls.values()]
        timings = measure(bursts, budget_s, max_rounds=100_000)
    us = {peer: round(timing.low_us / _BURST, 1) for peer, timing in zip(calls, timings, strict=True)}
    call = plans[-1].call if plans else None
    guards = round(us.pop("dynamo") - us["eager"], 1)
    return {"model": name, **us, "guards": guards, "runs": call.engine if call is not None else "plan"}


def _burst(call: Callable[[], object]) -> None:
    for _ in range(_BURST):
        call()


def _compiled(model: nn.Module, backend: Any) -> Callable[..., Any]:
    """The model compiled as the only one of its code: Dynamo looks through all that was compiled of one code, call by call."""
    function: dict[str, Any] = {}
    exec("def call(model, *inputs): return model(*inputs)", function)
    compiled = torch.compile(function["call"], backend=backend, dynamic=False)
    return functools.partial(compiled, model)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_calls", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--budget-s", type=float, default=2.0, help="seconds of timing per model")
    parser.add_argument("--out", type=Path, help="write the records here, as JSON")
    arguments = parser.parse_args(argv)
    records: list[dict[str, object]] = []
    for name in arguments.models:
        records.append(compare(name, arguments.budget_s))
        sys.stdout.write("  ".join(f"{key} {value}" for key, value in records[-1].items()) + "\n")
        sys.stdout.flush()
    if arguments.out:
        machine.write_record(arguments.out, records=records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
