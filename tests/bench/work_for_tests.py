"""A small model as work for peers, and results of peers on it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.compare import Effort, compare, reference
from torch_hybrid_backend.bench.peers import FLOAT32, by_name
from torch_hybrid_backend.bench.worker import Work

SHORT = Effort(seconds=0.1, rounds=2, timeout_s=300.0)


class ThreeLayers(nn.Module):
    """Linear layers. The output is a dict, and one argument is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (128, 256, 128, 16)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return {"logits": self.layers[-1](x) * scale}


def three_layers() -> nn.Module:
    """The model, with the same weights every time."""
    torch.manual_seed(0)
    return ThreeLayers().eval()


def rows(seed: int = 0) -> Inputs:
    """Inputs: four rows, and the argument that is no tensor."""
    return Inputs((torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)),), {"scale": 2.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallWork(Work):
    """`ThreeLayers`, calibrated on other inputs than those that are timed."""

    precision_tolerance: float | None = 1.0

    @property
    def key(self) -> str:
        return "three-layers"

    def build(self) -> tuple[nn.Module, Inputs]:
        return three_layers(), rows()

    def calibration(self, inputs: Inputs) -> list[Inputs]:
        return [rows(seed) for seed in range(1, 5)]


def measured(peer: str, folder: Path, precision: str = FLOAT32, *, training: bool = False) -> dict[str, Any]:
    """The result of a peer on the small model in its own process. Skips the test if the peer is not installed."""
    if why := by_name()[peer].missing(precision):
        pytest.skip(why)
    work = SmallWork(threads=1, folder=folder, batch=4, precision=precision, training=training)
    facts = reference(work, SHORT, folder / "log")
    [result] = compare(work, facts, [by_name()[peer]], SHORT, folder / "log", lambda _: None)
    return result


class _Token(nn.Module):
    """Passes a view of a parameter to a module, which PyTorch's counter of operations does not take where gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 128))
        self.layer = nn.Linear(128, 16)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale + self.layer(self.token.expand(x.shape[0], -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork(SmallWork):
    """`_Token`."""

    def build(self) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        return _Token().eval(), rows()
