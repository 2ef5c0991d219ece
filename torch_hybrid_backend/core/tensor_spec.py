"""TensorSpec: what is known of a tensor without its data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# A size or stride: a number, or the text of a symbolic expression ("s0", "2*s0") known only at run time.
Dim = int | str


def _dim(value: int | torch.SymInt) -> Dim:
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression) if expression.is_number else str(expression)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and strides in elements, dtype as torch names it ("float32"), device type ("cpu", "cuda").

    Example: `TensorSpec.of(torch.empty(2, 3))` is `TensorSpec((2, 3), "float32", (3, 1), "cpu")`.
    """

    shape: tuple[Dim, ...]
    dtype: str
    strides: tuple[Dim, ...]
    device: str = "cpu"

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a real or fake strided tensor."""
        return TensorSpec(
            tuple(_dim(size) for size in tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tuple(_dim(stride) for stride in tensor.stride()),
            tensor.device.type,
        )

    @property
    def is_static(self) -> bool:
        """Whether every size and stride is a number."""
        return all(isinstance(dim, int) for dim in self.shape + self.strides)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def numel(self) -> int:
        """Number of elements; the spec must be static."""
        return math.prod(int(size) for size in self.shape)

    @property
    def span(self) -> int:
        """Elements of storage from the first to the last one addressed, both included; 0 when empty."""
        if self.numel == 0:
            return 0
        return 1 + sum((int(n) - 1) * int(s) for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def size_bytes(self) -> int:
        return self.span * self.torch_dtype.itemsize
