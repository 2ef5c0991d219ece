"""AMD's plugin: the backend "zentorch" of torch.compile, weights taken as constants."""

from __future__ import annotations

import torch
import torch._inductor.config
import zentorch  # registers its backend
from torch import nn

from benchmarks.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    """`torch.compile(model, backend="zentorch")` with freezing, as AMD's guide has it for inference."""
    torch._inductor.config.freezing = True
    compiled = torch.compile(model, backend=zentorch.__name__)
    return Prepared(lambda: compiled(*inputs))
