"""The part of a call that comes after the plan has run: inputs and states that change, and the results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_hybrid_backend.artifact.manifest import (
    CopyUpdate,
    Entry,
    Form,
    LiteralResult,
    Origin,
    Result,
    TensorForm,
    ViewResult,
)
from torch_hybrid_backend.core.lazy_bits import LazyBits, copied
from torch_hybrid_backend.runtime.native.row_writes import write_rows

# Tensor of an origin in the call at hand.
Find = Callable[[Origin], torch.Tensor]

_BITS = {
    "conj": LazyBits(conjugate=True),
    "neg": LazyBits(negative=True),
    "conj neg": LazyBits(True, True),
    "": LazyBits(),
}


def bits_in_words(bits: LazyBits) -> str:
    """The text of a `ViewResult` for these bits."""
    return next(text for text, each in _BITS.items() if each == bits)


def finish(entry: Entry, find: Find) -> list[Any]:
    """Carry out the entry's updates, then return its results. Raises IndexError for a position outside of a state or input."""
    tensors: list[torch.Tensor] = []
    rows: list[tuple[int, int, int, int]] = []
    for update in entry.updates:
        target = find(update.target)
        if isinstance(update, CopyUpdate):
            target.copy_(find(("output", update.output)))
        else:
            first = len(tensors)
            tensors += (target, find(update.index), find(update.source))
            rows.append((first, update.dim, first + 1, first + 2))
    if rows:
        write_rows(tensors, rows)
    return [_value(entry, result, find) for result in entry.results]


def finisher(entry: Entry) -> Callable[[Find], list[Any]] | None:
    """`finish` for an entry, or None where the results are the plan's outputs as they are."""
    outputs = [result.origin for result in entry.results if isinstance(result, Result)]
    if (
        not entry.updates
        and len(outputs) == len(entry.results)
        and outputs == [("output", k) for k in range(len(outputs))]
    ):
        return None
    return functools.partial(finish, entry)


def _value(entry: Entry, result: Result | LiteralResult | ViewResult, find: Find) -> Any:
    if isinstance(result, LiteralResult):
        return result.value
    tensor = find(result.origin)
    if result.origin[0] == "constant":
        tensor = copied(tensor)  # the caller may write to it
    if isinstance(result, Result):
        return tensor
    if result.origin[0] == "input":
        tensor = _with_strides(tensor, entry.inputs[result.origin[1]])
    view = tensor.as_strided(result.sizes, result.strides, tensor.storage_offset() + result.offset)
    return _BITS[result.bits].view_of(view)


def _with_strides(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """The tensor, or a copy of it where its strides are others than a view of it was exported for."""
    assert isinstance(form, TensorForm), "a view is of a tensor"
    if tensor.stride() == form.strides:
        return tensor
    sizes, strides = (tuple(map(int, each)) for each in (form.sizes, form.strides))  # those of a call are known
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype).copy_(tensor)
