"""A peer whose native code takes the process down."""

from __future__ import annotations

import os
import signal

from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("unreachable")
