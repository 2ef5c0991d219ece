"""Image models of timm: `make .venv/ecosystem .venv/torchvision` installs it apart, with torchvision."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.torchvision_cpu import import_torchvision
from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.worker import Work


def _timm() -> Any:
    import_torchvision()
    apart = str(Path(sys.prefix) / "ecosystem")
    if apart not in sys.path:
        sys.path.append(apart)
    return importlib.import_module("timm")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimmWork(Work):
    """A network of timm with random weights."""

    model: str

    @property
    def key(self) -> str:
        return f"{self.model}-{self.batch}"

    def build(self) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        model = _timm().create_model(self.model, pretrained=False).eval()
        shape = model.pretrained_cfg["input_size"]
        return model, Inputs((torch.randn(self.batch or 1, *shape, generator=torch.Generator().manual_seed(0)),))

    def calibration(self, inputs: Inputs) -> list[Inputs]:
        return [inputs]


def drawn(seed: int, millions: float, pixels: int) -> Iterator[str]:
    """Names of networks in the order of the draw, without those that are too large or take no images."""
    names = _timm().list_models()
    random.Random(seed).shuffle(names)
    for name in names:
        with torch.device("meta"):
            try:
                model = _timm().create_model(name, pretrained=False)
            except Exception as error:  # some compute with their weights while they are made
                print(f"{name} is passed over: {type(error).__name__}: {error}", file=sys.stderr)
                continue
        shape = model.pretrained_cfg.get("input_size", ())
        size = sum(parameter.numel() for parameter in model.parameters())
        if len(shape) == 3 and max(shape) <= pixels and size <= millions * 1e6:
            yield name
