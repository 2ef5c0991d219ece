"""PyTorch's own compiler, with its default settings."""

from __future__ import annotations

import torch
import torch._inductor.compile_fx  # with the imports, not with the first compilation
from torch import nn

from benchmarks.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    """`torch.compile(model)`."""
    compiled = torch.compile(model)
    return Prepared(lambda: compiled(*inputs))
