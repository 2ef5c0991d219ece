"""Watches of modules: whether a module, its attributes, its submodules and theirs are as they were.

Leaves: `watches()`, the C++ functions, and `Step`, with its kinds.

Python numbers the states of dictionaries (PEP 509), and C++ compares these numbers (`csrc/torch/module_watch.h`). Where the number lies in a
dictionary is found by changing one, and tried on a module before it is believed. A Python that has no such numbers, or does not count each
change of a module, has no watches.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.runtime.native.module import native_module
from torch_hybrid_backend.torch_private import DisableTorchFunction, without_modes

log = logging.getLogger(__name__)

DICTIONARY, MODULE, TENSOR, OWN_TENSOR = range(4)
# (parent, key or None, position, kind), as in module_watch.h. The first is the module itself, tensors come last.
Step = tuple[int, str | None, int, int]


@dataclass(frozen=True, slots=True)
class Watches:
    """The C++ functions.

    take(module, steps): a watch of the module as it is now, or None where it is not as the steps say.
    unchanged(watch, module): True if the module is the one that was taken, and nothing that the steps pass has changed.
    times_unchanged(watch): how often that was so.
    guard(state): a guard of a frame that asks watches (`ModuleGuard` in python_module.cc).
    """

    take: Callable[[object, tuple[Step, ...]], object | None]
    unchanged: Callable[[object, object], bool]
    times_unchanged: Callable[[object], int]
    guard: Callable[[list[Any]], Callable[[Mapping[str, Any]], bool]]


@functools.cache
def watches() -> Watches | None:
    """The functions, or None where this Python's dictionaries do not tell of changes."""
    native = native_module()
    offset = None if native is None else _tag_offset()
    if native is not None and offset is not None:
        found = Watches(
            take=functools.partial(native.watch_module, offset),
            unchanged=native.module_unchanged,
            times_unchanged=native.times_unchanged,
            guard=native.module_guard,
        )
        # Outside of whatever modes the first caller is in: on plain tensors.
        with torch.inference_mode(False), DisableTorchFunction(), without_modes():
            if _sees_changes(found):
                return found
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


class _Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.inner: nn.Module = nn.ReLU()
        self.weight = nn.Parameter(torch.zeros(2, 2, device="cpu"))

    def count(self) -> None:
        self.number += 1


def _sees_changes(found: Watches) -> bool:
    """True if each way to change a module is seen, and none to read one."""
    probe: Any = _Probe()
    steps: tuple[Step, ...] = (
        *((0, None, 0, MODULE), (0, "_modules", 0, DICTIONARY), (1, None, 0, MODULE)),
        *((0, "_parameters", 0, DICTIONARY), (3, "weight", 0, TENSOR)),
    )

    def is_seen(change: Callable[[], object]) -> bool:
        watch = found.take(probe, steps)
        if watch is None or not found.unchanged(watch, probe):
            return False
        change()
        return not found.unchanged(watch, probe)

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
        lambda: setattr(probe.weight, "data", probe.weight.data.T),
        probe.double,
    ]
    reads: list[Callable[[], object]] = [lambda: probe.inner, lambda: list(probe.modules()), lambda: probe.training]
    return all(map(is_seen, changes)) and not any(map(is_seen, reads))
