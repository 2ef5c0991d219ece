"""A small model as a `.hybrid` file, and the script that makes it."""

from __future__ import annotations

from pathlib import Path

import torch

from torch_hybrid_backend import export
from torch_hybrid_backend.factory import Factory

MODELS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, sign):
        super().__init__()
        torch.manual_seed(0)
        self.sign = sign
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    def forward(self, x, *, shift):
        y = self.layers(x)
        return {"logits": (y + shift) * self.sign, "size": 3}

def make(sign=1.0):
    return Model(sign).eval(), (torch.randn(2, 3, 4, 4),), {"shift": torch.ones(2, 5)}

def other():
    return make(-1.0)
"""


def exported_to(folder: Path) -> Path:
    """The file of the model that `make` of `MODELS` returns."""
    script = folder / "model_for_a_file.py"
    script.write_text(MODELS)
    model, args, kwargs = Factory(f"{script}:make").load()()
    assert isinstance(model, torch.nn.Module)
    options = {"placement": "estimate", "strict": True}
    return export(model, tuple(args), folder / "model.hybrid", kwargs=kwargs, options=options).path
