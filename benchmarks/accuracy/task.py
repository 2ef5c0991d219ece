"""A task: a trained model, data that it has not seen, and how well it does."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.models import Size
from torch_hybrid_backend import load_compressed, save_compressed
from torch_hybrid_backend.config import Config

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """`model` is in eval mode; `calibration` are positional arguments, none of which `judge` uses where it can be helped.

    `judge` tries a callable in the model's place: (items,) float64. For an accuracy 1 is a right answer and 0 a wrong one; for a perplexity
    they are the losses of texts, in nats per byte.
    """

    model: nn.Module
    calibration: tuple[tuple[torch.Tensor, ...], ...]
    judge: Callable[[Call], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """`measure`: "accuracy", the share of right answers in percent, or "perplexity". `prepare` trains where no weights are kept.

    `limits`: by change, the most that it may cost: points of an accuracy, percent of a perplexity.
    """

    name: str
    title: str
    measure: Literal["accuracy", "perplexity"]
    prepare: Callable[[Size], Prepared]
    limits: Mapping[str, float] = field(default_factory=dict, hash=False)

    def holds(self, change: str, difference: float) -> bool | None:
        """True if a difference, as `difference` gives it, is within the change's limit; None where there is none."""
        limit = self.limits.get(change)
        if limit is None:
            return None
        return difference >= -limit if self.measure == "accuracy" else difference <= limit

    def score(self, items: torch.Tensor) -> float:
        """The percentage of right answers, or the perplexity."""
        mean = float(items.mean())
        return 100 * mean if self.measure == "accuracy" else math.exp(mean)

    def difference(self, items: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
        """The difference of accuracies in points, of perplexities in percent, and its standard error. Below 0 means worse for accuracies, above
        0 for perplexities.

        Both were judged by the same items, so that only what changed between them counts, not how hard each item is.
        """
        changes = items - reference
        mean, error = float(changes.mean()), float(changes.std()) / math.sqrt(len(changes))
        if self.measure == "accuracy":
            return 100 * mean, 100 * error
        return 100 * math.expm1(mean), 100 * math.exp(mean) * error


def trained(model: nn.Module, name: str, source: ModuleType, train: Callable[[nn.Module], None]) -> nn.Module:
    """`model`, trained and in eval mode. Its weights are kept under the cache folder, for as long as the text of `source` stays the same."""
    version = hashlib.sha256(inspect.getsource(source).encode()).hexdigest()[:16]
    path = Config.from_env(os.environ).cache_dir / "accuracy" / f"{name}-{version}.hybridw"
    if path.exists():
        load_compressed(path, into=model)
    else:
        train(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_compressed(model, path)
    return model.eval()


def batches(*tensors: torch.Tensor, size: int) -> list[tuple[torch.Tensor, ...]]:
    """Slices of `size` rows; what is left at the end is dropped, so that one compiled graph serves all."""
    return [tuple(t[k : k + size] for t in tensors) for k in range(0, len(tensors[0]) - size + 1, size)]
