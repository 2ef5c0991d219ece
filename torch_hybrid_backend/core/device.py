"""Device: where tensors live and kernels run, as a value.

Device("cpu")          the host: it has one memory, whatever its index
Device("cuda", 1)      the second GPU
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """A device by `type`, as torch names it ("cpu", "cuda", "meta"), and `index`, from 0.

    Two devices of one type and different index have different memories: a region never has values of both.
    """

    type: str
    index: int = 0

    @staticmethod
    @functools.cache  # each tensor of a graph asks
    def of(device: torch.device) -> Device:
        """The device that torch means; tensors always tell their index, and a bare "cuda" counts as the first."""
        return Device(device.type, device.index or 0)

    @staticmethod
    def parse(text: str) -> Device:
        """The device that `str` wrote; RuntimeError for another text."""
        return Device.of(torch.device(text))

    @property
    def is_host(self) -> bool:
        """True if the host reads its memory directly."""
        return self.type == "cpu"

    def __str__(self) -> str:
        """Name as torch writes it: "cpu", "cuda:0"."""
        return self.type if self.is_host else f"{self.type}:{self.index}"


CPU = Device("cpu")
