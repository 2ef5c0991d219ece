"""TensorSpec: what is known of a tensor without its data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.sizes.forms import from_sympy
from torch_hybrid_backend.sizes.size import MAX_INTEGER, MAX_SIZE, Dim, Interval, evaluate, size_hint, symbol, symbols


def dim(value: int | torch.SymInt) -> Dim:
    """A size or stride of a tensor, real or fake, as a number or a `Size`; installs no guard.

    What has no form as a `Size`, or depends on data (unbacked symbols, ragged dimensions), becomes a symbol that only the
    expression's text names.
    """
    if isinstance(value, int):
        return value
    node = value.node
    expression, environment = node.expr, node.shape_env
    # The name changed with torch 2.12.
    known: Mapping[Any, Any] = getattr(environment, "backed_var_to_val", None)  # type: ignore[assignment]
    known = environment.var_to_val if known is None else known
    # A nested tensor's ragged dimension has a size that is no number.
    if not all(s in known and known[s].is_Integer for s in expression.free_symbols):
        return symbol(f"[{expression}]")
    size = from_sympy(expression, lambda s: symbol(str(s), int(known[s]), *_range(environment, s)))
    return symbol(f"[{expression}]") if size is None else size


def _range(environment: Any, symbol: Any) -> Interval:
    """The least and the most value for which Dynamo's guards let a call through; of a dimension of a tensor, for which kernels serve it."""
    from torch_hybrid_backend.torch_private import (
        TensorPropertySource,  # it imports all of Dynamo, which is there where a symbol is
    )

    values = environment.var_to_range[symbol]
    is_dimension = any(isinstance(source, TensorPropertySource) for source in environment.var_to_sources[symbol])
    most = MAX_SIZE if is_dimension else MAX_INTEGER
    low, high = (int(end) if end.is_Integer else None for end in (values.lower, values.upper))
    if is_dimension:
        low = 0  # Dynamo compiles sizes of 0 and 1 apart, kernels serve them all the same
    return -most - 1 if low is None else low, most if high is None else min(high, most)


def is_computable(size: Dim) -> bool:
    """True if a size follows from the sizes of the graph's inputs: it does not depend on data, and has a form of its own."""
    return isinstance(size, int) or not any(s.name.startswith("[") for s in symbols([size]))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and strides in elements, dtype as torch names it ("float32"), device by type and index.

    Example: `TensorSpec.of(torch.empty(2, 3))` is `TensorSpec((2, 3), "float32", (3, 1), Device("cpu"))`.
    """

    shape: tuple[Dim, ...]
    dtype: str
    strides: tuple[Dim, ...]
    device: Device

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a real or fake strided tensor."""
        return TensorSpec(
            tuple(map(dim, tensor.shape)),
            str(tensor.dtype).removeprefix("torch."),
            tuple(map(dim, tensor.stride())),
            Device.of(tensor.device),
        )

    @property
    def is_static(self) -> bool:
        """True if every size and stride is a number."""
        return all(isinstance(size, int) for size in self.shape + self.strides)

    @property
    def is_computable(self) -> bool:
        """True if every size and stride follows from the sizes of the graph's inputs."""
        return all(map(is_computable, self.shape + self.strides))

    def at(self, values: Mapping[str, int]) -> TensorSpec:
        """The static spec for values of the size symbols, by name; KeyError for one that is missing."""
        if self.is_static:
            return self
        shape = tuple(evaluate(size, values) for size in self.shape)
        return TensorSpec(shape, self.dtype, tuple(evaluate(s, values) for s in self.strides), self.device)

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

    @property
    def typical_bytes(self) -> int:
        """Bytes of its elements; sizes known only at run time count as in the call that was traced."""
        return math.prod(map(size_hint, self.shape)) * self.torch_dtype.itemsize
