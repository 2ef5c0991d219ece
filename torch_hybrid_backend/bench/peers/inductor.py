"""Inductor, the default backend of `torch.compile`."""

from __future__ import annotations

import torch
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import LacksError, Prepared, Setting, pytorch
from torch_hybrid_backend.torch_private import inductor_config, load_inductor

load_inductor()  # counts as import time, not as compile time


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    """`torch.compile(model)`."""
    if setting.is_int8 and not inductor_config.freezing:
        raise LacksError(f"its {setting.precision} needs weights taken as constants: see inductor, freezing")
    return pytorch.prepared(model, inputs, setting, torch.compile)
