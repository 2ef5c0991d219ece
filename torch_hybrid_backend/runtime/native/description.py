"""The description of a plan: the one text that goes to the C++ runtime, where csrc/src/plan.cc reads it.

Enters: what `runtime.plan_layout` laid out. Leaves: JSON. Most of it is the steps' own (`core.program.Step.describe`); a new kind of step
changes nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import Step
from torch_hybrid_backend.core.tensor_spec import TensorSpec

# Raised whenever the description changes; csrc/src/plan.cc refuses another one.
VERSION = 1


class ValueKind(StrEnum):
    """Place of a value of a plan, by the names that csrc/src/value.cc knows."""

    INPUT = "input"  # payload: position among the plan's inputs; copied where its strides differ from the expected ones
    CONSTANT = "constant"  # payload: slot of the binding
    ARENA = "arena"  # payload: byte offset in the arena of its device
    FRESH = "fresh"
    RETURNED = "returned"
    ALIAS = "alias"  # payload: the value whose memory it shares
    RAW_INPUT = "raw_input"  # payload: as INPUT; passed to callbacks as it is


@dataclass(frozen=True, slots=True)
class PlanValue:
    """See csrc/include/value.h; `payload` is 0 where the kind has none. The spec is static."""

    kind: ValueKind
    payload: int
    spec: TensorSpec
    offset: int = 0  # elements before its first one, of an alias or a constant


@dataclass(frozen=True, slots=True)
class PlanStep:
    """A step over the plan's values, and the device that it runs on."""

    step: Step
    device: Device = CPU


@dataclass(frozen=True, slots=True)
class TitledSteps:
    """Profilers show the steps from number `first` to those of the next title as `title`."""

    first: int
    title: str


@dataclass(frozen=True, slots=True)
class PlanDescription:
    """A plan as data. `inputs` and `constants` count the inputs of a call and the slots of a binding; `outputs` are values.

    `arenas`: bytes by device, where any.
    """

    values: Sequence[PlanValue]
    steps: Sequence[PlanStep]
    inputs: int
    constants: int
    outputs: Sequence[int]
    arenas: Mapping[Device, int]
    titles: Sequence[TitledSteps] = ()

    def text(self, opened: Callable[[str, str], str]) -> str:
        """The JSON. `opened(member, path)` gives the name under which C++ opens a step's "library" or "module"."""
        return json.dumps(
            {
                "version": VERSION,
                "values": [_value(value) for value in self.values],
                "steps": [_step(step, opened) for step in self.steps],
                "ranges": [(title.first, title.title) for title in self.titles],
                "arenas": [(str(device), size_bytes) for device, size_bytes in self.arenas.items()],
                "inputs": self.inputs,
                "constants": self.constants,
                "outputs": self.outputs,
            },
            ensure_ascii=False,
            separators=(",", ":"),
        )


def _value(value: PlanValue) -> tuple[Any, ...]:
    spec = value.spec
    described = (value.kind, value.payload, spec.dtype, spec.shape, spec.strides, str(spec.device))
    return (*described, value.offset) if value.offset else described


def _step(planned: PlanStep, opened: Callable[[str, str], str]) -> dict[str, Any]:
    described = planned.step.describe()
    for part in (described, *described.get("launches", ())):
        for member in ("library", "module"):
            if member in part:
                part[member] = opened(member, part[member])
    if not planned.device.is_host:
        described["device"] = str(planned.device)
    return described
