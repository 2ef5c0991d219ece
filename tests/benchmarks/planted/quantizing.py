"""A peer that tells what it was asked for, and answers as far off as integers of so many bits would."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models import tensors
from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    """Off by a hundredth in 8 bits; a constant, which is no answer, with weights of 4."""
    expected = tensors(inputs.call(model))
    factor = {"int8": 1.01, "int4-weights": -1.0}.get(setting.precision, 1.0)
    results = [value * factor for value in expected]
    others = [not torch.equal(item.args[0], inputs.args[0]) for item in setting.calibration]
    return Prepared(
        lambda: results, lambda: {"asked": setting.precision, "calibrated": len(others), "others": all(others)}
    )
