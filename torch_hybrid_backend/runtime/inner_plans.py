"""Control flow as steps: saved plans of bodies become plans within the saved plan of the graph that calls them.

Enters: a `SavedPlan` with callbacks that run control flow, and what each of them calls. Leaves: a `SavedPlan` with `Branch` and `Loop` in their
place. Slots and functions of all plans are numbered together, so that one binding and one list of callbacks serve them all. Operands that
bodies do not read, as they have packed them, are inputs of no plan any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torch_hybrid_backend.core.hoisted_inputs import CallInput
from torch_hybrid_backend.core.program import NULL, Branch, Loop, Step, TensorArgument
from torch_hybrid_backend.core.program import Callback as CallbackStep
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import NotExportableError
from torch_hybrid_backend.runtime.executor import PlanOutput, SavedPlan
from torch_hybrid_backend.runtime.native.description import PlanDescription, PlanStep, PlanValue, ValueKind

_INPUTS = (ValueKind.INPUT, ValueKind.RAW_INPUT)


@dataclass(frozen=True, slots=True, eq=False)
class ControlFlow:
    """A call of a control flow operator by a callback.

    bodies: the plans of the branches, if true and if false, or of the condition and the body of a loop. predicate: that of a branch, as a
    position among the callback's inputs; None for a loop. operands: the inputs of the bodies, likewise; None for what is no tensor.
    carried: how many of the first operands a loop carries. results: of each of the callback's outputs, the number of the operator's result.
    """

    bodies: tuple[SavedPlan, SavedPlan]
    predicate: int | None
    operands: tuple[int | None, ...]
    carried: int
    results: tuple[int, ...]


def with_control_flow(saved: SavedPlan, calls: Mapping[int, ControlFlow]) -> SavedPlan:
    """The plan with steps in place of the callbacks of these numbers. Raises NotExportableError for a body whose outputs are no tensors."""
    whole = _Whole(saved)
    steps = []
    for planned in saved.description.steps:
        step = planned.step
        if isinstance(step, CallbackStep) and step.function in calls:
            steps.append(replace(planned, step=whole.step(step, calls[step.function])))
        else:
            steps.append(planned)
    return whole.finished(steps, calls.keys())


class _Whole:
    """A plan that grows by those of bodies."""

    def __init__(self, saved: SavedPlan) -> None:
        self._saved = saved
        self._values = list(saved.description.values)
        self._inputs = list(saved.inputs)
        self._slots = list(saved.slots)
        self._functions = dict(saved.functions)
        self._plans = list(saved.description.plans)
        self._symbols = dict.fromkeys(saved.description.symbols)

    def step(self, callback: CallbackStep, call: ControlFlow) -> Branch | Loop:
        """The step in place of a callback; its bodies become plans."""
        read = {
            source.position
            for body in call.bodies
            for source in (*body.inputs, *body.outputs)
            if isinstance(source, CallInput)
        }
        kept = [at for at in range(len(call.operands)) if at < call.carried or at in read]
        inputs = [self._operand(callback, call.operands[at]) for at in kept]
        given: dict[int | torch.Tensor, int] = {at: number for number, at in enumerate(kept)}
        for body in call.bodies:
            for source in (*body.inputs, *body.outputs):
                if isinstance(source, torch.Tensor) and source not in given:
                    given[source] = len(inputs)
                    inputs.append(self._tensor(source))
        specs = [self._values[value].spec for value in inputs]

        def number(body: SavedPlan, results: Sequence[int]) -> int:
            return self._add(body, results, given, specs)

        first, second = call.bodies
        if call.predicate is not None:
            numbers = number(first, call.results), number(second, call.results)
            return Branch(numbers, tuple(inputs), callback.outputs, callback.inputs[call.predicate])
        numbers = number(first, [0]), number(second, range(call.carried))
        outputs = [NULL] * call.carried
        for result, value in zip(call.results, callback.outputs, strict=True):
            outputs[result] = value
        return Loop(numbers, tuple(inputs), tuple(outputs))

    def finished(self, steps: Sequence[PlanStep], replaced: Collection[int]) -> SavedPlan:
        """The whole plan."""
        functions = {n: function for n, function in self._functions.items() if n not in replaced}
        plans = [replace(plan, constants=len(self._slots)) for plan in self._plans]
        description = replace(
            self._saved.description,
            values=self._values,
            steps=steps,
            inputs=len(self._inputs),
            constants=len(self._slots),
            symbols=tuple(self._symbols),
            plans=plans,
        )
        whole = replace(
            self._saved,
            description=description,
            functions=functions,
            inputs=tuple(self._inputs),
            slots=tuple(self._slots),
        )
        return _without_unread_inputs(whole)

    def _operand(self, callback: CallbackStep, position: int | None) -> int:
        if position is None:
            raise NotExportableError("its control flow hands a number to what it calls: hand over a tensor")
        return callback.inputs[position]

    def _tensor(self, tensor: torch.Tensor) -> int:
        """A value that is always this tensor."""
        self._inputs.append(tensor)
        self._values.append(PlanValue(ValueKind.RAW_INPUT, len(self._inputs) - 1, TensorSpec.of(tensor)))
        return len(self._values) - 1

    def _add(
        self,
        body: SavedPlan,
        results: Sequence[int],
        given: Mapping[int | torch.Tensor, int],
        specs: Sequence[TensorSpec],
    ) -> int:
        """Number of the plan of a body with these of its outputs. `given`: the number of each of its inputs; `specs`: their forms."""
        slots, functions, plans = len(self._slots), max(self._functions, default=-1) + 1, len(self._plans)
        self._slots += body.slots
        self._functions.update({functions + n: function for n, function in body.functions.items()})
        self._symbols.update(dict.fromkeys(body.description.symbols))

        def moved(description: PlanDescription) -> PlanDescription:
            return _moved(description, slots, functions, plans)

        def number(source: object) -> int:
            if isinstance(source, CallInput):
                return given[source.position]
            if isinstance(source, torch.Tensor):
                return given[source]
            raise NotExportableError(f"what its control flow calls returns {source!r}: return a tensor")

        self._plans += map(moved, body.description.plans)
        description = moved(body.description)
        values = [
            replace(value, payload=number(body.inputs[value.payload])) if value.kind in _INPUTS else value
            for value in description.values
        ]
        outputs = []
        for source in (body.outputs[result] for result in results):
            if isinstance(source, PlanOutput):
                outputs.append(description.outputs[source.number])
            else:
                outputs.append(len(values))
                values.append(PlanValue(ValueKind.RAW_INPUT, number(source), specs[number(source)]))
        self._plans.append(
            replace(description, values=values, inputs=len(specs), outputs=outputs, titles=(), symbols=(), plans=())
        )
        return len(self._plans) - 1


def _moved(description: PlanDescription, slots: int, functions: int, plans: int) -> PlanDescription:
    """The plan with its slots, functions and inner plans numbered from these numbers on."""

    def step(old: Step) -> Step:
        if isinstance(old, CallbackStep):
            return replace(old, function=old.function + functions)
        if isinstance(old, Branch | Loop):
            first, second = old.plans
            return replace(old, plans=(first + plans, second + plans))
        return old

    values = [
        replace(value, payload=value.payload + slots) if value.kind is ValueKind.CONSTANT else value
        for value in description.values
    ]
    steps = [replace(planned, step=step(planned.step)) for planned in description.steps]
    return replace(description, values=values, steps=steps)


def _without_unread_inputs(saved: SavedPlan) -> SavedPlan:
    """The plan without inputs that nothing reads."""
    description = saved.description
    values = description.values

    def root(number: int) -> int:
        return values[number].payload if values[number].kind is ValueKind.ALIAS else number

    read = set(map(root, description.outputs))
    for step in (planned.step for planned in description.steps):
        read.update(map(root, (*step.memory, *(tensor.buffer for tensor in step.tensors))))
    kept = [n for n, value in enumerate(values) if value.kind not in _INPUTS or n in read]
    inputs = sorted({values[n].payload for n in kept if values[n].kind in _INPUTS})
    number = {old: new for new, old in enumerate(kept)}
    position = {old: new for new, old in enumerate(inputs)}

    def value(old: PlanValue) -> PlanValue:
        moved: Callable[[int], int] = {
            ValueKind.ALIAS: number.__getitem__,
            **dict.fromkeys(_INPUTS, position.__getitem__),
        }.get(old.kind, lambda payload: payload)
        return replace(old, payload=moved(old.payload))

    def tensor(argument: TensorArgument) -> int:
        return number[argument.buffer]

    lives = {
        device: [replace(life, value=number[life.value]) for life in some] for device, some in description.lives.items()
    }
    described = replace(
        description,
        values=[value(values[n]) for n in kept],
        steps=[replace(each, step=each.step.over(number.__getitem__, tensor)) for each in description.steps],
        inputs=len(inputs),
        outputs=[number[n] for n in description.outputs],
        lives=lives,
    )
    return replace(saved, description=described, inputs=tuple(saved.inputs[n] for n in inputs))
