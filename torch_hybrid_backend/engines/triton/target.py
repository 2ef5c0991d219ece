"""What kernels are compiled for: a GPU's architecture, or Triton's interpreter. Pickled on its way to the worker processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """`capability`: NVIDIA's compute capability times ten (90: Hopper), 0 for Triton's interpreter on the CPU. `tf32`: float32 products may be
    rounded to TF32, as torch's setting says. `multiprocessors`: how many programs run at once, at least."""

    capability: int
    multiprocessors: int = 1
    tf32: bool = False

    @property
    def is_interpreted(self) -> bool:
        return self.capability == 0

    @property
    def fingerprint(self) -> str:
        where = "interpreter" if self.is_interpreted else f"sm_{self.capability}"
        return f"{where} {self.multiprocessors} multiprocessors{' tf32' if self.tf32 else ''}"

    @property
    def programs(self) -> int:
        """How many programs are wanted at least, where there is as much work: two for each multiprocessor. Interpreted, each costs time."""
        return 1 if self.is_interpreted else 2 * self.multiprocessors

    @property
    def elements(self) -> int:
        """Of a tile of a kernel that is bound by memory: 8 for each of 128 threads. An interpreted program costs the same for a few more."""
        return 1 << 16 if self.is_interpreted else 1024
