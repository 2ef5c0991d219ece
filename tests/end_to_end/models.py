"""Small models the end-to-end tests compile."""

from __future__ import annotations

import torch
from torch import nn


def convolutional() -> nn.Module:
    """Convolutions, a batch norm with statistics of its own, a residual connection, a classifier."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 24, 3, stride=2, padding=1)
            self.norm = nn.BatchNorm2d(24)
            self.body = nn.Conv2d(24, 24, 3, padding=1, groups=24)
            self.head = nn.Linear(24, 7)
            nn.init.uniform_(self.norm.running_mean)
            nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.norm(self.stem(x)))
            return self.head((x + self.body(x)).mean((2, 3)))

    return Residual().eval()


def perceptron() -> nn.Module:
    """Two linear layers, an activation, a layer norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 56), nn.GELU(), nn.LayerNorm(56), nn.Linear(56, 9)).eval()


def images(batch: int = 2) -> torch.Tensor:
    """(batch, 3, 20, 20) float32."""
    return torch.randn(batch, 3, 20, 20, generator=torch.Generator().manual_seed(1))


def rows(batch: int = 6) -> torch.Tensor:
    """(batch, 40) float32."""
    return torch.randn(batch, 40, generator=torch.Generator().manual_seed(1))
