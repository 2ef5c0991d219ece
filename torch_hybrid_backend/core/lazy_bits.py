"""The bits of a tensor that say how its memory is read: conjugated, or negated.

`z.conj()` and `z.conj().imag` copy nothing: they are views of the memory of `z` with such a bit. Sizes, strides, dtype and storage do not tell
them from other views. So whoever makes a view anew, or copies what a traced graph is to read, takes the bits from the trace or from the
original. Kernels read memory as it is: values with a bit are for eager alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_hybrid_backend.torch_private import conjugate_view, negative_view


@dataclass(frozen=True, slots=True)
class LazyBits:
    """`conjugate` as `Tensor.is_conj()`, `negative` as `Tensor.is_neg()`."""

    conjugate: bool = False
    negative: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> LazyBits:
        """The bits of a tensor, real or fake."""
        return LazyBits(tensor.is_conj(), tensor.is_neg())

    def __bool__(self) -> bool:
        return self.conjugate or self.negative

    def are_of(self, tensor: torch.Tensor) -> bool:
        """True if the tensor has these bits. It costs calls less than a comparison with `of`."""
        return tensor.is_conj() is self.conjugate and tensor.is_neg() is self.negative

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The memory of a tensor, read with these bits; the tensor itself where it has them."""
        view = memory if memory.is_conj() is self.conjugate else conjugate_view(memory)
        return view if view.is_neg() is self.negative else negative_view(view)

    def copy_of(self, value: torch.Tensor) -> torch.Tensor:
        """The same numbers in memory of their own, with these bits; strides as `torch.preserve_format` has them."""
        return self.view_of(torch.empty_like(value, memory_format=torch.preserve_format)).copy_(value)


def copied(value: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own, with its bits, which `clone` resolves."""
    return LazyBits.of(value).copy_of(value)
