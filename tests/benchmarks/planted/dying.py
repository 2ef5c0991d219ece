"""A peer whose native code takes the process down."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

from benchmarks.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("unreachable")
