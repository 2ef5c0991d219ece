"""Answers to torch_tensorrt's questions to torch.cuda at import, for a machine without a GPU: engines can be built there, not run.

Importing this module installs the answers. `build` is the builder for build processes of tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

if not torch.cuda.is_available():
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.current_device = lambda: 0
    if not hasattr(torch._C, "_CudaDeviceProperties"):
        torch._C._CudaDeviceProperties = type("_CudaDeviceProperties", (), {})


def build(request: bytes, going_on: Callable[[float], bool]) -> bytes:
    """Build as `engines.tensorrt.build.build` does."""
    from torch_hybrid_backend.engines.tensorrt.build import build as real

    return real(request, going_on)
