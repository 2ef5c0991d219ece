"""Reading the values of size symbols from the inputs of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.sizes.forms import linear
from torch_hybrid_backend.sizes.size import Dim


class SizeReader:
    """Places of size symbols: in a size among the inputs, or in a dimension of a tensor.

    inputs: what each input is (a tensor's spec, a size, or None for what is neither). needed: names of symbols.
    Raises HybridError where a symbol cannot be told from the inputs.
    """

    def __init__(self, inputs: Sequence[TensorSpec | Dim | None], needed: Iterable[str]) -> None:
        found: dict[str, tuple[int, int, int, int]] = {}  # name -> (input, dimension or -1, factor, offset)
        for position, described in enumerate(inputs):
            dims = described.shape if isinstance(described, TensorSpec) else (described,)
            for dimension, size in enumerate(dims):
                if (solved := linear(size)) is not None and solved[0] not in found:
                    place = dimension if isinstance(described, TensorSpec) else -1
                    found[solved[0]] = (position, place, solved[1], solved[2])
        needed = tuple(needed)
        if missing := [name for name in needed if name not in found]:
            raise HybridError(f"the sizes {', '.join(missing)} cannot be told from the inputs")
        self.names = needed
        self._places = tuple(found[name] for name in needed)

    def read(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The values of `names` in this call."""
        return tuple(
            ((int(inputs[i]) if d < 0 else inputs[i].shape[d]) - offset) // factor
            for i, d, factor, offset in self._places
        )

    def values(self, inputs: Sequence[Any]) -> Mapping[str, int]:
        """Values of the symbols, as `read` gives them, by name."""
        return dict(zip(self.names, self.read(inputs), strict=True))
