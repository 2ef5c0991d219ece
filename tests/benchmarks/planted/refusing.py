"""A peer that cannot convert the model, and says so at length."""

from __future__ import annotations

from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    raise NotImplementedError("no rule for aten.sigmoid\nthe whole graph: ...")
