"""PyTorch as it is, without gradients."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    """The model itself."""
    return Prepared(lambda: model(*inputs))
