"""Arguments that overlap in other ways than when the graph was compiled.

AOTAutograd compiles for the aliases that it sees while tracing. Where it saw none, nothing guards that there are none, and where
it saw some, nothing guards the size of the memory they lie in (torch 2.13: with aot_eager and inductor, too, the former gives wrong
results, the latter errors). Such a call is run by Dynamo's own graph in eager. Only functions that write to arguments are concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.torch_private import TracingContext


def watch_overlaps(
    compiled: Callable[..., Any], gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """`compiled`; where it writes to arguments, a function that calls it only while they lie in memory as when it was compiled, else `gm`.

    Called after compilation, while torch's tracing context is there to tell what is written to. Parameters and buffers do not count:
    their module would have to share them with an argument.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return compiled
    strided = [
        k for k, given in enumerate(example_inputs) if isinstance(given, torch.Tensor) and given.layout is torch.strided
    ]
    if len(metadata.input_info) != len(example_inputs):
        return _with_same_bases(compiled, gm, example_inputs, strided)
    tensors = [k for k in strided if k not in metadata.static_input_indices]
    written = frozenset(k for k in tensors if metadata.input_info[k].mutates_data)
    if not written or len({_storage(example_inputs[k]) for k in tensors}) < len(tensors):
        return compiled

    def watched(*inputs: Any) -> Any:
        if len({_address(inputs[k]) for k in tensors}) < len(tensors) and _overlap(inputs, tensors, written):
            return gm(*inputs)
        return compiled(*inputs)

    return watched


def _with_same_bases(
    compiled: Callable[..., Any], gm: torch.fx.GraphModule, example_inputs: Sequence[Any], tensors: Sequence[int]
) -> Callable[..., Any]:
    """AOTAutograd replaced inputs that overlapped by the memory they lie in: it must be as large, and they at the same places in it."""

    def places(inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
        first: dict[int, int] = {}
        storages = [(k, inputs[k].untyped_storage()) for k in tensors]
        owners = [first.setdefault(storage._cdata, k) for k, storage in storages]
        shared = {owner for k, owner in zip(tensors, owners, strict=True) if owner != k}
        return [
            (k, owner, inputs[k].storage_offset(), storage.nbytes())
            for (k, storage), owner in zip(storages, owners, strict=True)
            if owner in shared
        ]

    expected = places(example_inputs)

    def watched(*inputs: Any) -> Any:
        return compiled(*inputs) if places(inputs) == expected else gm(*inputs)

    return watched


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlap(inputs: Sequence[Any], tensors: Sequence[int], written: frozenset[int]) -> bool:
    """True if the memory from the first to the last element of a written input meets that of another one."""
    spans = {k: _span(inputs[k]) for k in tensors}
    return any(spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1] for a in written for b in tensors if a != b)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
