"""The description of a plan: the one text that goes to the C++ runtime, where csrc/src/plan.cc reads it.

Enters: what `runtime.plan_layout` laid out. Leaves: JSON. Sizes known only at run time are expressions in it, which
csrc/include/plan_template.h reads. Most of it is the steps' own (`core.program.Step.describe`); a new kind of step
changes nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import Step
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.sizes.size import Atom, Dim, Monomial, Size, Symbol

# Raised whenever the description changes; csrc/src/plan.cc refuses another one.
VERSION = 1

# A size as csrc/include/size_table.h reads it, in JSON: a number, the name of a symbol, or an operation and its operands.
Expression = int | str | list[Any]


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
    """See csrc/include/value.h; `payload` is 0 where the kind has none, and in an arena that is planned for each set of sizes."""

    kind: ValueKind
    payload: int
    spec: TensorSpec
    offset: Dim = 0  # elements before its first one, of an alias or a constant


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
class Life:
    """A value in an arena, alive from step `first` to step `last`, both included."""

    value: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class PlanDescription:
    """A plan as data. `inputs` and `constants` count the inputs of a call and the slots of a binding; `outputs` are values.

    `arenas`: bytes by device, where any; 0 in a plan with sizes known only at run time, which are expressions over `symbols`, and whose arenas
    are planned for each set of sizes by `lives`. `plans`: those that control flow runs. They have no plans of their own: their steps run plans
    that come before them. All have the same `constants`, and their callbacks are numbered together.
    """

    values: Sequence[PlanValue]
    steps: Sequence[PlanStep]
    inputs: int
    constants: int
    outputs: Sequence[int]
    arenas: Mapping[Device, int]
    titles: Sequence[TitledSteps] = ()
    lives: Mapping[Device, Sequence[Life]] = field(default_factory=dict)
    symbols: Sequence[str] = ()
    plans: Sequence[PlanDescription] = ()

    @property
    def all_steps(self) -> list[Step]:
        """The steps, and those of `plans`."""
        return [planned.step for plan in (self, *self.plans) for planned in plan.steps]

    def text(self, opened: Callable[[str, str], str]) -> str:
        """The JSON. `opened(member, path)` gives the name under which C++ opens a step's "library" or "module"."""
        sizes: dict[Dim, int] = {}  # number of each that occurs

        def number(size: object) -> dict[str, int]:
            if not isinstance(size, Size):
                raise TypeError(f"a plan's description cannot have {size!r}")
            return {"size": sizes.setdefault(size, len(sizes))}

        described = {"version": VERSION, **self._plain(opened, lives=bool(self.symbols))}
        if self.plans:
            described["plans"] = [plan._plain(opened, lives=bool(self.symbols)) for plan in self.plans]
        text = json.dumps(described, default=number, ensure_ascii=False, separators=(",", ":"))
        return f"{text[:-1]},{size_table(self.symbols, map(expression, sizes))[1:]}" if self.symbols else text

    def _plain(self, opened: Callable[[str, str], str], *, lives: bool) -> dict[str, Any]:
        described = {
            "values": [_value(value) for value in self.values],
            "steps": [_step(step, opened) for step in self.steps],
            "ranges": [(title.first, title.title) for title in self.titles],
            "arenas": [(str(device), size_bytes) for device, size_bytes in self.arenas.items()],
            "inputs": self.inputs,
            "constants": self.constants,
            "outputs": self.outputs,
        }
        if lives:
            described["lives"] = [
                [(life.value, life.first, life.last) for life in self.lives.get(device, ())] for device in self.arenas
            ]
        return described


def size_table(names: Iterable[str], sizes: Iterable[Expression]) -> str:
    """JSON text of sizes over symbols of these names, as csrc/include/size_table.h reads it."""
    return json.dumps({"symbols": list(names), "sizes": list(sizes)}, separators=(",", ":"))


def expression(size: Dim) -> Expression:
    """A size in JSON."""
    if isinstance(size, int):
        return size
    return _operation("+", [_product(monomial, factor) for monomial, factor in size.terms.items()])


def span(spec: TensorSpec) -> Expression:
    """The span of a tensor in JSON."""
    return ["span", list(map(expression, spec.shape)), list(map(expression, spec.strides))]


def _product(monomial: Monomial, factor: int) -> Expression:
    factors = [_atom(atom) for atom, power in monomial for _ in range(power)]
    return _operation("*", factors if factor == 1 and factors else [*factors, factor])


def _atom(atom: Atom) -> Expression:
    if isinstance(atom, Symbol):
        return atom.name
    name = {"floordiv": "//", "mod": "%"}.get(atom.name, atom.name)
    return [name, expression(atom.left), expression(atom.right)]


def _operation(name: str, operands: list[Expression]) -> Expression:
    return operands[0] if len(operands) == 1 else [name, *operands]


def _value(value: PlanValue) -> tuple[Any, ...]:
    spec = value.spec
    described = (value.kind, value.payload, spec.dtype, spec.shape, spec.strides, str(spec.device))
    return described if value.offset == 0 else (*described, value.offset)


def _step(planned: PlanStep, opened: Callable[[str, str], str]) -> dict[str, Any]:
    described = planned.step.describe()
    for part in (described, *described.get("launches", ())):
        for member in ("library", "module"):
            if member in part:
                part[member] = opened(member, part[member])
    if not planned.device.is_host:
        described["device"] = str(planned.device)
    return described
