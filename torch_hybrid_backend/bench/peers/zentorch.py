"""AMD's plugin: the backend "zentorch" of `torch.compile`, with freezing."""

from __future__ import annotations

import functools

import torch
import zentorch  # registers its backend
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import LacksError, Prepared, Setting, pytorch
from torch_hybrid_backend.torch_private import inductor_config


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    """`torch.compile(model, backend="zentorch")` with freezing, as AMD's guide recommends for inference. int8: PT2E graphs of torchao, as in
    AMD's example of a recommender."""
    if setting.weight_bits is not None:
        raise LacksError(f"it documents no {setting.precision}: packed weights are for vLLM alone")
    inductor_config.freezing = True
    return pytorch.prepared(model, inputs, setting, functools.partial(torch.compile, backend=zentorch.__name__))
