"""A peer that answers fast, and wrong in one element."""

from __future__ import annotations

from torch import nn

from benchmarks.models import tensors
from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    results = [value.clone() for value in tensors(inputs.call(model))]
    results[0].view(-1)[0] += 0.5
    return Prepared(lambda: results)
