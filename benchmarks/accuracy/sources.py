"""A small Llama, trained on the standard library's sources byte by byte, predicts files that it has not seen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from benchmarks.accuracy.task import Call, Prepared, batches, trained
from benchmarks.models import Size, from_transformers

_WINDOW = 128
_BATCH = 16
_COMMON = {"vocab_size": 256, "use_cache": False, "bos_token_id": None, "eos_token_id": None}
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_FULL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


class Predictor(nn.Module):
    """The scores of the next byte: bytes (batch, length) int64 -> (batch, length, 256)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.llama = from_transformers("LlamaForCausalLM", "LlamaConfig", _COMMON | _SMALL, _COMMON | _FULL)(size)

    def forward(self, octets: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.llama(octets).logits
        return scores


def _windows() -> tuple[torch.Tensor, torch.Tensor]:
    """(n, 129) int64 each: of the files to learn from, and of every tenth, which is not."""
    files = sorted(path for path in Path(os.__file__).parent.glob("*.py"))
    parts = []
    for rest in (False, True):
        chosen = [path for k, path in enumerate(files) if (k % 10 == 0) == rest]
        octets = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in chosen)), dtype=torch.uint8)
        parts.append(octets[: len(octets) // (_WINDOW + 1) * (_WINDOW + 1)].view(-1, _WINDOW + 1).long())
    return parts[0], parts[1]


def _loss(call: Call, windows: torch.Tensor) -> torch.Tensor:
    """The loss of each window, in nats per byte."""
    scores = call(windows[:, :-1].contiguous())
    return functional.cross_entropy(scores.transpose(1, 2), windows[:, 1:], reduction="none").mean(1)


def prepare(size: Size) -> Prepared:
    seen, held_out = _windows()
    steps, tested = (800, 64) if size == "full" else (30, 2)

    def train(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        model.train()
        for _ in range(steps):
            loss = _loss(model, seen[torch.randint(len(seen), (_BATCH,), generator=generator)]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = trained(Predictor(size), f"llama-{size}", sys.modules[__name__], train)
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(2))
    inputs = batches(held_out[order], size=_BATCH)[:tested]

    def judge(call: Call) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([_loss(call, windows) for (windows,) in inputs]).double()

    calibration = tuple((windows[:, :-1].contiguous(),) for (windows,) in batches(seen[: 8 * _BATCH], size=_BATCH))
    return Prepared(model, calibration, judge)
