"""Training: the models that tests train, and the time and memory of one training step on eager and on compiled models.

    python -m benchmarks.training                                   # every model at its full size
    python -m benchmarks.training --models gpt2 --optimiser adamw --rounds 30 --out training.json
    python -m benchmarks.training --peers eager,hybrid --autocast   # in bfloat16
    python -m benchmarks.training --models resnet18 --plans         # who runs what, forward and backward

One step is zero_grad, forward, loss, backward and the optimiser's step. All models start from equal weights and take equal
steps in turn (eager, inductor, hybrid, eager, ...), so that a machine that slows down for a while slows all; the first losses are
compared before anything is timed. Figures are milliseconds: the median of the rounds. Memory is the most that a process of its own
holds in two steps (VmHWM), after three others. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import gc
import os
import re
import statistics
import subprocess
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
from benchmarks.networks import LstmClassifier, UNet
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan

# Steps taken, and not timed, at first: compilation, placement, the optimiser's state.
_WARM_UP = 3
# Losses of the first step, before any weight changed, must agree so well.
_LOSS_TOLERANCE, _AUTOCAST_TOLERANCE = 1e-3, 2e-2

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


def _mobilenet_v2(size: Size) -> nn.Module:
    import transformers

    width = 0.35 if size == "small" else 1.0
    config = transformers.MobileNetV2Config(
        num_labels=10, depth_multiplier=width, tf_padding=False, classifier_dropout_prob=0.0
    )
    return transformers.MobileNetV2ForImageClassification(config)


def _vit(size: Size) -> nn.Module:
    import transformers

    width, layers, side = (64, 2, 64) if size == "small" else (384, 12, 224)
    config = transformers.ViTConfig(
        image_size=side,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64 or 1,
        intermediate_size=4 * width,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def _unet(size: Size) -> nn.Module:
    return UNet(8, 2, 5) if size == "small" else UNet(32, 3, 5)


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
    count, side = (8, 64) if size == "small" else (8, 224)
    return torch.randn(count, 3, side, side), torch.randint(0, 10, (count,))


def _masks(size: Size) -> Batch:
    count, side = (2, 32) if size == "small" else (2, 128)
    return torch.randn(count, 3, side, side), torch.randint(0, 5, (count, side, side))


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
    TrainingCase("mobilenet_v2", "MobileNetV2", _mobilenet_v2, _images, _classify),
    TrainingCase("vit", "ViT, small", _vit, _images, _classify),
    TrainingCase("unet", "U-Net", _unet, _masks, _classify),
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


PEERS = ("eager", "inductor", "hybrid")


def steps_of(
    case: TrainingCase,
    size: Size,
    optimiser: str,
    peers: Sequence[str],
    autocast: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
) -> dict[str, Callable[[], float]]:
    """A training step for each peer, of models with equal weights on one batch."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = case.make(size).train()
    batch = case.batch(size)
    config = Config.from_env(os.environ)
    backends: dict[str, Any] = {
        "inductor": "inductor",
        "hybrid": functools.partial(compile_graph, config=config, on_plan=on_plan),
    }

    as_written = case.loss

    def loss(forward: Forward, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return as_written(forward, batch)

    case = dataclasses.replace(case, loss=loss)
    steps = {}
    for peer in peers:
        own = copy.deepcopy(model)
        forward = own if peer == "eager" else torch.compile(own, backend=backends[peer])
        steps[peer] = training_step(case, own, forward, OPTIMISERS[optimiser](own), batch)
    return steps


def compare(
    case: TrainingCase,
    size: Size,
    optimiser: str,
    rounds: int,
    on_plan: Callable[[Plan], None] | None,
    peers: Sequence[str] = ("eager", "hybrid"),
    autocast: bool = False,
) -> dict[str, object]:
    """Times of one step of each peer, in milliseconds. Raises RuntimeError where first losses differ from those of the first peer."""
    steps = steps_of(case, size, optimiser, peers, autocast, on_plan)
    losses, compile_s = {}, {}
    for peer, step in steps.items():
        start = time.perf_counter()
        losses[peer] = step()
        compile_s[peer] = time.perf_counter() - start
    expected = losses[peers[0]]
    tolerance = (_AUTOCAST_TOLERANCE if autocast else _LOSS_TOLERANCE) * abs(expected)
    for peer, loss in losses.items():
        if abs(loss - expected) > tolerance:
            raise RuntimeError(f"{case.title}: the first loss is {loss} on {peer}, {expected} on {peers[0]}")
    for _ in range(_WARM_UP):
        for step in steps.values():
            step()
    samples: dict[str, list[float]] = {peer: [] for peer in steps}
    for _ in range(rounds):
        for peer, step in steps.items():
            before = time.perf_counter()
            step()
            samples[peer].append((time.perf_counter() - before) * 1e3)
    return {
        "model": case.name,
        "optimiser": optimiser,
        "size": size,
        "autocast": autocast,
        **{f"{peer}_ms": round(statistics.median(taken), 3) for peer, taken in samples.items()},
        "first_step_s": {peer: round(seconds, 1) for peer, seconds in compile_s.items()},
        "rounds": rounds,
    }


def peak_mib(case: TrainingCase, size: Size, optimiser: str, peer: str, autocast: bool) -> float:
    """Peak resident MiB of this process in two steps of one peer, after three others (Linux)."""
    step = steps_of(case, size, optimiser, [peer], autocast)[peer]
    for _ in range(_WARM_UP):
        step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    for _ in range(2):
        step()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def _peaks(arguments: argparse.Namespace, name: str) -> dict[str, float]:
    """Peak memory of each peer, each in a process of its own."""
    peaks = {}
    for peer in arguments.peers:
        command = [sys.executable, "-m", "benchmarks.training", "--peak", peer, "--models", name]
        command += ["--optimiser", arguments.optimiser, "--size", arguments.size, *["--autocast"] * arguments.autocast]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[f"{peer}_mib"] = round(float(done.stdout.split()[-1]), 1)
    return peaks


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
    parser.add_argument("--peers", default=",".join(PEERS), help="eager, inductor, hybrid; default: all")
    parser.add_argument("--optimiser", choices=tuple(OPTIMISERS), default="sgd")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--rounds", type=int, default=20, choices=range(1, 10_000), metavar="N")
    parser.add_argument("--autocast", action="store_true", help="train in bfloat16, by torch.autocast")
    parser.add_argument("--no-memory", action="store_true", help="measure times alone")
    parser.add_argument("--plans", action="store_true", help="also print who runs what")
    parser.add_argument("--peak", choices=PEERS, help=argparse.SUPPRESS)  # in the child process that measures memory
    parser.add_argument("--out", type=Path, help="JSON file to write; written after every model")
    arguments = parser.parse_args(argv)
    for option, legal in (("models", tuple(CASES)), ("peers", PEERS)):
        given = [name.strip() for name in getattr(arguments, option).split(",") if name.strip()]
        setattr(arguments, option, given)
        unknown = [name for name in given if name not in legal]
        if unknown:
            parser.error(f"unknown name {unknown[0]!r} of --{option}; legal: {', '.join(legal)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the models and print a table: milliseconds and MiB by peer."""
    arguments = _arguments(argv)
    if arguments.peak:
        case = CASES[arguments.models[0]]
        print(peak_mib(case, arguments.size, arguments.optimiser, arguments.peak, arguments.autocast))
        return 0
    results: list[dict[str, object]] = []
    columns = [f"{peer}_{unit}" for unit in ("ms", "mib") for peer in arguments.peers]
    print(f"| model | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}", flush=True)
    for name in arguments.models:
        plans: list[Plan] = []
        result = compare(
            CASES[name],
            arguments.size,
            arguments.optimiser,
            arguments.rounds,
            plans.append,
            arguments.peers,
            arguments.autocast,
        )
        if not arguments.no_memory:
            result.update(_peaks(arguments, name))
        results.append(result)
        print("| " + " | ".join([CASES[name].title, *(str(result.get(key, "")) for key in columns)]) + " |", flush=True)
        if arguments.plans:
            print("\n".join(map(describe_plan, plans)), flush=True)
        if arguments.out:
            machine.write_record(arguments.out, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
