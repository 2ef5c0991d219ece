"""A peer that cannot convert the model, and says so at length."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    raise NotImplementedError("no rule for aten.sigmoid\nthe whole graph: ...")
