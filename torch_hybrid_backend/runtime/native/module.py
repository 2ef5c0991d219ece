"""The C++ runtime as a Python module: its functions that are called with tensors, past PyTorch's dispatcher.

Leaves: `native_module()`, with `snapshot` and `unchanged` (see `tensor_states`) and `run` (see `native.Plan`).

LibTorch's stable interface has no function from a Python tensor to the C++ one or back, nor one for version counters. Where the C++ tensor lies
in its Python object is found by looking for its known address, and tried before it is believed; where this torch or Python should be of
another kind, there is no module, and callers go the dispatcher's way and read tensors one by one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from typing import Any

import torch

from torch_hybrid_backend.torch_private import DisableTorchFunction, TensorBase, without_modes

log = logging.getLogger(__name__)


@functools.cache
def native_module() -> Any | None:
    """The C++ functions, or None where they do not read this torch's tensors."""
    try:
        module = importlib.import_module("torch_hybrid_backend._runtime")
    except ImportError as error:
        log.info("tensors are read from Python, for the C++ runtime is no module of this Python: %s", error)
        return None
    # Outside of whatever modes the caller is in: plain tensors that count versions.
    with torch.inference_mode(False), DisableTorchFunction(), without_modes():
        offset = payload_offset()
        if offset is not None and module.learn(offset, torch.Tensor, torch.nn.Parameter) and _reads_rightly(module):
            return module
    log.info("the tensors of torch %s are read from Python: a call takes up to 0.2 ms more", torch.__version__)
    return None


def payload_offset() -> int | None:
    """Bytes from the start of a tensor's Python object to the pointer that is its C++ tensor; None where it holds no such pointer."""
    tensor = torch.empty(3, device="cpu")
    word = ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_void_p * (TensorBase.__basicsize__ // word)).from_address(id(tensor))
    places = [index for index, value in enumerate(words) if value == tensor._cdata]
    return places[0] * word if len(places) == 1 else None


def _reads_rightly(module: Any) -> bool:
    """True if changes of memory and version are seen, and nothing else, in a tensor and in a parameter."""
    for tensor in (torch.zeros(3, device="cpu"), torch.nn.Parameter(torch.zeros(3, device="cpu"), requires_grad=False)):
        inputs = [tensor]
        taken = module.snapshot(inputs, (0,), b"\1")
        if taken is None or not module.unchanged(taken, inputs) or not module.unchanged(taken, [tensor.detach()]):
            return False
        tensor.add_(1)
        if module.unchanged(taken, inputs):
            return False
        taken = module.snapshot(inputs, (0,), b"\1")
        tensor.data = torch.zeros(3, device="cpu")
        if taken is None or module.unchanged(taken, inputs):
            return False
    return True
