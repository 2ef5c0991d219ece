"""Training: the models that tests train, and the time of one training step on eager and on a compiled model.

    python -m benchmarks.training                                   # every model at its full size
    python -m benchmarks.training --models gpt2 --optimiser adamw --rounds 30 --out training.json
    python -m benchmarks.training --models resnet18 --plans         # who runs what, forward and backward

One step is zero_grad, forward, loss, backward and the optimiser's step. Both models start from equal weights and take equal
steps in turn (eager, hybrid, eager, ...), so that a machine that slows down for a while slows both; the first losses are
compared before anything is timed. Figures are milliseconds: the median of the rounds. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import machine
from benchmarks.models import Size
from benchmarks.networks import LstmClassifier
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan

# Steps taken, and not timed, at first: compilation, placement, the optimiser's state.
_WARM_UP = 3
# Losses of the first step, before any weight changed, must agree so well.
_LOSS_TOLERANCE = 1e-3

Batch = tuple[torch.Tensor, torch.Tensor]
Forward = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A model to train. `make(size)` builds it, in training mode and without dropout, so that runs are comparable;
    `batch(size)` draws inputs and targets; `loss(forward, batch)` is one scalar."""

    name: str
    title: str
    make: Callable[[Size], nn.Module]
    batch: Callable[[Size], Batch]
    loss: Callable[[Forward, Batch], torch.Tensor]


class RecurrentClassifier(nn.Module):
    """Embedding, `torch.nn.LSTM` of two layers, a linear head on the last step.

    tokens: (batch, length) int64.  Returns: (batch, classes) float32.
    """

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        logits: torch.Tensor = self.head(states[:, -1])
        return logits


def _resnet18(size: Size) -> nn.Module:
    import transformers

    widths = [16, 32, 64, 128] if size == "small" else [64, 128, 256, 512]
    config = transformers.ResNetConfig(
        embedding_size=widths[0], hidden_sizes=widths, depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return transformers.ResNetForImageClassification(config)


def _gpt2(size: Size) -> nn.Module:
    import transformers

    width, layers, vocabulary = (64, 2, 100) if size == "small" else (384, 6, 5000)
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=layers,
        n_head=4 if size == "small" else 6,
        n_positions=128,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def _encoder(size: Size) -> nn.Module:
    import transformers

    width, layers, heads = (64, 2, 4) if size == "small" else (384, 6, 12)
    config = transformers.BertConfig(
        vocab_size=100 if size == "small" else 5000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return transformers.BertForSequenceClassification(config)


def _images(size: Size) -> Batch:
    count, side = (8, 64) if size == "small" else (32, 64)
    return torch.randn(count, 3, side, side), torch.randint(0, 10, (count,))


def _tokens(size: Size) -> Batch:
    count, length, vocabulary = (8, 16, 100) if size == "small" else (16, 64, 5000)
    return torch.randint(0, vocabulary, (count, length)), torch.randint(0, 10, (count,))


def _outputs(value: Any) -> torch.Tensor:
    """The logits of a transformers output, or the tensor a plain module returned."""
    logits: torch.Tensor = value if isinstance(value, torch.Tensor) else value.logits
    return logits


def _classify(forward: Forward, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(_outputs(forward(inputs)), targets)


def _predict_next(forward: Forward, batch: Batch) -> torch.Tensor:
    tokens, _ = batch
    logits = _outputs(forward(tokens))[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _written_lstm(size: Size) -> nn.Module:
    return LstmClassifier(100, 32, 10) if size == "small" else LstmClassifier(5000, 256, 10)


def _torch_lstm(size: Size) -> nn.Module:
    return RecurrentClassifier(100, 32, 10) if size == "small" else RecurrentClassifier(5000, 256, 10)


_CASES = (
    TrainingCase("resnet18", "ResNet-18", _resnet18, _images, _classify),
    TrainingCase("gpt2", "GPT-2, small", _gpt2, _tokens, _predict_next),
    TrainingCase("lstm", "LSTM", _written_lstm, _tokens, _classify),
    TrainingCase("torch_lstm", "torch.nn.LSTM", _torch_lstm, _tokens, _classify),
    TrainingCase("encoder", "BERT, MiniLM's size", _encoder, _tokens, _classify),
)
CASES: dict[str, TrainingCase] = {case.name: case for case in _CASES}

OPTIMISERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def training_step(
    case: TrainingCase, model: nn.Module, forward: Forward, optimiser: torch.optim.Optimizer, batch: Batch
) -> Callable[[], float]:
    """A training step as a function that returns the loss. `forward` is `model`, or `model` compiled."""
    del model  # the optimiser holds its parameters

    def step() -> float:
        optimiser.zero_grad()
        loss = case.loss(forward, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        return loss.item()

    return step


def compare(
    case: TrainingCase, size: Size, optimiser: str, rounds: int, on_plan: Callable[[Plan], None] | None
) -> dict[str, object]:
    """Times of one step, eager against hybrid, in milliseconds. Raises RuntimeError where the first losses differ."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = case.make(size).train()
    batch = case.batch(size)
    twin = copy.deepcopy(model)
    config = Config.from_env(os.environ)
    compiled = torch.compile(twin, backend=functools.partial(compile_graph, config=config, on_plan=on_plan))
    steps = [
        training_step(case, each, forward, OPTIMISERS[optimiser](each), batch)
        for each, forward in ((model, model), (twin, compiled))
    ]
    start = time.perf_counter()
    expected, loss = (step() for step in steps)
    compile_s = time.perf_counter() - start
    if abs(loss - expected) > _LOSS_TOLERANCE * abs(expected):
        raise RuntimeError(f"{case.title}: the first loss is {loss}, eager's {expected}")
    for _ in range(_WARM_UP):
        for step in steps:
            step()
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for step, taken in zip(steps, samples, strict=True):
            before = time.perf_counter()
            step()
            taken.append((time.perf_counter() - before) * 1e3)
    eager_ms, hybrid_ms = map(statistics.median, samples)
    ratio = statistics.median(ours / theirs for theirs, ours in zip(*samples, strict=True))
    return {
        "model": case.name,
        "optimiser": optimiser,
        "size": size,
        "eager_ms": round(eager_ms, 3),
        "hybrid_ms": round(hybrid_ms, 3),
        "ratio": round(ratio, 3),
        "compile_s": round(compile_s, 1),
        "rounds": rounds,
    }


def describe_plan(plan: Plan) -> str:
    """Engines of operators in one graph: operators by engine, eager's by kind, and the costs of each region."""
    engines = collections.Counter(node.engine for node in plan.nodes)
    eager = collections.Counter(node.operator for node in plan.nodes if node.engine == "eager")
    lines = [f"{plan.kind}: {dict(engines)}, {len(plan.regions)} regions; eager runs {dict(eager.most_common())}"]
    for region in plan.regions:
        costs = ", ".join(f"{cost.engine} {cost.microseconds:.0f} us ({cost.kind})" for cost in region.costs)
        lines.append(f"  {region.name}: {region.engine}, {len(region.node_names)} operators; {costs}")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES), help="names, comma separated; default: all")
    parser.add_argument("--optimiser", choices=tuple(OPTIMISERS), default="sgd")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--rounds", type=int, default=20, choices=range(1, 10_000), metavar="N")
    parser.add_argument("--plans", action="store_true", help="also print who runs what")
    parser.add_argument("--out", type=Path, help="JSON file to write; written after every model")
    arguments = parser.parse_args(argv)
    arguments.models = [name.strip() for name in arguments.models.split(",") if name.strip()]
    unknown = [name for name in arguments.models if name not in CASES]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; legal: {', '.join(CASES)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Time the models and print a table. `ratio` is hybrid's time over eager's, the median over the rounds: below 1 is faster."""
    arguments = _arguments(argv)
    results: list[dict[str, object]] = []
    print("| model | optimiser | eager ms | hybrid ms | ratio | first step s |\n|---|---|--:|--:|--:|--:|", flush=True)
    for name in arguments.models:
        plans: list[Plan] = []
        result = compare(CASES[name], arguments.size, arguments.optimiser, arguments.rounds, plans.append)
        results.append(result)
        cells = [str(result[key]) for key in ("optimiser", "eager_ms", "hybrid_ms", "ratio", "compile_s")]
        print("| " + " | ".join([CASES[name].title, *cells]) + " |", flush=True)
        if arguments.plans:
            print("\n".join(map(describe_plan, plans)), flush=True)
        if arguments.out:
            machine.write_record(arguments.out, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
