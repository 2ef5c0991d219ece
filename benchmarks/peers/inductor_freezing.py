"""PyTorch's own compiler with weights taken as constants (`torch._inductor.config.freezing`)."""

from __future__ import annotations

import torch
import torch._inductor.config
from torch import nn

from benchmarks.peers import Prepared, Setting, inductor


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    """`torch.compile(model)` with freezing."""
    torch._inductor.config.freezing = True
    return inductor.prepare(model, inputs, setting)
