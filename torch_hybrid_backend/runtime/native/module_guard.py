"""Guards that hold while modules, their attributes, their submodules and theirs are as they were.

Leaves: `module_guard()`, which makes one, and `Step`, with its kinds.

Python numbers the states of dictionaries (PEP 509), and C++ compares these numbers (`csrc/torch/module_watch.h`). Where the number lies in a
dictionary is found by changing one, and where dispatch keys lie in a C++ tensor by tensors of several keys; both are tried on a module before
they are believed. With a Python that has no such numbers, or does not count each change of a module, there are no such guards.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from torch_hybrid_backend.runtime.native.module import native_module, payload_offset
from torch_hybrid_backend.torch_private import (
    DisableTorchFunction,
    count_torch_dispatch_modes,
    dispatch_keys,
    negative_view,
    thread_key_sets,
    without_modes,
)

log = logging.getLogger(__name__)

DICTIONARY, MODULE, TENSOR, OWN_TENSOR = range(4)
# (parent, key or None, position, kind), as in module_watch.h. The first is the module itself, tensors come last.
Step = tuple[int, str | None, int, int]
# (name, namespace of a global variable or None for a local one, steps).
Root = tuple[str, Mapping[str, Any] | None, tuple[Step, ...]]
# A C++ tensor has no fewer.
_WORDS_OF_A_TENSOR = 24


class ModuleGuard(Protocol):
    """A guard of a frame (`csrc/torch/module_guard.h`)."""

    def check(self, local_variables: Mapping[str, Any], /) -> bool:
        """True if nothing that the steps pass has changed, nor the thread's modes, since Dynamo's guards held, or if they hold now."""

    def forget(self) -> None:
        """Have the next check ask Dynamo's guards."""

    def counts(self) -> tuple[int, bool]:
        """Return (how often Dynamo's guards were asked, whether they alone are from now on)."""


@functools.cache
def module_guard() -> Callable[[tuple[Root, ...], tuple[str, ...], Any], ModuleGuard] | None:
    """A function of (roots, others, Dynamo's guards), or None where this Python's dictionaries do not tell of changes.

    roots: the modules. others: names of local variables that must be none of their tensors of kind OWN_TENSOR.
    """
    native = native_module()
    # Outside of whatever modes the first caller is in: on plain tensors.
    with torch.inference_mode(False), DisableTorchFunction(), without_modes():
        offsets = (_tag_offset(), _keys_offset(), payload_offset())
        if native is not None and None not in offsets:
            types = (torch.Tensor, torch.nn.Parameter)

            def make(roots: tuple[Root, ...], others: tuple[str, ...], guards: Any) -> ModuleGuard:
                made: ModuleGuard = native.ModuleGuard(
                    *offsets, types, roots, others, thread_key_sets, count_torch_dispatch_modes, guards
                )
                return made

            if _sees_changes(make):
                return make
    log.info("modules are guarded by Dynamo alone: this Python does not number the states of dictionaries")
    return None


def _tag_offset() -> int | None:
    """Bytes from a dictionary's start to the number of its state; None where it has none."""
    word = ctypes.sizeof(ctypes.c_uint64)
    held = {"a": 1}
    words = (ctypes.c_uint64 * (dict.__basicsize__ // word)).from_address(id(held))
    before = list(words)
    held["a"] = 2  # the value alone: how many there are, and where they lie, stays
    changed = [index for index, value in enumerate(words) if value != before[index]]
    return changed[0] * word if len(changed) == 1 else None


def _keys_offset() -> int | None:
    """Bytes from a C++ tensor's start to its set of dispatch keys; None where it is at no one place."""
    plain = torch.zeros(2, device="cpu", dtype=torch.complex64)
    with torch.inference_mode():
        inference = torch.zeros(2, device="cpu")
    tensors = [plain, plain.conj(), negative_view(plain), inference, torch.zeros(2, device="meta")]
    expected = [dispatch_keys(tensor).raw_repr() for tensor in tensors]
    word = ctypes.sizeof(ctypes.c_uint64)
    for index in range(_WORDS_OF_A_TENSOR):
        if [ctypes.c_uint64.from_address(t._cdata + index * word).value for t in tensors] == expected:
            return index * word
    return None


class _Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.inner: nn.Module = nn.ReLU()
        self.weight = nn.Parameter(torch.zeros(2, 2, device="cpu", dtype=torch.complex64))

    def count(self) -> None:
        self.number += 1


def _sees_changes(make: Callable[..., ModuleGuard]) -> bool:
    """True if each way to change a module is seen, and none to read one."""
    probe: Any = _Probe()
    steps: tuple[Step, ...] = (
        *((0, None, 0, MODULE), (0, "_modules", 0, DICTIONARY), (1, None, 0, MODULE)),
        *((0, "_parameters", 0, DICTIONARY), (3, "weight", 0, TENSOR)),
    )

    def is_seen(change: Callable[[], object]) -> bool:
        guard = make((("probe", None, steps),), (), SimpleNamespace(check=lambda variables: True))
        seen = []
        for do in (lambda: None, lambda: None, change):
            do()
            guard.check({"probe": probe})
            seen.append(guard.counts()[0])
        return seen == [1, 1, 2]

    changes: list[Callable[[], object]] = [
        *[probe.count] * 40,  # after some calls Python runs other instructions
        lambda: setattr(probe, "number", 5),
        lambda: object.__setattr__(probe, "number", 6),
        lambda: vars(probe).update(number=7),
        lambda: vars(probe).pop("number"),
        lambda: probe.train(False),
        lambda: setattr(probe.inner, "inplace", True),
        lambda: setattr(probe, "inner", nn.ReLU()),
        lambda: vars(probe).__setitem__("_modules", dict(probe._modules)),
        lambda: setattr(probe, "__dict__", dict(vars(probe))),
        lambda: setattr(probe.inner, "__class__", nn.ReLU6),
        lambda: probe.requires_grad_(False),
        lambda: setattr(probe.weight, "mark", True),
        lambda: setattr(probe.weight, "data", probe.weight.data.T),
        lambda: setattr(probe.weight, "data", probe.weight.data.conj()),
        lambda: setattr(probe.weight, "data", negative_view(probe.weight.data.clone())),
        lambda: setattr(probe.weight, "data", probe.weight.data.to(torch.complex128)),
    ]
    reads: list[Callable[[], object]] = [lambda: probe.inner, lambda: list(probe.modules()), lambda: probe.training]
    return all(map(is_seen, changes)) and not any(map(is_seen, reads))
