"""The target of kernels: a GPU's architecture, or Triton's interpreter. Pickled on its way to the worker processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """`capability`: NVIDIA's compute capability times ten (90: Hopper). `multiprocessors`: how many there are. `tf32`, `convolution_tf32`: what
    float32 products and convolutions multiply may be rounded to TF32, as torch's settings say. `is_interpreted`: the programs for such a
    GPU are run by Triton's interpreter on the CPU. `random_blocks`: how many blocks PyTorch's own kernels that draw random numbers have there
    at most; 0 where eager's numbers are not those of such kernels, as on a CPU."""

    capability: int
    multiprocessors: int = 1
    tf32: bool = False
    is_interpreted: bool = False
    convolution_tf32: bool = False
    random_blocks: int = 0

    @property
    def has_large_tiles(self) -> bool:
        """True if tiles are as large as may be: the interpreter takes as long for a large one as for a small one."""
        return self.capability == 0

    @property
    def fingerprint(self) -> str:
        where = f"sm_{self.capability} {self.multiprocessors} multiprocessors"
        marks = {
            "tf32": self.tf32,
            "tf32 convolutions": self.convolution_tf32,
            "interpreted": self.is_interpreted,
        }
        return " ".join([where, *(mark for mark, is_set in marks.items() if is_set)])

    @property
    def programs(self) -> int:
        """The number of programs wanted at least, where there is as much work: two for each multiprocessor."""
        return 1 if self.has_large_tiles else 2 * self.multiprocessors

    @property
    def elements(self) -> int:
        """Elements of a tile of a kernel that is bound by memory: 8 for each of 128 threads."""
        return 1 << 16 if self.has_large_tiles else 1024


# For whole models, on the CPU.
INTERPRETER = Target(0, is_interpreted=True)
