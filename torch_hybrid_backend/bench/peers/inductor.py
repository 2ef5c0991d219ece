"""PyTorch's own compiler, with its default settings."""

from __future__ import annotations

import torch
import torch._inductor.compile_fx  # with the imports, not with the first compilation
import torch._inductor.config
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import LacksError, Prepared, Setting, pytorch


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    """`torch.compile(model)`."""
    if setting.is_int8 and not torch._inductor.config.freezing:
        raise LacksError(f"its {setting.precision} needs weights taken as constants: see inductor, freezing")
    return pytorch.prepared(model, inputs, setting, torch.compile)
