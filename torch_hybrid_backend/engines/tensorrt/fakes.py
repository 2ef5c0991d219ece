"""Tensors without data for tracing a graph anew. They are on the host, and their size symbols are independent of the user's program.

    fakes = Fakes()
    x = fakes.tensor(TensorSpec((symbol("s0"), 4), "float32", (4, 1), Device("cuda")))      # on the CPU, 4 columns, any number of rows
    graph = fakes.traced(lambda x: x.exp(), [x])
    fakes.assumptions()                                                                 # about sizes, made by tracing

If tracing decides something by the example of a size, Dynamo would guard the user's graph by that decision. Here `assumptions` lists the
decisions, so that callers can refuse the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.graph.tracing import traced
from torch_hybrid_backend.sizes.size import Dim, evaluate, symbols
from torch_hybrid_backend.torch_private import ConstantSource, FakeTensorMode, ValueRanges


class Fakes:
    """A fake mode and its sizes. `examples`: symbol name -> example; a symbol without one has its hint as example. `most`: symbol name -> upper
    bound, if known."""

    def __init__(
        self, examples: Mapping[str, int] = MappingProxyType({}), most: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self._examples = examples
        self._most = most
        self._environment = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        self._sizes: dict[str, torch.SymInt] = {}

    def size(self, size: Dim) -> int | torch.SymInt:
        """A size as an int, or as a SymInt of this mode."""
        if isinstance(size, int):
            return size
        for each in symbols([size]):
            if each.name not in self._sizes:
                # PyTorch would specialize examples 0 and 1.
                self._sizes[each.name] = self._symbol(each.name, max(2, self._examples.get(each.name, each.hint)))
        return evaluate(size, self._sizes)  # type: ignore[arg-type]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor with the spec's sizes and strides, on the CPU whatever the spec's device is."""
        shape, strides = ([self.size(n) for n in sizes] for sizes in (spec.shape, spec.strides))
        with self.mode:
            return torch.empty_strided(shape, strides, dtype=spec.torch_dtype, device="cpu")

    def traced(
        self,
        function: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        decompositions: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    ) -> torch.fx.GraphModule:
        """The graph of a function of tensors of this mode. New tensors are on the CPU, whatever the user's default device is."""
        with torch.device("cpu"), self.mode:
            return traced(function, inputs, decompositions, _allow_non_fake_inputs=True)

    def assumptions(self) -> list[str]:
        """Assumptions about sizes that tracing made by their examples, as texts."""
        replaced = [f"{old} = {new}" for old, new in self._environment.replacements.items()]
        return replaced + [str(guard.expr) for guard in self._environment.guards]

    def _symbol(self, name: str, hint: int) -> torch.SymInt:
        source = ConstantSource(name)
        made = self._environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        if self._most.get(name, 0) > hint:  # PyTorch would replace a symbol that has one value
            self._environment.var_to_range[made] &= ValueRanges(2, self._most[name])
        size = self._environment.create_symintnode(made, hint=hint, source=source)
        assert isinstance(size, torch.SymInt)
        return size
