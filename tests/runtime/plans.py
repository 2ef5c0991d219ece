"""Plans put together value by value and step by step, for tests of the C++ runtime."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import Callback, Copy, KernelCall, Step
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.runtime.native import ops
from torch_hybrid_backend.runtime.native.description import (
    PlanDescription,
    PlanStep,
    PlanValue,
    TitledSteps,
    ValueKind,
)
from torch_hybrid_backend.runtime.native.ops import Plan


class Draft:
    """A plan while it is put together; `seal` makes it. `callbacks` are its functions."""

    def __init__(self, callbacks: Sequence[ops.Callback] = ()) -> None:
        self._callbacks = callbacks
        self._values: list[PlanValue] = []
        self._steps: list[PlanStep] = []
        self._titles: list[TitledSteps] = []

    def add_value(
        self,
        kind: ValueKind,
        payload: int,
        dtype: torch.dtype,
        sizes: Sequence[int],
        strides: Sequence[int],
        device: Device = CPU,
    ) -> int:
        """Returns the number of the new value. `sizes` and `strides` are in elements."""
        spec = TensorSpec(tuple(sizes), str(dtype).removeprefix("torch."), tuple(strides), device)
        self._values.append(PlanValue(kind, payload, spec))
        return len(self._values) - 1

    def add(self, step: Step, device: Device = CPU) -> None:
        self._steps.append(PlanStep(step, device))

    def add_kernel(self, library: str, symbol: str, values: Sequence[int]) -> None:
        self.add(KernelCall(library, symbol, tuple(values), 1))

    def add_callback(self, function: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.add(Callback(function, tuple(inputs), tuple(outputs)))

    def add_copy(self, source: int, destination: int) -> None:
        self.add(Copy(source, destination))

    def add_range(self, name: str) -> None:
        """Profilers show the steps added from here to the next range, or the end, as `name`."""
        self._titles.append(TitledSteps(len(self._steps), name))

    def describe(self, inputs: int, constants: int, arena_bytes: int, outputs: Sequence[int]) -> PlanDescription:
        """The plan as data. `inputs` and `constants` count the inputs of a call and the slots of a binding."""
        arenas = {CPU: arena_bytes}
        return PlanDescription(self._values, self._steps, inputs, constants, outputs, arenas, self._titles)

    def seal(self, inputs: int, constants: int, arena_bytes: int, outputs: Sequence[int]) -> Plan:
        """The plan that `describe` describes."""
        return Plan(self.describe(inputs, constants, arena_bytes, outputs), self._callbacks)
