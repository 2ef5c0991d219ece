"""Devices' default random generators: what programs take of them in a call, and runs repeated with the same numbers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.errors import HybridError

_T = TypeVar("_T")
# Two calls shall not take the same numbers. PyTorch's own lock of a generator cannot be held from Python: an operator that draws in another
# thread at this very moment can take numbers that a call takes as well.
_taking = threading.Lock()
_GROUP = 4  # the offset of a generator counts numbers, which kernels draw by so many


def default_generator(device: Device) -> torch.Generator:
    """The generator that operators on the device draw from where none is given. Raises HybridError where this package knows of none."""
    if device.is_host:
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    raise HybridError(f"random numbers are drawn on the CPU and on CUDA, not on {device}")


def is_captured(device: Device) -> bool:
    """Whether the caller captures the device's current stream into a CUDA graph. The state of a generator is then on the device, where only
    PyTorch's operators advance it with each replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, slots=True)
class Taken:
    """Takes numbers of a device's generator, of the Philox family: a callback of a plan.

    `groups`: how many groups of four numbers each operator takes. A call returns the seed, and for each operator how many groups were taken
    before it: int64, without dimensions, on the CPU. Raises HybridError during the capture of a CUDA graph, which would have the same numbers
    in each replay.
    """

    device: Device
    groups: tuple[int, ...]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if is_captured(self.device):
            raise HybridError(
                "kernels draw no random numbers while a CUDA graph is captured: eager has to run the call"
            )
        generator = default_generator(self.device)
        with _taking:
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + _GROUP * sum(self.groups))
        counters = itertools.accumulate(self.groups[:-1], initial=offset // _GROUP)
        # As int64: a seed may have all 64 bits.
        signed = seed - (1 << 64) if seed >> 63 else seed
        return [torch.tensor(number, dtype=torch.int64, device="cpu") for number in (signed, *counters)]


class Replay:
    """Several runs of one piece of work on a device, which draw the same numbers, and after which the generator is as one run leaves it.

    `draws`: whether it draws any; where it does not, and during a capture, which allows none of this, nothing is done. Not for threads: others
    that draw meanwhile draw these numbers too.
    """

    def __init__(self, device: Device, *, draws: bool) -> None:
        self._generator = default_generator(device) if draws and not is_captured(device) else None
        self._before = self._state()
        self._left: list[torch.Tensor] = []  # by each whole run

    def run(self, call: Callable[[], _T]) -> _T:
        """What a whole run returns."""
        self.rewind()
        result = call()
        self._left += self._state()
        return result

    @property
    def agrees(self) -> bool:
        """Whether the last whole run left the generator as the first one did."""
        return not self._left or torch.equal(self._left[0], self._left[-1])

    def rewind(self) -> None:
        """The generator as it was before the runs."""
        self._put(self._before)

    def finish(self) -> None:
        """The generator as the first whole run left it, or as it was where there was none."""
        self._put(self._left or self._before)

    def _state(self) -> list[torch.Tensor]:
        return [] if self._generator is None else [self._generator.get_state()]

    def _put(self, states: Sequence[torch.Tensor]) -> None:
        if self._generator is not None:
            self._generator.set_state(states[0])
