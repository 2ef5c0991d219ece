"""Convolution networks, trained on scikit-learn's digits (1,797 real ones of 8 x 8 pixels, here 32 x 32), read shifted, rotated and noisy ones.

500 of the digits are held out; 20 fixed distortions of each are 10,000 images, so that 0.1 points are 10 images.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.accuracy.task import Call, Prepared, batches, trained
from benchmarks.models import Size, from_transformers

_SIDE = 32
_BATCH = 50
_NETWORKS = {
    "resnet50": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [1, 2, 1, 1], "num_labels": 10},
        {"num_labels": 10},
    ),
    "mobilenet_v2": (
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"depth_multiplier": 0.35, "image_size": _SIDE, "num_labels": 10},
        {"image_size": _SIDE, "num_labels": 10},
    ),
}


class Classifier(nn.Module):
    """The scores of one of the networks: images (batch, 3, 32, 32) -> (batch, 10)."""

    def __init__(self, name: str, size: Size) -> None:
        super().__init__()
        self.network = from_transformers(*_NETWORKS[name])(size)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.network(images).logits
        return scores


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """(1797, 1, 8, 8) float32 from 0 to 1, and what they show; in an order drawn once."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.images).float()[order, None] / 16, torch.from_numpy(digits.target)[order]


def _distorted(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Turned by up to 20 degrees, shifted by up to a sixth of a side, with noise of 0.15; (n, 3, 32, 32)."""
    turn, right, down = (torch.rand(3, len(images), generator=generator) * 2 - 1) * torch.tensor(
        [[math.pi / 9], [1 / 3], [1 / 3]]
    )
    affine = torch.stack(
        (torch.stack((turn.cos(), -turn.sin(), right), -1), torch.stack((turn.sin(), turn.cos(), down), -1)), 1
    )
    grid = functional.affine_grid(affine, [len(images), 1, _SIDE, _SIDE], align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False)
    noisy = moved + 0.15 * torch.randn(moved.shape, generator=generator)
    return noisy.expand(-1, 3, -1, -1).contiguous()


def _train(images: torch.Tensor, labels: torch.Tensor, epochs: int) -> Callable[[nn.Module], None]:
    def train(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        steps = epochs * (len(images) // _BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        model.train()
        for _ in range(epochs):
            order = torch.randperm(len(images), generator=generator)
            for (chosen,) in batches(order, size=_BATCH):
                loss = functional.cross_entropy(model(_distorted(images[chosen], generator)), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()

    return train


def prepare(name: str, size: Size) -> Prepared:
    images, labels = _digits()
    held_out, epochs, copies = (500, 24, 20) if size == "full" else (100, 10, 2)
    seen, target = images[held_out:], labels[held_out:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = trained(Classifier(name, size), f"{name}-{size}", sys.modules[__name__], _train(seen, target, epochs))
    generator = torch.Generator().manual_seed(2)
    inputs = batches(_distorted(images[:held_out].repeat(copies, 1, 1, 1), generator), size=_BATCH)
    wanted = labels[:held_out].repeat(copies)

    def judge(call: Call) -> torch.Tensor:
        with torch.no_grad():
            guesses = torch.cat([call(*batch).argmax(1) for batch in inputs])
        return (guesses == wanted).double()

    return Prepared(model, tuple(batches(_distorted(seen[: 8 * _BATCH], generator), size=_BATCH)), judge)
