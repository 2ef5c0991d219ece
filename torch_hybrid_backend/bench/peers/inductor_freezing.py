"""Inductor with freezing: weights are constants (`torch._inductor.config.freezing`)."""

from __future__ import annotations

from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import FLOAT32, Prepared, Setting, inductor
from torch_hybrid_backend.torch_private import inductor_config


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    """`torch.compile(model)` with freezing. Below float32 also with max-autotune: without it, inductor tries only oneDNN's kernels for
    bfloat16, integers and packed weights, not its own."""
    inductor_config.freezing = True
    inductor_config.max_autotune = setting.precision != FLOAT32
    return inductor.prepare(model, inputs, setting)
