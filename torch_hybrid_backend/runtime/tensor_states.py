"""Whether tensors are where they were, with the version they had: read in C++, as Python reads them but for all in one call.

Enters: a call's inputs, and the positions of those to look at. Leaves: a function that tells of another
call's inputs whether they are the same. Reading the 262 tensors of MobileNetV2 took Python 190 us of each call of 3.3 ms, C++ 24: between
two calls the kernels put all that the interpreter needs out of the caches.

LibTorch's stable interface has no function from a Python tensor to the C++ one, nor one for version counters. Where the C++ tensor lies in
its Python object is found by looking for its known address, and tried before it is believed; where this torch or Python should be
of another kind, there are no snapshots, and callers read tensors one by one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_hybrid_backend.runtime import native

log = logging.getLogger(__name__)


def snapshot(
    inputs: Sequence[Any], positions: Sequence[int], guarded: AbstractSet[int]
) -> Callable[[Sequence[Any]], bool] | None:
    """Tells of another call's inputs whether the tensors at `positions` have the memory, and those `guarded` the versions, of these.

    It answers False where it cannot tell. None where there is nothing to compare with: `inputs` is no list, or one of the tensors is
    no plain one or parameter, or counts no versions. It keeps no tensor alive: ask only while the memory is still theirs.
    Raises HybridError where the C++ runtime cannot be loaded.
    """
    module = _module()
    if module is None:
        return None
    taken = module.snapshot(inputs, tuple(positions), bytes(position in guarded for position in positions))
    # Partial, and so all C: each Python function that a call goes through is one more to fetch into the caches.
    return None if taken is None else functools.partial(module.unchanged, taken)


@functools.cache
def _module() -> Any | None:
    """The C++ functions, or None where they do not read this torch's tensors."""
    native.load()  # into torch, before Python opens it as a module
    try:
        module = importlib.import_module("torch_hybrid_backend._runtime")
    except ImportError as error:
        log.info("tensors are read from Python, for the C++ runtime is no module of this Python: %s", error)
        return None
    # Outside of whatever modes the caller is in: plain tensors that count versions.
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), _disable_current_modes():
        offset = _payload_offset()
        if offset is not None and module.learn(offset, torch.Tensor, torch.nn.Parameter) and _reads_rightly(module):
            return module
    log.info("the tensors of torch %s are read from Python: a call takes up to 0.2 ms more", torch.__version__)
    return None


def _payload_offset() -> int | None:
    """Bytes from the start of a tensor's Python object to the pointer that is its C++ tensor; None where it holds no such pointer."""
    tensor = torch.empty(3, device="cpu")
    word = ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_void_p * (torch._C.TensorBase.__basicsize__ // word)).from_address(id(tensor))
    places = [index for index, value in enumerate(words) if value == tensor._cdata]
    return places[0] * word if len(places) == 1 else None


def _reads_rightly(module: Any) -> bool:
    """Whether changes of memory and version are seen, and nothing else, in a tensor and in a parameter."""
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
