"""A small network and data set that the training loops of other libraries train here."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, BATCH = 12, 8


def network() -> nn.Module:
    """A convolution, a batch norm, two linear layers; the same weights on each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 36, 16),
        nn.GELU(),
        nn.Linear(16, 3),
    )


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    """`STEPS` batches of images and labels, the same on each call."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS * BATCH, 1, 6, 6, generator=generator)
    labels = (images.mean((1, 2, 3)) * 20).round().clamp(-1, 1).long() + 1
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH)


def plain_loop() -> tuple[nn.Module, list[float]]:
    """Trained in eager, by a loop written out: the reference. Returns the network and its losses."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for images, labels in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def assert_trained_alike(model: nn.Module, losses: list[float], reference: tuple[nn.Module, list[float]]) -> None:
    """Losses step by step, and in the end parameters and running statistics, equal those of the reference."""
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference[1]), rtol=1e-3, atol=1e-4)
    for (name, ours), theirs in zip(model.state_dict().items(), reference[0].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
